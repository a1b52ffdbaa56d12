"""Who answers in the terminal: a model loaded in this process, or a server that speaks /v1/chat/completions."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import http.client
import json
import os
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..core.errors import ConfigError, ContextTooLong, TokenmillError, Unavailable
from ..core.sampling import CHAT_TOKENS
from ..core.units import format_count, format_names
from .server_url import read_url

if TYPE_CHECKING:
    from ..llm.llm import LLM

Message = dict[str, Any]
KEYS = ("TOKENMILL_API_KEY", "OPENAI_API_KEY")
"""Variables of the environment with the key for a server, where --api-key gives none."""

_NEEDS_KEY = (
    f"Give its key by --api-key, or in the environment as {' or '.join(KEYS)}; for a server of yours, `tokenmill keys "
    "create NAME` makes one."
)
_TIMEOUT_S = 300.0
_SMALL_PARAMETERS = 10**9
_MAX_SHOWN = 8


class Drafted(NamedTuple):
    """Steps that verified drafts, how many drafts, and how many of these were accepted."""

    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0


class Said(NamedTuple):
    """A piece of an answer. thought: reasoning that came before it; warning: why it was ended here; finish: in its last
    piece, how it has ended. drafted: since the piece before. num_in_all: tokens of the whole answer, where that is told
    at its end."""

    text: str
    num_tokens: int
    thought: str = ""
    warning: str = ""
    finish: str = ""
    drafted: Drafted = Drafted()
    num_in_all: int = 0


class Partner(Protocol):
    """name, num_parameters: of the model; 0: it is not told. reads_images: whether messages may have any; None: it has
    to be tried."""

    name: str
    num_parameters: int

    @property
    def reads_images(self) -> bool | None: ...

    def answer(self, messages: list[Message]) -> Iterator[Said]:
        """The answer piece by piece."""
        ...


class LocalPartner:
    """Without a number of the user's, an answer is shown up to CHAT_TOKENS, or as far as the context has room."""

    reads_images = False

    def __init__(self, llm: LLM, overrides: dict[str, Any]) -> None:
        self.name = llm.ready.model
        self.num_parameters = llm.text.info.num_parameters
        self._llm = llm
        self._is_bounded = overrides["max_tokens"] == CHAT_TOKENS
        self._sampling = llm.default_sampling(**_without_default(overrides))

    def answer(self, messages: list[Message]) -> Iterator[Said]:
        from ..api.openai.shape import delta_of

        num_shown = 0
        with contextlib.closing(self._llm.stream(messages, self._sampling)) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                delta = delta_of(piece.parts)
                warning = piece.warning.get("warning", "")
                num_shown += len(piece.tokens)
                is_cut = self._is_bounded and num_shown >= CHAT_TOKENS and piece.finish_reason is None
                if is_cut:
                    warning = f"The answer was ended after {num_shown:,} tokens; -n says after how many, -1 never."
                content, thought = delta.get("content", ""), delta.get("reasoning", "")
                steps = piece.draft_steps
                drafted = Drafted(len(steps), sum(num for num, _ in steps), sum(accepted for _, accepted in steps))
                yield Said(content, len(piece.tokens), thought, warning, piece.finish_reason or "", drafted)
                if is_cut:
                    return


def _without_default(overrides: dict[str, Any]) -> dict[str, Any]:
    """Without CHAT_TOKENS, which an answer need not have room for, and for which a server has a number of its own."""
    return overrides | {"max_tokens": None} if overrides.get("max_tokens") == CHAT_TOKENS else overrides


def _num_parameters(card: Any) -> int:
    """As this program's servers and llama-server tell it; 0 where a server does not."""
    meta = card.get("meta")
    told = meta.get("n_params") if isinstance(meta, dict) else 0
    return told if isinstance(told, int) else 0


def tell_if_small(num_parameters: int) -> None:
    """On a terminal, once for a command that shows answers."""
    if 0 < num_parameters < _SMALL_PARAMETERS and sys.stderr.isatty():
        print(
            f"tokenmill: this model is small ({format_count(num_parameters)} parameters): quick, and often wrong. "
            "Better ones: tokenmill list --available",
            file=sys.stderr,
        )


def is_among(model: str, names: Sequence[str]) -> bool:
    """Whether a server with these models answers to that name; Ollama's tag `latest` may be there or not."""
    return model.removesuffix(":latest") in (each.removesuffix(":latest") for each in names)


class ServerPartner:
    """Speaks OpenAI's API with the standard library alone.

    overrides: fields of each call; None: left out. model: one that the server lists; "": the first. restarted: starts
    the server again where it has gone, and gives its URL. guards_loops: have it end what repeats itself, if it can.
    asks_usage: have it tell tokens at the end of an answer, which not every server of others knows how to be asked."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        overrides: dict[str, Any],
        model: str = "",
        restarted: Callable[[], str] | None = None,
        guards_loops: bool = False,
        asks_usage: bool = False,
    ) -> None:
        self._find(url)
        self._restarted = restarted
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._fields = {name: value for name, value in _without_default(overrides).items() if value is not None}
        cards = self._cards()
        self.models = [str(card["id"]) for card in cards]
        self.name = model or self.models[0]
        if not is_among(self.name, self.models):
            likely = difflib.get_close_matches(model, self.models, 1)
            hint = f"did you mean {likely[0]}?" if likely else f"it has: {format_names(self.models, _MAX_SHOWN)}."
            raise ConfigError(f"{self._where} has no model {model!r}; {hint}", param="model")
        self.num_parameters = _num_parameters(next((card for card in cards if card["id"] == self.name), {}))
        is_ours = cards[0].get("owned_by") == "tokenmill"
        if guards_loops and is_ours:
            self._fields["loop_guard"] = True
        if asks_usage or is_ours:
            self._fields["stream_options"] = {"include_usage": True}

    def _find(self, url: str) -> None:
        self._url = read_url(url, "--url", "http://127.0.0.1:8000/v1")
        self._base = urllib.parse.urlsplit(url if "://" in url else f"http://{url}").path.rstrip("/") or "/v1"

    def _cards(self) -> list[Any]:
        """All models that the server lists; there is one. Raises ConfigError, Unavailable."""
        with self._send("GET", f"{self._base}/models", None) as response:
            try:
                cards = list(json.load(response)["data"])
                has_ids = all(card["id"] for card in cards)
            except (ValueError, LookupError, TypeError, http.client.HTTPException):
                has_ids = False
            if not has_ids:
                raise ConfigError(f"{self._where} does not list its models as OpenAI's API does.", param="url")
        if not cards:
            raise ConfigError(f"{self._where} has no model now.", param="url")
        return cards

    @property
    def reads_images(self) -> bool | None:
        """As llama-server tells of itself, and what has its /props."""
        try:
            with self._send("GET", f"{self._base.removesuffix('/v1')}/props", None) as response:
                return bool(json.load(response)["modalities"]["vision"])
        except (Unavailable, ValueError, LookupError, TypeError, http.client.HTTPException):
            return None

    def answer(self, messages: list[Message]) -> Iterator[Said]:
        body = {"model": self.name, "messages": messages, "stream": True, **self._fields}
        with self._send("POST", f"{self._base}/chat/completions", body) as response:
            try:
                for line in response:
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    if line.startswith(b"data:"):
                        yield from _said(json.loads(data))
            except (OSError, http.client.HTTPException) as error:
                raise Unavailable(f"The connection broke off ({type(error).__name__}).") from None
            except (ValueError, LookupError, TypeError, AttributeError):
                raise Unavailable(f"{self._where} does not stream as OpenAI's API does.") from None
            # http.client takes a connection that ends between chunks for the end of the body.
            raise Unavailable("The connection broke off before the answer was complete.")

    @property
    def _where(self) -> str:
        return self._url.host if self._url.port is None else f"{self._url.host}:{self._url.port}"

    @contextlib.contextmanager
    def _send(self, method: str, path: str, body: Any) -> Iterator[http.client.HTTPResponse]:
        """One call, on a connection of its own. Raises Unavailable unless it is answered with 200."""
        data = None if body is None else json.dumps(body)
        with contextlib.ExitStack() as held:
            try:
                try:
                    response = self._begin(method, path, data, held)
                except ConnectionRefusedError:
                    if self._restarted is None:
                        raise
                    self._find(self._restarted())
                    response = self._begin(method, path, data, held)
            except (OSError, http.client.HTTPException) as error:
                raise Unavailable(f"There is no answer from {self._where} ({error}).") from None
            if response.status != 200:
                raise _refusal(response)
            yield response

    def _begin(self, method: str, path: str, data: str | None, held: contextlib.ExitStack) -> http.client.HTTPResponse:
        connection = held.enter_context(contextlib.closing(self._url.connect(_TIMEOUT_S)))
        connection.request(method, path, data, self._headers)
        return held.enter_context(contextlib.closing(connection.getresponse()))


def _said(event: Any) -> Iterator[Said]:
    if "error" in event:
        raise Unavailable(str(event["error"]["message"]))
    for choice in event["choices"]:
        delta = choice.get("delta") or {}
        text = delta.get("content") or ""
        thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
        count = 1 if text or thought else 0
        yield Said(text, count, thought, choice.get("warning") or "", choice.get("finish_reason") or "")
    if usage := event.get("usage"):
        yield Said("", 0, drafted=_drafted(event.get("metrics")), num_in_all=usage.get("completion_tokens") or 0)


def _drafted(metrics: Any) -> Drafted:
    """As vLLM's field tells, where the server is told to have it."""
    told = (metrics or {}).get("speculative_decoding") or {}
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    return Drafted(*(int(told.get(name) or 0) for name in names))


def _refusal(response: http.client.HTTPResponse) -> TokenmillError:
    text, code = response.read().decode(errors="replace"), None
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = json.loads(text)["error"]
        text, code = (error, None) if isinstance(error, str) else (str(error["message"]), error.get("code"))
    hint = f" {_NEEDS_KEY}" if response.status == 401 else ""
    told = f"The server answered {response.status}: {text[:500]}{hint}"
    return ContextTooLong(told) if code == "context_length_exceeded" else Unavailable(told)


def api_key(args: argparse.Namespace) -> str | None:
    """That of --api-key, or of the environment."""
    given: str | None = args.api_key
    return given or next((value for name in KEYS if (value := os.environ.get(name))), None)

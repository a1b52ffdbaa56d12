"""`chat`: a conversation in the terminal, with a model loaded here or a server's.

A pasted text of several lines is one message where the terminal can bracket what is pasted; a line that ends with a
backslash goes on in the next.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from rich.console import Console
from rich.markup import escape

from ..api.openai.shape import delta_of
from ..core.errors import ConfigError, ContextTooLong, TokenmillError, Unavailable
from ..core.sampling import CHAT_TOKENS
from ..llm.llm import LLM
from ..text.calls import require_tokens
from .generate import speed
from .models import progress_bar, tell_if_small
from .options import llm_options, sampling_overrides

Message = dict[str, str]
HELP = """\
/reset          forget the conversation
/system TEXT    set the system message, and start over
/undo           take back the last exchange
/help           this list
/exit           leave (so does Ctrl-D)
Ctrl-C          stop the answer that is being written
\\               at the end of a line: the message goes on in the next"""


class Said(NamedTuple):
    """A piece of an answer. `thought`: reasoning that came before it; `warning`: why it was ended here."""

    text: str
    num_tokens: int
    thought: str = ""
    warning: str = ""


class Partner(Protocol):
    """Whoever answers: a loaded model, or a server."""

    name: str

    def answer(self, messages: list[Message]) -> Iterator[Said]:
        """The answer piece by piece."""
        ...


class LocalPartner:
    """Without a number of the user's, an answer is shown up to CHAT_TOKENS, or as far as the context has room."""

    def __init__(self, llm: LLM, overrides: dict[str, Any]) -> None:
        self.name = llm.ready.model
        self._llm = llm
        self._is_bounded = overrides["max_tokens"] == CHAT_TOKENS
        self._sampling = llm.default_sampling(**_without_default(overrides))

    def answer(self, messages: list[Message]) -> Iterator[Said]:
        num_shown = 0
        with contextlib.closing(self._llm.stream(messages, self._sampling)) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                delta = delta_of(piece.parts)
                warning = piece.warning.get("warning", "")
                num_shown += len(piece.tokens)
                is_cut = self._is_bounded and num_shown >= CHAT_TOKENS and piece.finish_reason is None
                if is_cut:
                    warning = f"The answer was ended after {num_shown:,} tokens; -n says after how many, -1 never."
                yield Said(delta.get("content", ""), len(piece.tokens), delta.get("reasoning", ""), warning)
                if is_cut:
                    return


def _without_default(overrides: dict[str, Any]) -> dict[str, Any]:
    """Without CHAT_TOKENS, which an answer need not have room for, and for which a server has a number of its own."""
    return overrides | {"max_tokens": None} if overrides.get("max_tokens") == CHAT_TOKENS else overrides


class ServerPartner:
    """Speaks /v1/chat/completions with the standard library alone."""

    def __init__(self, url: str, api_key: str | None, overrides: dict[str, Any], guards_loops: bool = False) -> None:
        wrong = ConfigError(f"--url must be like http://127.0.0.1:8000/v1, got {url!r}.", param="url")
        try:
            parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
            self._address = (parts.hostname or "", parts.port)
        except ValueError:
            raise wrong from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise wrong
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._base = parts.path.rstrip("/") or "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._fields = {name: value for name, value in _without_default(overrides).items() if value is not None}
        with self._send("GET", "/models", None) as response:
            try:
                model = json.load(response)["data"][0]
                self.name = str(model["id"])
            except (ValueError, LookupError, TypeError, http.client.HTTPException):
                raise ConfigError(f"{url} does not list its models as OpenAI's API does.", param="url") from None
        if guards_loops and model.get("owned_by") == "tokenmill":
            self._fields["loop_guard"] = True

    def answer(self, messages: list[Message]) -> Iterator[Said]:
        body = {"model": self.name, "messages": messages, "stream": True, **self._fields}
        with self._send("POST", "/chat/completions", body) as response:
            try:
                for line in response:
                    data = line.removeprefix(b"data: ").strip()
                    if data == b"[DONE]":
                        return
                    if not line.startswith(b"data: "):
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise Unavailable(event["error"]["message"])
                    for choice in event["choices"]:
                        delta = choice["delta"]
                        text = delta.get("content") or ""
                        thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
                        yield Said(text, 1 if text or thought else 0, thought, choice.get("warning", ""))
            except (OSError, http.client.HTTPException) as error:
                raise Unavailable(f"The connection broke off ({type(error).__name__}).") from None
            # http.client takes a connection that ends between chunks for the end of the body.
            raise Unavailable("The connection broke off before the answer was complete.")

    @contextlib.contextmanager
    def _send(self, method: str, path: str, body: Any) -> Iterator[http.client.HTTPResponse]:
        """One call, on a connection of its own. Raises Unavailable unless it is answered with 200."""
        with contextlib.closing(self._connect(*self._address, timeout=300)) as connection:
            try:
                data = None if body is None else json.dumps(body)
                connection.request(method, self._base + path, data, self._headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise Unavailable(f"There is no answer from {self._address[0]}:{self._address[1]} ({error}).") from None
            with contextlib.closing(response):
                if response.status != 200:
                    text = response.read().decode(errors="replace")
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        text = json.loads(text)["error"]["message"]
                    raise Unavailable(f"The server answered {response.status}: {text[:500]}")
                yield response


def chat(args: argparse.Namespace) -> int:
    overrides = sampling_overrides(args)
    if args.url:
        return _converse(ServerPartner(args.url, args.api_key, overrides, args.loop_guard), args.system)
    with progress_bar(f"fetching {args.model}") as progress:
        llm = LLM(args.model, progress=progress, **llm_options(args))
    with llm:
        require_tokens(llm.ready)
        if llm.text.chat is None:
            raise ConfigError(f"The model {llm.ready.model!r} has no chat template; type `tokenmill generate`.")
        tell_if_small(llm.text.info.num_parameters)
        return _converse(LocalPartner(llm, overrides), args.system)


def _converse(partner: Partner, system: str | None) -> int:
    """Reads lines until /exit or the end of input."""
    # Importing it gives input() its line editing and history.
    with contextlib.suppress(ImportError):
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
    console = Console(highlight=False)
    console.print(f"[bold]{escape(partner.name)}[/]  [dim]/help lists commands, Ctrl-D leaves[/]")
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while True:
        line = _ask()
        if line is None or line == "/exit":
            return 0
        if not line:
            continue
        if line.startswith("/"):
            command, _, rest = line.partition(" ")
            if command == "/system":
                opening = [{"role": "system", "content": rest}] if rest else []
                messages = list(opening)
            elif command == "/reset":
                messages = list(opening)
            elif command == "/undo":
                del messages[max(len(opening), len(messages) - 2) :]
            else:
                console.print(HELP, style="dim", markup=False)
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = _show(partner, messages, console)
        except TokenmillError as error:
            console.print(error.message, style="red", markup=False)
            if isinstance(error, ContextTooLong):
                console.print("/reset forgets the conversation, /undo its last exchange.", style="dim")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


def _ask() -> str | None:
    """The next message; "" after Ctrl-C, None at the end of input."""
    first, more = ("> ", ". ") if sys.stdin.isatty() else ("", "")
    try:
        text = input(first)
        while text.endswith("\\"):
            text = text[:-1] + "\n" + input(more)
        return text.strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return ""


def _show(partner: Partner, messages: list[Message], console: Console) -> str:
    """Writes the answer as it comes, reasoning dimmed before it; what has come when Ctrl-C is pressed is the answer."""
    start_s = time.monotonic()
    first_s, num_tokens, has_thought, warning = start_s, 0, False, ""
    parts: list[str] = []
    try:
        with contextlib.closing(partner.answer(messages)) as pieces:  # type: ignore[type-var]
            for said in pieces:
                if num_tokens == 0 and said.num_tokens:
                    first_s = time.monotonic()
                num_tokens += said.num_tokens
                console.out(said.thought, style="dim", end="")
                has_thought = has_thought or bool(said.thought)
                if has_thought and said.text and not parts:
                    console.out("\n")
                if said.text:
                    parts.append(said.text)
                console.out(said.text, end="")
                console.file.flush()
                warning = said.warning
    except KeyboardInterrupt:
        console.out(" [stopped]", end="")
    finally:
        console.out("")
    if warning:
        console.print(warning, style="dim", markup=False)
    if console.is_terminal:
        console.print(f"[dim]{speed(num_tokens, first_s - start_s, time.monotonic() - first_s)}[/]")
    return "".join(parts)

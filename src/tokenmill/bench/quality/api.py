"""A model behind an OpenAI-compatible server, as `bench quality` sees it: completions, scores of given tokens, tokens.

Scores come from /v1/completions with `echo` and `logprobs`, prompts as token ids, which is what evaluation harnesses
send too; tokens from /tokenize and /detokenize (tokenmill, vLLM and SGLang name them alike). Requests run
`concurrency` at a time. A busy server (429, 503) is asked again after the time it names; any other failure ends the
run, because a figure over the questions that happened to be answered would be wrong.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

from ...core.errors import ConfigError, EngineFailed, InvalidRequest, Unavailable
from .run import Completion

TIMEOUT_S = 600.0
NUM_TRIES = 8
LONGEST_WAIT_S = 30.0

T = TypeVar("T")
R = TypeVar("R")


class ApiSubject:
    """run.Subject over HTTP. `url` may end in /v1. `extra`: fields for every completion. Raises ConfigError for
    a URL that is none, Unavailable where nobody answers."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        concurrency: int = 8,
        extra: dict[str, Any] | None = None,
    ) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"--url must look like http://host:port, got {url!r}.", param="url")
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._address = (parts.hostname, port)
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._extra = extra or {}
        self._concurrency = concurrency
        self._idle: list[http.client.HTTPConnection] = []
        self.model = model or self._first_model()
        self.facts: dict[str, Any] = {"url": url, "model": self.model, "extra_body": self._extra}

    def complete(self, prompts: Sequence[str], *, max_tokens: int, stop: Sequence[str], chat: bool) -> list[Completion]:
        def ask(prompt: str) -> Completion:
            body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "seed": 0}
            body |= {"stop": list(stop)} if stop else {}
            body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
            answer = self.post("/v1/chat/completions" if chat else "/v1/completions", body | self._extra)
            choice = answer["choices"][0]
            text = choice["message"]["content"] or "" if chat else choice["text"]
            return Completion(text, choice.get("finish_reason") or "unknown")

        return self.each(ask, prompts)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        def ask(tokens: Sequence[int]) -> list[float]:
            # One token is generated and left unused: not every server allows 0.
            body = {"model": self.model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0, "echo": True}
            answer = self.post("/v1/completions", body | {"logprobs": 1} | self._extra)
            found = (answer["choices"][0].get("logprobs") or {}).get("token_logprobs") or []
            values = found[1 : len(tokens)]
            if len(values) != len(tokens) - 1 or any(value is None for value in values):
                raise InvalidRequest("This server gives no log probabilities of prompt tokens (echo with logprobs).")
            return [float(value) for value in values]

        return self.each(ask, sequences)

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        body = {"model": self.model, "prompt": text, "add_special_tokens": add_special}
        return self.post("/tokenize", body)["tokens"]

    def detokenize(self, tokens: Sequence[int]) -> str:
        return self.post("/detokenize", {"model": self.model, "tokens": list(tokens)})["prompt"]

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _first_model(self) -> str:
        models = self._call("GET", "/v1/models", None).get("data") or []
        if not models:
            raise ConfigError("The server lists no model; name one with --served-model-name.", param="url")
        return models[0]["id"]

    def each(self, ask: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """ask(item) for each, in order; the first failure cancels what has not begun."""
        with ThreadPoolExecutor(self._concurrency) as pool:
            try:
                return list(pool.map(ask, items))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer's body. Raises InvalidRequest where the server refuses, EngineFailed where it fails."""
        answer = self._call("POST", path, json.dumps(body).encode())
        if fingerprint := answer.get("system_fingerprint"):
            self.facts["system_fingerprint"] = fingerprint
        return answer

    def stream(self, path: str, body: dict[str, Any]) -> list[float]:
        """When each event of a streamed answer came, the last one left out. Raises InvalidRequest and EngineFailed."""
        connection = self._connect(*self._address, timeout=TIMEOUT_S)
        try:
            connection.request("POST", self._root + path, json.dumps(body).encode(), self._headers)
            times_s: list[float] = []
            with connection.getresponse() as response:
                if response.status != 200:
                    content_of(path, response.status, response.read())
                for line in response:
                    if line.startswith(b"data: [DONE]"):
                        return times_s
                    if line.startswith(b'data: {"error"'):
                        raise EngineFailed(f"{path}: {line[6:].decode('utf-8', 'replace').strip()}")
                    if line.startswith(b"data: "):
                        times_s.append(time.monotonic())
        except (OSError, http.client.HTTPException) as error:
            raise EngineFailed(f"{path} broke off: {error or type(error).__name__}.") from None
        finally:
            connection.close()
        raise EngineFailed(f"{path} ended without [DONE].")

    def _call(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        for attempt in range(1, NUM_TRIES + 1):
            status, headers, data = self.exchange(method, path, body)
            if status in (429, 503) and attempt < NUM_TRIES:
                time.sleep(_wait_s(headers.get("Retry-After"), attempt))
                continue
            return content_of(path, status, data)
        raise AssertionError("unreachable: the last try returns or raises")

    def exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, Any, bytes]:
        """Status, headers and body of one request, whatever the status is. Where the server has closed an idle
        connection meanwhile, a fresh one is tried. Raises Unavailable."""
        while True:
            is_fresh = not self._idle
            connection = self._connect(*self._address, timeout=TIMEOUT_S) if is_fresh else self._idle.pop()
            try:
                connection.request(method, self._root + path, body, self._headers)
                response = connection.getresponse()
                answer = response.status, response.headers, response.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if is_fresh or isinstance(error, TimeoutError):
                    where = f"{self._address[0]}:{self._address[1]}"
                    raise Unavailable(f"{where} does not answer: {error or type(error).__name__}.") from None
                continue
            except BaseException:
                connection.close()
                raise
            self._idle.append(connection)
            return answer


def _wait_s(retry_after: str | None, attempt: int) -> float:
    wanted = float(retry_after) if retry_after and retry_after.isdigit() else 0.5 * 2**attempt
    return min(wanted, LONGEST_WAIT_S)


def content_of(path: str, status: int, data: bytes) -> dict[str, Any]:
    """The object that was answered. Raises InvalidRequest where the server refused, EngineFailed where it failed."""
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    if status == 200 and isinstance(answer, dict):
        return answer
    if status == 404 and path in ("/tokenize", "/detokenize"):
        raise InvalidRequest(f"This server has no {path}, which tasks that score given tokens need.")
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    text = message or data[:200].decode("utf-8", "replace") or "no body"
    kind = InvalidRequest if 400 <= status < 500 else EngineFailed
    raise kind(f"{path} answered with status {status}: {text}")

"""What an upstream's answer says of itself: tokens used, whether it is complete. What it does not say is counted: an
event of a stream that adds something is one token, and a prompt has a token for every four bytes.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from .connection import BadReply

MAX_EVENT_BYTES = 4 << 20
BYTES_PER_TOKEN = 4
_MOST_TOKENS = 2**31 - 1
_BLANK = re.compile(rb"\r?\n\r?\n")
_DONE = b"[DONE]"
_LAST_TYPES = ("response.completed", "response.incomplete", "response.failed", "error")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    delta: dict[str, msgspec.Raw] | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Inner(msgspec.Struct):
    usage: _Usage | None = None


class _Told(msgspec.Struct):
    """A whole answer, or what an event of a stream says."""

    type: str = ""
    usage: _Usage | None = None
    choices: list[_Choice] | None = None
    response: _Inner | None = None


_read = msgspec.json.Decoder(_Told).decode
_read_any = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Tally:
    """Of one call. `num_prompt`, `num_cached`, `num_output`: tokens, as far as is known; is_told: the upstream said so,
    else they are counted; first_prompt: what was counted before it did; is_complete: nothing more is to come."""

    def __init__(self, num_body_bytes: int) -> None:
        self._num_body_bytes = num_body_bytes
        self.first_prompt = self.num_prompt = max(1, num_body_bytes // BYTES_PER_TOKEN)
        self.num_cached = 0
        self.num_output = 0
        self.is_told = False
        self.is_complete = False

    def anew(self) -> Tally:
        """Of the same call, for what another upstream answers."""
        return Tally(self._num_body_bytes)

    def note_whole(self, body: bytes) -> None:
        """Raises BadReply for what is no JSON object."""
        told = _told(body)
        self._use(told)
        self.is_complete = True
        if not self.is_told and told is not None:
            self.num_output = sum(len(choice.text or "") for choice in told.choices or ()) // BYTES_PER_TOKEN

    def note_event(self, event: bytes) -> bool:
        """Whether the event has nothing but the count of tokens. Raises BadReply for what is no JSON."""
        data = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
        if not data:
            return False
        if data == _DONE:
            self.is_complete = True
            return False
        told = _told(data)
        if told is None:  # of types that are not known
            self._count()
            return False
        if told.type.endswith(".delta"):
            self._count()
        for choice in told.choices or ():
            if choice.text or any(value != b"null" and value != b'""' for value in _added(choice)):
                self._count()
            if choice.finish_reason:
                self.is_complete = True
        if told.type in _LAST_TYPES:
            self.is_complete = True
        self._use(told)
        return told.choices == [] and told.usage is not None

    def _count(self) -> None:
        if not self.is_told:
            self.num_output += 1

    def _use(self, told: _Told | None) -> None:
        if told is None:
            return
        usage = told.usage or (told.response and told.response.usage)
        if not usage:
            return
        num_prompt = _first(usage.prompt_tokens, usage.input_tokens, usage.total_tokens)
        num_output = _first(usage.completion_tokens, usage.output_tokens, 0)
        if num_prompt is None or num_output is None:
            return
        self.is_told = True
        self.num_prompt, self.num_output = num_prompt, num_output
        cached = usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens
        self.num_cached = min(cached, num_prompt) if cached and cached > 0 else 0


class Events:
    """A stream of server-sent events, cut into them."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are complete now, as they came. Raises BadReply for one that does not end."""
        start = max(0, len(self._rest) - 3)
        self._rest += data
        found = []
        position = 0
        for end in _BLANK.finditer(self._rest, start):
            found.append(bytes(self._rest[position : end.end()]))
            position = end.end()
        del self._rest[:position]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise BadReply(f"an event of its stream is larger than {MAX_EVENT_BYTES >> 20} MiB")
        return found

    @property
    def is_empty(self) -> bool:
        return not self._rest.strip()


def _told(data: bytes) -> _Told | None:
    """None: it is an object, of types that are not known."""
    try:
        return _read(data)
    except msgspec.ValidationError:
        pass
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadReply("what it answered is no JSON") from None
    try:
        _read_any(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadReply("what it answered is no JSON object") from None
    return None


def _added(choice: _Choice) -> list[Any]:
    return [bytes(value) for name, value in (choice.delta or {}).items() if name != "role"]


def _first(*values: int | None) -> int | None:
    found = next((value for value in values if value is not None), None)
    return found if found is not None and 0 <= found <= _MOST_TOKENS else None

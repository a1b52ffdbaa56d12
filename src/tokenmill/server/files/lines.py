"""The lines of a batch: what each must be, which are done, and what is said of each. Reads files; runs nothing.

A line is done when a whole line of the output or of the errors has its custom_id: the answers are the record of
progress, so that no second record can contradict them.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from ...api.common_fields import FLEX
from ...api.json_encoder import encode_json
from ...core.request import IDLE_PRIORITY
from ...core.units import format_bytes

ENDPOINTS = (
    "/v1/responses",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
)  # fmt: skip
MESSAGES = "/v1/messages"
"""The endpoint of message batches, which have an API of their own."""
MAX_LINES = 50_000
MAX_ID = 256
_READ_AT_ONCE, _BYTES_AT_ONCE = 64, 1 << 20
MAX_FAULTS = 100
"""More than so many are not told."""


class Line(NamedTuple):
    """number: from 1. body: of the call, as JSON."""

    number: int
    custom_id: str
    body: bytes


class Fault(msgspec.Struct, frozen=True):
    """What is wrong with a batch, in OpenAI's words. `line`: from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class _Given(msgspec.Struct, frozen=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct, frozen=True):
    model: str | None = None
    stream: Any = None


_RAW = msgspec.json.Decoder(msgspec.Raw)
_GIVEN = msgspec.json.Decoder(_Given)
_BODY = msgspec.json.Decoder(_Body)


class Survey(NamedTuple):
    """A batch's input, read once. models: named by its lines, and by which first."""

    num_lines: int
    models: dict[str, int]
    faults: tuple[Fault, ...]


def survey(path: Path, endpoint: str, max_line_bytes: int) -> Survey:
    """Check every line. Takes about 2 us a line and 1 ns a byte: for a thread."""
    faults: list[Fault] = []
    models: dict[str, int] = {}
    seen: set[str] = set()
    num_lines = 0
    number = 0
    with open(path, "rb") as file:
        while (line := _read_line(file, max_line_bytes, number == 0)) is not None and len(faults) < MAX_FAULTS:
            number += 1
            if not line:
                continue
            num_lines += 1
            if num_lines > MAX_LINES:
                faults.append(Fault("too_many_requests", f"A batch may have at most {MAX_LINES} lines.", number))
                break
            found = _fault(line, number, endpoint, seen, models, max_line_bytes)
            if found is not None:
                code, message, param = found
                faults.append(Fault(code, message, number, param))
    if not num_lines:
        faults.append(Fault("empty_file", "The input file has no lines."))
    return Survey(num_lines, models, tuple(faults))


def _fault(
    line: bytes, number: int, endpoint: str, seen: set[str], models: dict[str, int], max_line_bytes: int
) -> tuple[str, str, str | None] | None:
    """(code, message, field) of what is wrong with a line."""
    if len(line) > max_line_bytes:
        return "line_too_long", f"A line may have at most {format_bytes(max_line_bytes)}.", None
    try:
        given = _GIVEN.decode(line)
        body = _BODY.decode(given.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return (
            "invalid_json_line",
            f"The line must be an object with custom_id, method, url and body, which is an object: {error}",
            None,
        )
    if not 0 < len(given.custom_id) <= MAX_ID:
        return "invalid_custom_id", f"custom_id must have 1 to {MAX_ID} characters.", "custom_id"
    if given.custom_id in seen:
        return "duplicate_custom_id", f"The custom_id {given.custom_id!r} is that of an earlier line.", "custom_id"
    seen.add(given.custom_id)
    if given.method != "POST":
        return "invalid_method", "method must be 'POST'.", "method"
    if given.url != endpoint:
        return "mismatched_url", f"url must be the batch's endpoint, {endpoint}.", "url"
    if body.stream not in (None, False):
        return "stream_not_supported", "stream is not available in a batch.", "body.stream"
    if body.model is not None:
        models.setdefault(body.model, number)
    return None


class Place(NamedTuple):
    """In a file of lines: where the next one begins, and the number of the one before."""

    offset: int = 0
    number: int = 0


def read_lines(path: Path, place: Place, max_line_bytes: int) -> tuple[list[Line], Place]:
    """The next lines of a file that `survey` has found to be in order, none at its end; and where to go on."""
    lines: list[Line] = []
    with open(path, "rb") as file:
        file.seek(place.offset)
        number, end = place.number, place.offset + _BYTES_AT_ONCE
        while len(lines) < _READ_AT_ONCE and not (lines and file.tell() >= end):
            text = _read_line(file, max_line_bytes, number == 0)
            if text is None:
                break
            number += 1
            if text:
                given = _GIVEN.decode(text)
                lines.append(Line(number, given.custom_id, bytes(given.body)))
        return lines, Place(file.tell(), number)


def _read_line(file: IO[bytes], max_line_bytes: int, is_first: bool) -> bytes | None:
    """The next line without its end, None behind the last. One that is too long comes cut, longer than it may be."""
    line = file.readline(max_line_bytes + 2)
    if not line:
        return None
    rest = line
    while not rest.endswith(b"\n") and len(line) > max_line_bytes and (rest := file.readline(1 << 20)):
        pass
    text = line.strip()
    return text.removeprefix(b"\xef\xbb\xbf") if is_first else text


# ---- what becomes of them ----


def answered(line_id: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """The line for a call that was answered, well or not."""
    try:
        told: Any = _RAW.decode(body) if body else None
    except msgspec.MsgspecError:
        told = body.decode("utf8", "replace")
    response = {"status_code": status, "request_id": request_id, "body": told}
    return encode_json({"id": line_id, "custom_id": custom_id, "response": response, "error": None}) + b"\n"


def unanswered(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    """The line for a call that was not made."""
    error = {"code": code, "message": message}
    return encode_json({"id": line_id, "custom_id": custom_id, "response": None, "error": error}) + b"\n"


class _Done(msgspec.Struct, frozen=True):
    custom_id: str


_DONE = msgspec.json.Decoder(_Done)


def mend(path: Path) -> tuple[set[str], int]:
    """(custom_ids of the whole lines of an output, its bytes), after cutting off what follows the last of them. What is
    not there is empty."""
    done: set[str] = set()
    size = 0
    try:
        with open(path, "r+b") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    done.add(_DONE.decode(line).custom_id)
                except (msgspec.MsgspecError, UnicodeDecodeError):  # as a disk without power may leave it
                    break
                size += len(line)
            file.truncate(size)
    except FileNotFoundError:
        pass
    return done, size


def idle(body: bytes) -> bytes:
    """The body of a call, an object as JSON, at the priority and class of batches: of two fields of one name the
    last counts."""
    inside = body[1:-1].strip()
    return b'{%b%b"priority":%d,"priority_class":%d}' % (inside, b"," if inside else b"", IDLE_PRIORITY, FLEX)

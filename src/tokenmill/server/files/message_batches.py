"""Anthropic's /v1/messages/batches: batches whose calls come in one body, and whose results are read as lines.

The calls are lines of a file that no list of files shows, and a batch answers them as it does OpenAI's. Its answers are
kept as OpenAI's lines and told in Anthropic's words as they are read; what has none was cancelled, has expired, or was
left when the batch failed.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ...api.json_encoder import encode_json
from ...api.json_reply import JSONReply
from ...core.errors import InvalidRequest, NotFound, Unavailable
from ..generation import Generation
from .batch import Batch
from .lines import MAX_LINES, MESSAGES, Place, read_lines
from .runner import Batches
from .store import HIDDEN, KEPT_S, Received

_PATH = "/v1/messages/batches"
_MAX_LIMIT, _LIMIT = 1000, 20
_LINES_AT_ONCE = 64
_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    params: dict[str, msgspec.Raw]


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    requests: list[_Request]


_decode = msgspec.json.Decoder(_Body).decode


class MessageBatches:
    """batches: None where the server keeps no files."""

    def __init__(self, generation: Generation, batches: Batches | None) -> None:
        self._limits = generation.limits
        self._max_line_bytes = generation.config.max_body_bytes
        self._given = batches

    def routes(self) -> list[Route]:
        named = _PATH + "/{batch_id}"
        return [
            Route(_PATH, self.create, methods=["POST"]),
            Route(_PATH, self.page, methods=["GET"]),
            Route(named, self.retrieve, methods=["GET"]),
            Route(named, self.delete, methods=["DELETE"]),
            Route(named + "/cancel", self.cancel, methods=["POST"]),
            Route(named + "/results", self.results, methods=["GET"]),
        ]

    async def create(self, request: HttpRequest) -> Response:
        self._limits.refuse_when_draining()
        batches, owner = self._batches, request.state.owner
        batches.require_place(owner)
        store = batches.store
        async with self._limits.body(request) as data:
            lines = await asyncio.to_thread(to_lines, data)

            async def write(part: Path, grow: Callable[[int], None]) -> Received:
                size_bytes = sum(map(len, lines))
                grow(size_bytes)
                await asyncio.to_thread(_write, part, lines)
                return Received("requests.jsonl", size_bytes, KEPT_S)

            record = await store.receive(owner, write, purpose=HIDDEN, what="batch")
        try:
            batch = await batches.create_of_messages(owner, record.id, len(lines))
        except Unavailable:
            await store.delete(record)
            raise
        return JSONReply(self._shown(batch))

    async def page(self, request: HttpRequest) -> Response:
        query = request.query_params
        found = self._batches.of(request.state.owner, messages=True)[::-1]
        text = query.get("limit", str(_LIMIT))
        if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= _MAX_LIMIT):
            raise InvalidRequest(f"limit must be an integer from 1 to {_MAX_LIMIT}.", param="limit")
        before, after, limit = query.get("before_id"), query.get("after_id"), int(text)
        if before is not None and after is not None:
            raise InvalidRequest("before_id and after_id exclude each other.", param="before_id")
        ids = [each.id for each in found]
        for name, value in (("before_id", before), ("after_id", after)):
            if value is not None and value not in ids:
                raise InvalidRequest(f"{name} names no batch of yours: {value[:100]!r}.", param=name)
        if before is not None:
            found = found[: ids.index(before)]
            page, has_more = found[-limit:], len(found) > limit
        else:
            found = found if after is None else found[ids.index(after) + 1 :]
            page, has_more = found[:limit], len(found) > limit
        return JSONReply(
            {
                "data": [self._shown(each) for each in page],
                "first_id": page[0].id if page else None,
                "last_id": page[-1].id if page else None,
                "has_more": has_more,
            }
        )

    async def retrieve(self, request: HttpRequest) -> Response:
        return JSONReply(self._shown(self._find(request)))

    async def cancel(self, request: HttpRequest) -> Response:
        batch = await self._batches.cancel(request.state.owner, request.path_params["batch_id"], messages=True)
        return JSONReply(self._shown(batch))

    async def delete(self, request: HttpRequest) -> Response:
        batch = self._find(request)
        await self._batches.delete(batch)
        return JSONReply({"id": batch.id, "type": "message_batch_deleted"})

    async def results(self, request: HttpRequest) -> Response:
        batch = self._find(request)
        if not batch.has_ended:
            raise InvalidRequest("The batch has not ended yet: it has no results.", param="batch_id")
        if self._is_archived(batch):
            raise NotFound("The results of this batch are not kept any more.", param="batch_id")
        store = self._batches.store
        output, errors, given = map(store.content, (batch.output_id, batch.error_id, batch.input_id))
        lines = result_lines(batch, output, errors, given, self._max_line_bytes)
        return StreamingResponse(_in_thread(lines), media_type="application/x-jsonl")

    # ---- what they share ----

    @property
    def _batches(self) -> Batches:
        if self._given is None:
            raise InvalidRequest("This server keeps no batches: it was started with --files-dir off.")
        return self._given

    def _find(self, request: HttpRequest) -> Batch:
        return self._batches.get(request.state.owner, request.path_params["batch_id"], messages=True)

    def _is_archived(self, batch: Batch) -> bool:
        """Whether its requests, which are kept longest, are gone."""
        return batch.created_at + KEPT_S <= self._batches.store.wall_s()

    def _shown(self, batch: Batch) -> dict[str, Any]:
        return shown(batch, is_archived=self._is_archived(batch))


def to_lines(data: bytes) -> list[bytes]:
    """The body of a new batch as the lines of its input. Raises InvalidRequest."""
    try:
        requests = _decode(data).requests
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(
            f"The body must be an object with requests, each with custom_id and params, which is an object: {error}.",
            param="requests",
        ) from None
    if not 1 <= len(requests) <= MAX_LINES:
        raise InvalidRequest(f"requests must hold 1 to {MAX_LINES} requests, got {len(requests)}.", param="requests")
    seen: set[str] = set()
    lines = []
    for number, each in enumerate(requests):
        where = f"requests[{number}]"
        if _ID.fullmatch(each.custom_id) is None:
            raise InvalidRequest(
                f"{where}.custom_id must have 1 to 64 letters, digits, hyphens and underscores.", param=where
            )
        if each.custom_id in seen:
            raise InvalidRequest(f"{where}.custom_id is that of an earlier request.", param=where)
        seen.add(each.custom_id)
        if bytes(each.params.get("stream", b"false")) not in (b"false", b"null"):
            raise InvalidRequest(f"{where}.params.stream is not available in a batch.", param=where)
        model = bytes(each.params.get("model", b'""'))
        if not model.startswith(b'"'):
            raise InvalidRequest(f"{where}.params.model must be a string.", param=where)
        line = {"custom_id": each.custom_id, "method": "POST", "url": MESSAGES, "body": each.params}
        lines.append(encode_json(line) + b"\n")
    return lines


def shown(batch: Batch, *, is_archived: bool) -> dict[str, Any]:
    """Anthropic's object. What became of requests counts once the batch has ended."""
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if batch.has_ended:
        counts |= {"succeeded": batch.num_completed, "errored": batch.num_failed}
        counts[_left(batch)] += batch.num_lines - batch.num_completed - batch.num_failed
    else:
        counts["processing"] = batch.num_lines
    ended = batch.times.get(batch.status) if batch.has_ended else None
    status = "ended" if batch.has_ended else "canceling" if batch.status == "cancelling" else "in_progress"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": counts,
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": _time(ended),
        "cancel_initiated_at": _time(batch.times.get("cancelling")),
        "archived_at": _time(batch.created_at + KEPT_S) if is_archived else None,
        "results_url": f"{_PATH}/{batch.id}/results" if batch.has_ended and not is_archived else None,
    }


def _left(batch: Batch) -> str:
    """What a request that was not answered is, once the batch has ended."""
    return {"cancelled": "canceled", "expired": "expired"}.get(batch.status, "errored")


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class _Answer(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Line(msgspec.Struct):
    custom_id: str
    response: _Answer


_LINE = msgspec.json.Decoder(_Line)


def result_lines(batch: Batch, output: Path, errors: Path, given: Path, max_line_bytes: int) -> Iterator[bytes]:
    """Lines of the results, some at a time. What is not there any more has none."""
    answered: set[str] = set()
    for path, kind, name in ((output, "succeeded", "message"), (errors, "errored", "error")):
        if not path.exists():
            continue
        with open(path, "rb") as file:
            for line in file:
                found = _LINE.decode(line)
                answered.add(found.custom_id)
                yield _result(found.custom_id, {"type": kind, name: found.response.body})
    if len(answered) == batch.num_lines or not given.exists():
        return
    left: dict[str, Any] = {"type": _left(batch)}
    if left["type"] == "errored":
        why = batch.faults[0].message if batch.faults else "The batch failed."
        left["error"] = {"type": "error", "error": {"type": "api_error", "message": why}, "request_id": None}
    place = Place()
    while True:
        lines, place = read_lines(given, place, max_line_bytes)
        if not lines:
            return
        for each in lines:
            if each.custom_id not in answered:
                yield _result(each.custom_id, left)


def _result(custom_id: str, result: dict[str, Any]) -> bytes:
    return encode_json({"custom_id": custom_id, "result": result}) + b"\n"


async def _in_thread(lines: Iterator[bytes]) -> AsyncIterator[bytes]:
    def some() -> bytes:
        return b"".join(islice(lines, _LINES_AT_ONCE))

    while data := await asyncio.to_thread(some):
        yield data


def _write(path: Path, lines: list[bytes]) -> None:
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.writelines(lines)

"""OpenAI's /v1/files and /v1/batches.

A multipart body is read as it comes: its fields, and its one file straight to the disk. Memory is bounded by what
arrives at once; fields are short, and there are few. The package python-multipart finds the parts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import quote

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...api.errors import ClientGone
from ...api.json_reply import JSONReply
from ...api.sandbox import parse_small
from ...core.errors import InvalidRequest
from ..generation import Generation
from .batch import Batch, parse_batch, parse_lifetime, shown
from .message_batches import MessageBatches
from .runner import Batches
from .store import KEPT_S, FileRecord, Received

_MAX_FIELD_BYTES = 4096
_MAX_PARTS = 16
_MAX_NAME = 255


@dataclass(slots=True)
class Upload:
    """fields: by name. filename: of the file, "" where there was none. size_bytes: of the file."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str = ""
    size_bytes: int = 0


async def read_upload(content_type: str, body: AsyncIterator[bytes], to: Path, grow: Callable[[int], None]) -> Upload:
    """Read a multipart/form-data body, and write the part named "file" to `to` (mode 0600). `grow` is told of its bytes
    before they are written, and may raise. Raises InvalidRequest for what is no such body."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise InvalidRequest("The body must be multipart/form-data with the fields purpose and file.")
    with open(os.open(to, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        reader = _Reader(file, grow)
        try:
            parser = MultipartParser(boundary, reader.callbacks())  # type: ignore[arg-type]
            async for data in body:
                if data:
                    parser.write(data)
        except FormParserError as error:
            raise InvalidRequest(f"The body is not valid multipart/form-data: {error}.") from None
    if not reader.is_complete:
        raise InvalidRequest("The body ends before its last boundary.")
    if not reader.upload.filename:
        raise InvalidRequest("file must be a part with a file name.", param="file")
    return reader.upload


class _Reader:
    """What the parser tells."""

    def __init__(self, file: IO[bytes], grow: Callable[[int], None]) -> None:
        self.upload = Upload()
        self.is_complete = False
        self._file = file
        self._grow = grow
        self._num_parts = 0
        self._header = b""
        self._value = b""
        self._name = ""
        self._is_file = False
        self._text = b""

    def callbacks(self) -> dict[str, Callable[..., None]]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._check,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise InvalidRequest(f"The body has more than {_MAX_PARTS} parts.")
        self._name, self._is_file, self._text, self._header, self._value = "", False, b"", b"", b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"").decode("utf8", "replace")
            filename = options.get(b"filename")
            self._is_file = filename is not None
            if filename is not None and self._name == "file":
                shown = os.path.basename(filename.decode("utf8", "replace"))
                self.upload.filename = "".join(each for each in shown if each.isprintable())[:_MAX_NAME] or "file"
        self._header = self._value = b""

    def _check(self) -> None:
        shown = self._name[:100]
        if not self._name:
            raise InvalidRequest("Each part of the body must have a name.")
        if self._is_file and (self._name != "file" or self.upload.size_bytes):
            raise InvalidRequest("One file may be sent, as the part named file.", param=shown)
        if not self._is_file and self._name == "file":
            raise InvalidRequest("file must be a part with a file name.", param="file")
        if self._name in self.upload.fields:
            raise InvalidRequest(f"{shown} is given twice.", param=shown)

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._grow(end - start)
            self._file.write(data[start:end])
            self.upload.size_bytes += end - start
            return
        self._text += data[start:end]
        if len(self._text) > _MAX_FIELD_BYTES:
            raise InvalidRequest(f"{self._name[:100]} is too long.", param=self._name[:100])

    def _end(self) -> None:
        if not self._is_file:
            self.upload.fields[self._name] = self._text.decode("utf8", "replace")

    def _finish(self) -> None:
        self.is_complete = True


_MOST_FILES, _MOST_BATCHES, _BATCHES_DEFAULT = 10_000, 100, 20
_PART_BYTES = 1 << 18
_UPLOAD_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")

T = TypeVar("T", FileRecord, Batch)


def routes(generation: Generation, batches: Batches | None) -> list[Route]:
    """batches: None where the server keeps no files."""
    service = _Files(generation, batches)
    return [
        Route("/v1/files", service.upload, methods=["POST"]),
        Route("/v1/files", service.files, methods=["GET"]),
        Route("/v1/files/{file_id}", service.file, methods=["GET"]),
        Route("/v1/files/{file_id}", service.delete, methods=["DELETE"]),
        Route("/v1/files/{file_id}/content", service.content, methods=["GET"]),
        Route("/v1/batches", service.create, methods=["POST"]),
        Route("/v1/batches", service.batches, methods=["GET"]),
        Route("/v1/batches/{batch_id}", service.batch, methods=["GET"]),
        Route("/v1/batches/{batch_id}/cancel", service.cancel, methods=["POST"]),
        *MessageBatches(generation, batches).routes(),
    ]


class _Files:
    def __init__(self, generation: Generation, batches: Batches | None) -> None:
        self._limits = generation.limits
        self._given = batches

    # ---- files ----

    async def upload(self, request: HttpRequest) -> Response:
        self._limits.refuse_when_draining()
        store = self._batches.store
        store.require_open()
        if request.headers.get("content-encoding", "identity") != "identity":
            raise InvalidRequest("An upload must not be compressed.")

        async def write(part: Path, grow: Callable[[int], None]) -> Received:
            content_type = request.headers.get("content-type", "")
            upload = await read_upload(content_type, _stream(request), part, grow)
            return Received(upload.filename, upload.size_bytes, _lifetime(upload))

        record = await store.receive(request.state.owner, write)
        return JSONReply(_shown_file(record))

    async def files(self, request: HttpRequest) -> Response:
        store = self._batches.store
        store.require_open()
        query = _query(request, ("purpose", "limit", "order", "after"))
        found = store.files(request.state.owner, query.get("purpose"))
        if _order(query) == "desc":
            found.reverse()
        return JSONReply(_page(found, query, _MOST_FILES, _MOST_FILES, _shown_file))

    async def file(self, request: HttpRequest) -> Response:
        return JSONReply(_shown_file(self._file(request)))

    async def content(self, request: HttpRequest) -> ASGIApp:
        record = self._file(request)
        path = self._batches.store.content(record.id)
        head = {"type": "http.response.start", "status": 200, "headers": _content_headers(record)}

        async def send_content(scope: Scope, receive: Receive, send: Send) -> None:
            # Opened once: what is deleted meanwhile is sent to its end.
            file = os.open(path, os.O_RDONLY)
            try:
                await send(head)
                sent = 0
                while part := await asyncio.to_thread(os.pread, file, _PART_BYTES, sent):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                    sent += len(part)
                await send({"type": "http.response.body", "body": b""})
            finally:
                os.close(file)

        return send_content

    async def delete(self, request: HttpRequest) -> Response:
        record = self._file(request)
        user = self._batches.uses(record.id)
        if user is not None:
            raise InvalidRequest(f"The file is the input of {user.id}, which has not ended.", param="file_id")
        await self._batches.store.delete(record)
        return JSONReply({"id": record.id, "object": "file", "deleted": True})

    # ---- batches ----

    async def create(self, request: HttpRequest) -> Response:
        self._limits.refuse_when_draining()
        async with self._limits.body(request) as data:
            wanted = parse_batch(parse_small(data))
        batch = await self._batches.create(request.state.owner, wanted)
        return JSONReply(self._shown_batch(batch))

    async def batches(self, request: HttpRequest) -> Response:
        query = _query(request, ("limit", "after"))
        found = self._batches.of(request.state.owner)[::-1]
        return JSONReply(_page(found, query, _BATCHES_DEFAULT, _MOST_BATCHES, self._shown_batch))

    async def batch(self, request: HttpRequest) -> Response:
        batch = self._batches.get(request.state.owner, request.path_params["batch_id"])
        return JSONReply(self._shown_batch(batch))

    async def cancel(self, request: HttpRequest) -> Response:
        batch = await self._batches.cancel(request.state.owner, request.path_params["batch_id"])
        return JSONReply(self._shown_batch(batch))

    # ---- what they share ----

    @property
    def _batches(self) -> Batches:
        if self._given is None:
            raise InvalidRequest("This server keeps no files: it was started with --files-dir off.")
        return self._given

    def _file(self, request: HttpRequest) -> FileRecord:
        store = self._batches.store
        store.require_open()
        return store.file(request.state.owner, request.path_params["file_id"])

    def _shown_batch(self, batch: Batch) -> dict[str, Any]:
        return shown(batch, *self._batches.counts(batch))


def _content_headers(record: FileRecord) -> list[tuple[bytes, bytes]]:
    name = quote(record.filename, safe="")
    return [
        (b"content-type", b"application/octet-stream"),
        (b"content-length", str(record.size_bytes).encode()),
        (b"content-disposition", f"attachment; filename*=utf-8''{name}".encode()),
    ]


async def _stream(request: HttpRequest) -> AsyncIterator[bytes]:
    try:
        async for data in request.stream():
            yield data
    except ClientDisconnect:
        raise ClientGone from None


def _lifetime(upload: Upload) -> int:
    """How long an uploaded file is kept, after checking its fields. Raises InvalidRequest."""
    fields = upload.fields
    unknown = [name for name in fields if name not in _UPLOAD_FIELDS]
    if unknown:
        raise InvalidRequest(f"An upload has no field {unknown[0][:100]!r}.", param=unknown[0][:100])
    if fields.get("purpose") != "batch":
        raise InvalidRequest("purpose must be 'batch': files are taken for batches alone.", param="purpose")
    given: dict[str, Any] = {
        name: fields[f"expires_after[{name}]"] for name in ("anchor", "seconds") if f"expires_after[{name}]" in fields
    }
    if not given:
        return KEPT_S
    seconds = given.get("seconds", "")
    if seconds.isascii() and seconds.isdigit():
        given["seconds"] = int(seconds[:20])
    return parse_lifetime(given, "expires_after")


def _shown_file(record: FileRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.size_bytes,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }


def _query(request: HttpRequest, known: tuple[str, ...]) -> dict[str, str]:
    unknown = [name for name in request.query_params if name not in known]
    if unknown:
        raise InvalidRequest(f"This list has no parameter {unknown[0][:100]!r}.", param=unknown[0][:100])
    return dict(request.query_params)


def _order(query: dict[str, str]) -> str:
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be 'asc' or 'desc'.", param="order")
    return order


def _page(
    found: list[T], query: dict[str, str], default: int, most: int, show: Callable[[T], dict[str, Any]]
) -> dict[str, Any]:
    """A part of a list: at most `limit`, behind the one called `after`."""
    text = query.get("limit", str(default))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 1 <= limit <= most:
        raise InvalidRequest(f"limit must be an integer from 1 to {most}.", param="limit")
    start = 0
    if "after" in query:
        places = [number for number, each in enumerate(found) if each.id == query["after"]]
        if not places:
            raise InvalidRequest(f"after: there is no {query['after'][:100]!r} in this list.", param="after")
        start = places[0] + 1
    part = found[start : start + limit]
    return {
        "object": "list",
        "data": [show(each) for each in part],
        "first_id": part[0].id if part else None,
        "last_id": part[-1].id if part else None,
        "has_more": len(found) > start + limit,
    }

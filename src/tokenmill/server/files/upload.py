"""A multipart body as it comes: its fields, and its one file straight to the disk.

Memory is bounded by what arrives at once; fields are short, and there are few. The package python-multipart finds the
parts.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from ...core.errors import InvalidRequest

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

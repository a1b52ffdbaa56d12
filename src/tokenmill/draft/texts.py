"""The texts of a corpus: files, what is in folders, rows of JSON lines. Names that end in .gz are unpacked.

A text comes in pieces that end with a line where that is possible, so that one of any size is read in bounded memory.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from io import BufferedIOBase
from pathlib import Path

from ..core.errors import ConfigError
from ..text.files import fill_template, read_jsonl

PIECE_CHARS = 1 << 20
_PROBED = 8192
"""Bytes of a file in a folder; one with a zero among them is no text."""

JSON_LINES = (".jsonl", ".ndjson")

Text = Iterable[str]


def read_texts(paths: Iterable[Path], template: str) -> Iterator[Text]:
    """Each to be read before the next. A row of JSON lines is one, as `template` makes it; any other file is. In
    folders, files that are no text and names that begin with a dot are passed over. Raises ConfigError."""
    for path in paths:
        is_folder = path.is_dir()
        for file in _files_below(path) if is_folder else (path,):
            if file.name.removesuffix(".gz").endswith(JSON_LINES):
                yield from ((fill_template(template, row),) for row in read_jsonl(file))
            elif not is_folder or _is_text(file):
                yield _pieces(file)


def _files_below(folder: Path) -> Iterator[Path]:
    """In an order that is the same on every machine."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def _open(path: Path) -> BufferedIOBase:
    return gzip.open(path) if path.suffix == ".gz" else open(path, "rb")


def _is_text(path: Path) -> bool:
    try:
        with _open(path) as file:
            return b"\0" not in file.read(_PROBED)
    except (OSError, EOFError, zlib.error):
        return False


def _pieces(path: Path) -> Iterator[str]:
    """Bytes that are not UTF-8 become U+FFFD."""
    try:
        with _open(path) as file:
            while lines := file.readlines(PIECE_CHARS):
                yield b"".join(lines).decode("utf8", "replace")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read: {reason}.", param="files") from None

"""Results of `tokenmill bench ... --json` that lie in one folder: which there are, and each as it is.

Only regular files directly in the folder count, `NAME.json`; links are followed only inside it. Files are read by a
thread, since they may be large.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ...api.json_reply import JSONReply
from ...core.errors import InvalidRequest, NotFound
from ...core.units import MiB
from ..scopes import require_operator

MOST_BYTES = 32 * MiB
MOST_FILES = 200


class _Head(msgspec.Struct):
    """What tells one report from another, of all that it says. A file without a kind is no report."""

    kind: str
    schema: int = 0
    name: str = ""
    started_at: str = ""


class Reports:
    """folder: "" where none is shown."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._heads: dict[tuple[str, float, int], _Head | None] = {}

    async def reports(self, request: HttpRequest) -> Response:
        require_operator(request)
        return JSONReply({"object": "list", "data": await asyncio.to_thread(self._found)})

    async def report(self, request: HttpRequest) -> Response:
        require_operator(request)
        content = await asyncio.to_thread(self._read, request.path_params["name"])
        return Response(content, media_type="application/json")

    def _found(self) -> list[dict[str, Any]]:
        """The latest first. Files that are no reports are passed over."""
        found: list[tuple[float, dict[str, Any]]] = []
        known: dict[tuple[str, float, int], _Head | None] = {}
        for path in self._paths():
            state = path.stat()
            key = path.name, state.st_mtime, state.st_size
            head = self._heads[key] if key in self._heads else _head(path, state.st_size)
            known[key] = head
            if head is not None:
                plain = {"id": path.name, "object": "report", **msgspec.structs.asdict(head)}
                found.append((state.st_mtime, plain | {"bytes": state.st_size, "modified_at": int(state.st_mtime)}))
        self._heads = known
        return [plain for _, plain in sorted(found, key=lambda each: -each[0])]

    def _paths(self) -> list[Path]:
        """At most MOST_FILES, the latest."""
        try:
            inside = [path for path in map(Path, _entries(self._folder)) if self._is_inside(path)]
        except OSError:
            return []
        return sorted(inside, key=lambda path: -path.stat().st_mtime)[:MOST_FILES]

    def _is_inside(self, path: Path) -> bool:
        real, folder = Path(os.path.realpath(path)), Path(os.path.realpath(self._folder))
        return path.suffix == ".json" and os.path.isfile(real) and real.parent == folder

    def _read(self, name: str) -> bytes:
        if not self._folder:
            raise InvalidRequest("This server shows no reports: start it with --reports-dir FOLDER.")
        path = Path(self._folder) / name
        if os.path.basename(name) != name or "\x00" in name or not self._is_inside(path):
            raise NotFound(f"There is no report {name[:200]!r}.")
        if path.stat().st_size > MOST_BYTES:
            raise InvalidRequest(
                f"The report is larger than {MOST_BYTES >> 20} MiB; draw it with tokenmill bench html."
            )
        return path.read_bytes()


def _entries(folder: str) -> list[str]:
    return [entry.path for entry in os.scandir(folder)] if folder else []


def _head(path: Path, size_bytes: int) -> _Head | None:
    if size_bytes > MOST_BYTES:
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Head)
    except (OSError, msgspec.MsgspecError):
        return None

"""The console and the views that only it needs.

/console/...    its static files, as they lie in the package, with headers that let them load nothing from elsewhere
/admin/kv       blocks of each engine's pools, the largest prefixes that its cache holds, and what tiers below have
/admin/reports  results of `tokenmill bench ... --json` that lie in one folder: which there are, and each as it is

Of reports only regular files directly in the folder count, `NAME.json`; links are followed only inside it. Files are
read by a thread, since they may be large.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from ...api.json_reply import JSONReply
from ...control.kv_store import LONGEST_S, AskStore
from ...control.observe.cache_views import CacheViews
from ...core.errors import InvalidRequest, NotFound, TokenmillError
from ...core.events import CacheShown
from ...core.units import MiB
from ..callers import require_operator
from ..generation import Generation
from ..http import error_reply


class KVView:
    """ask: of the KV store; None: there is none."""

    def __init__(self, views: CacheViews, ask: AskStore | None = None) -> None:
        self._views = views
        self._ask = ask

    async def show(self, request: HttpRequest) -> Response:
        require_operator(request)
        found = await self._views.ask()
        data = [_shown(link, said) for link, said in sorted(found.items())]
        return JSONReply({"object": "list", "data": data, "tiers": await self._tiers()})

    async def _tiers(self) -> dict[str, Any] | None:
        """By name; None while the store does not answer."""
        if self._ask is None:
            return None
        try:
            async with asyncio.timeout(LONGEST_S):
                told: dict[str, Any] = (await self._ask("stat", {}))["tiers"]
        except (TokenmillError, TimeoutError):
            return None
        return told


def _shown(link: int, said: CacheShown) -> dict[str, Any]:
    """The tree is that of the first pool that sees everything; there is none where all have a window."""
    pools = [
        {"window": pool.window, "blocks": pool.num_blocks, "free": pool.num_free, "cached": pool.num_cached,
         "held": pool.num_held}
        for pool in said.pools
    ]  # fmt: skip
    first = next((pool for pool in pools if not pool["window"]), pools[0] if pools else {})
    return {
        "object": "kv",
        "engine": link,
        "block_size": said.block_size,
        **first,
        "pools": pools,
        "num_published": said.summary.num_published,
        "num_seen": said.summary.num_seen,
        "runs": [run._asdict() | {"parent": None if run.parent < 0 else run.parent} for run in said.summary.runs],
    }


FOLDER = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    "": "text/plain; charset=utf-8",
}
"""By the ending of the name. A file with another ending is not served."""
# `nosniff` is on every answer of the server (run.py).
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class _File(NamedTuple):
    """etag: a weak one, since it is that of the file compressed too (RFC 9110, 8.8.1)."""

    content: bytes
    media_type: str
    etag: str


class Pages:
    """Reads the files when the first one is asked for, and keeps them: 300 KiB."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._files: dict[str, _File] = {}

    async def enter(self, request: HttpRequest) -> Response:
        """The pages name each other relative to a folder."""
        return RedirectResponse("console/", 307, HEADERS)

    async def file(self, request: HttpRequest) -> Response:
        if not self._files:
            self._files = _read(self._folder)
        path = request.path_params["path"]
        found = self._files.get(path or "index.html")
        if found is None:
            return self._missing(request, path)
        headers = {**HEADERS, "etag": found.etag}
        if _is_named(found.etag, request.headers.getlist("if-none-match")):
            return Response(status_code=304, headers=headers)
        return Response(found.content, headers={**headers, "content-type": found.media_type})

    def _missing(self, request: HttpRequest, path: str) -> Response:
        """404: a page that leads back for browsers, an error of the API for others."""
        if "text/html" not in request.headers.get("accept", ""):
            refusal = error_reply(NotFound("The console has no such file."), request.scope)
            refusal.headers.update(HEADERS)
            return refusal
        page = self._files["missing.html"]
        above = b"../" * path.count("/")  # the page names files relative to the console's folder
        content = page.content.replace(b'href="', b'href="./' + above)
        return Response(content, 404, {**HEADERS, "content-type": page.media_type})


def _is_named(etag: str, if_none_match: Sequence[str]) -> bool:
    """Whether a client has that version: strong or weak is the same here (RFC 9110, 13.1.2)."""
    named = [each.strip().removeprefix("W/") for each in ",".join(if_none_match).split(",")]
    return "*" in named or etag.removeprefix("W/") in named


def _read(folder: Path) -> dict[str, _File]:
    files: dict[str, _File] = {}
    for path in sorted(folder.rglob("*")):
        media_type = TYPES.get(path.suffix)
        if media_type is not None and path.is_file():
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()[:16]
            files[path.relative_to(folder).as_posix()] = _File(content, media_type, f'W/"{digest}"')
    return files


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


def routes(generation: Generation, ask_kv: AskStore | None = None) -> list[Route]:
    pages, reports = Pages(), Reports(generation.config.reports_dir)
    kv = KVView(generation.client.cache_views, ask_kv)
    return [
        Route("/console", pages.enter),
        Route("/console/{path:path}", pages.file),
        Route("/admin/kv", kv.show),
        Route("/admin/reports", reports.reports),
        Route("/admin/reports/{name}", reports.report),
    ]

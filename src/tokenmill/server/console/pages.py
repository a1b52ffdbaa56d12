"""The console's static files, as they lie in the package, with headers that let them load nothing from elsewhere."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import RedirectResponse, Response

from ...core.errors import NotFound
from ..http import error_reply

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
        found = self._files.get(request.path_params["path"] or "index.html")
        if found is None:
            refusal = error_reply(NotFound("The console has no such file."), request.scope)
            refusal.headers.update(HEADERS)
            return refusal
        headers = {**HEADERS, "etag": found.etag}
        if request.headers.get("if-none-match") == found.etag:
            return Response(status_code=304, headers=headers)
        return Response(found.content, headers={**headers, "content-type": found.media_type})


def _read(folder: Path) -> dict[str, _File]:
    files: dict[str, _File] = {}
    for path in sorted(folder.rglob("*")):
        media_type = TYPES.get(path.suffix)
        if media_type is not None and path.is_file():
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()[:16]
            files[path.relative_to(folder).as_posix()] = _File(content, media_type, f'"{digest}"')
    return files

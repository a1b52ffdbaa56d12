"""Speaks HTTP to the Hugging Face hub, or to the mirror that HF_ENDPOINT names, and downloads files from it or by URL.

A download goes on where an earlier one stopped: what has come is kept beside the file, as .NAME.VERSION.part, under a
version that the server tells, and with what the answer that began it calls itself (ETag, or Last-Modified): the rest is
asked for under that condition, so that two versions are never mixed. It takes its name when it is whole and its digest
is the one that the hub tells. Proxies are those of the environment (HTTPS_PROXY). It decides nothing about names and
places (hub.py).
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from ..core.errors import FetchError
from ..core.units import format_bytes
from .digest import hash_file
from .model_names import HUB_URL, HubName, UrlName, hub_endpoint

_TIMEOUT_S = 30.0
_RETRY_S = 1.0
_NUM_TRIES = 5
"""In a row without a byte more."""
_CHUNK_BYTES = 1 << 20
_TOLD_BYTES = 1 << 18
"""Of progress: more often would take time from the download."""
_SPARE_BYTES = 64 << 20
"""Left free on a disk that a model is put on."""
_MAX_ANSWER_BYTES = 64 << 20
_BUSY = (429, 500, 502, 503, 504)
_CONTENT_RANGE = re.compile(r"bytes ([0-9]+)-[0-9]+/([0-9]+|\*)")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """size: bytes, 0 where it is not told. version: what tells it from another file at the same place. sha256: of its
    content; git_sha1: of a small file that the hub keeps in git, as git counts it. Either is "" where it is not
    told."""

    url: str
    size: int
    version: str
    sha256: str = ""
    git_sha1: str = ""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """What the hub tells of a repository. parameters, architecture: of its GGUF files; 0 and "" where it does not."""

    repository: str
    num_downloads: int
    parameters: int
    architecture: str
    is_gated: bool


def repository_files(hub: HubName) -> dict[str, RemoteFile]:
    """Name -> file, all of one commit. Raises FetchError."""
    at = "" if hub.revision == "main" else f"/revision/{urllib.parse.quote(hub.revision, safe='')}"
    info = _ask(f"/api/models/{hub.repository}{at}?blobs=true")
    try:
        commit = str(info["sha"])
        found = {str(each["rfilename"]): _file_of(hub.repository, commit, each) for each in info["siblings"]}
    except (LookupError, TypeError, ValueError, AttributeError):
        raise _odd_answer() from None
    return {name: file for name, file in found.items() if _is_inside(name)}


def _file_of(repository: str, commit: str, told: Mapping[str, Any]) -> RemoteFile:
    url = f"{hub_endpoint()}/{repository}/resolve/{commit}/{urllib.parse.quote(told['rfilename'])}"
    lfs = told.get("lfs") or {}
    sha256, blob = str(lfs.get("sha256") or ""), str(told.get("blobId") or "")
    size, version = int(lfs.get("size") or told.get("size") or 0), sha256 or blob or commit
    if not (version.isascii() and version.isalnum()):  # it becomes part of a file's name
        raise ValueError
    return RemoteFile(url, size, version, sha256, "" if sha256 else blob)


def _is_inside(name: str) -> bool:
    """Whether a file of that name lands below the folder that it is put into, and can be told on a terminal."""
    path = PurePosixPath(name)
    plain = name.isprintable() and "\\" not in name
    return plain and not path.is_absolute() and not {"..", ""} & set(name.split("/"))


def search_models(words: str, limit: int) -> list[FoundModel]:
    """Repositories with GGUF files whose names have these words, the most downloaded first. Raises FetchError."""
    asked = [("search", words), ("filter", "gguf"), ("sort", "downloads"), ("direction", "-1"), ("limit", str(limit))]
    asked += [("expand[]", field) for field in ("downloads", "gguf", "gated")]
    answer = _ask(f"/api/models?{urllib.parse.urlencode(asked)}")
    try:
        return [
            FoundModel(
                str(each["id"]),
                int(each.get("downloads") or 0),
                int((each.get("gguf") or {}).get("total") or 0),
                str((each.get("gguf") or {}).get("architecture") or ""),
                bool(each.get("gated")),
            )
            for each in answer
        ]
    except (LookupError, TypeError, ValueError, AttributeError):
        raise _odd_answer() from None


def file_at(name: UrlName) -> RemoteFile:
    """What a web server tells of a file. Raises FetchError."""
    url = f"{name.url}?{name.query}" if name.query else name.url
    with _answer(url) as response:
        size = int(response.headers.get("Content-Length") or 0)
        if not size and not response.chunked:
            raise FetchError(
                f"{_shown(url)} cannot be fetched: the server does not tell its size, so that a part could be taken for"
                " the whole. Fetch it yourself and pass its path."
            )
        told = response.headers.get("ETag") or response.headers.get("Last-Modified") or str(size)
    return RemoteFile(url, size, hashlib.sha256(told.encode()).hexdigest())


def require_room(folder: Path, files: Mapping[Path, RemoteFile]) -> None:
    """Raises FetchError where the disk below `folder` cannot take what is missing of these."""
    missing = sum(max(0, file.size - bytes_there(target, file)) for target, file in files.items())
    there = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(there).free
    if missing and missing + _SPARE_BYTES > free:
        raise FetchError(
            f"{format_bytes(missing)} are to be fetched into {folder}, where {format_bytes(free)} are free. Remove a"
            " model (tokenmill list; tokenmill rm MODEL), or set TOKENMILL_CACHE to a folder on another disk."
        )


def bytes_there(target: Path, file: RemoteFile) -> int:
    """How much of it an earlier download left."""
    with contextlib.suppress(OSError):
        return target.stat().st_size
    with contextlib.suppress(OSError):
        return _part(target, file).stat().st_size
    return 0


def _part(target: Path, file: RemoteFile) -> Path:
    return target.with_name(f".{target.name}.{file.version[:16]}.part")


def _validator(part: Path) -> Path:
    """Holds what the answer that `part` began with calls itself. Whoever removes parts removes it too."""
    return part.with_suffix(".etag.part")


def download(file: RemoteFile, target: Path, progress: Callable[[int], None]) -> str:
    """Fetch it to `target`, and give its SHA-256. progress(bytes so far) is called now and then. Raises FetchError;
    what has come by then is kept, unless it is wrong."""
    part = _part(target, file)
    target.parent.mkdir(parents=True, exist_ok=True)
    for old in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        if old not in (part, _validator(part)):
            old.unlink()
    try:
        sha256 = _fetch_whole(file, part, progress)
        os.replace(part, target)
        _validator(part).unlink(missing_ok=True)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise FetchError(f"{target} cannot be written: {error.strerror or error}.") from error
        raise FetchError(
            f"The disk of {target.parent} is full. What has come is kept: make room, and fetch it again to go on."
        ) from error
    return sha256


def _fetch_whole(file: RemoteFile, part: Path, progress: Callable[[int], None]) -> str:
    """Until all is in `part`: a connection that breaks is made again."""
    num_tries, before = 0, -1
    while True:
        broken = _stream(file, part, progress)
        if broken is None:
            break
        size = part.stat().st_size if part.exists() else 0
        num_tries = num_tries + 1 if size <= before else 1
        before = max(before, size)
        if num_tries >= _NUM_TRIES:
            kept = "What has come is kept: fetch it again to go on."
            if _condition(file, part) is None:
                kept = "The server does not say by what its files are known: the next fetch begins anew."
            raise FetchError(
                f"The download of {_shown(file.url)} broke off after {format_bytes(size)} of {format_bytes(file.size)}"
                f" ({broken}). {kept}"
            )
        time.sleep(_RETRY_S * num_tries)
    sha256 = hash_file(part)
    if not is_whole(file, part, sha256):
        _forget(part)
        raise FetchError(
            f"What came of {_shown(file.url)} does not have the size and digest that the hub tells ({file.version}),"
            " and is not used. Try again; if that fails too, a proxy or mirror serves another file."
        )
    if not (file.sha256 or file.git_sha1) and not _begins_as_gguf(part):
        _forget(part)
        raise FetchError(f"What {_shown(file.url)} gives is no GGUF file. Is it a page for people?")
    return sha256


def _begins_as_gguf(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"


def is_whole(file: RemoteFile, path: Path, sha256: str) -> bool:
    """Whether the file at `path`, which has that SHA-256, is the one that the hub told of."""
    if file.size and path.stat().st_size != file.size:
        return False
    return _git_sha1(path) == file.git_sha1 if file.git_sha1 else file.sha256 in ("", sha256)


def _stream(file: RemoteFile, part: Path, progress: Callable[[int], None]) -> str | None:
    """Append what is missing. None: it is whole; otherwise why the connection ended before. Errors of the disk pass."""
    done = part.stat().st_size if part.exists() else 0
    if file.size and done == file.size:
        return None
    condition = _condition(file, part)
    if done > file.size or condition is None:
        done = 0
    try:
        response = _open(file.url, {"Range": f"bytes={done}-", **condition} if done and condition is not None else {})
    except _Unanswered as error:
        return error.why
    with response:
        if response.status != 206:
            _begin(part, file, response)
            done = 0
        elif not _is_rest(response, done, file.size):
            _forget(part)
            return "other bytes came than were asked for"
        with open(part, "r+b") as out:
            out.seek(done)
            told = done
            while True:
                try:
                    chunk = response.read1(_CHUNK_BYTES)  # what has come, however little
                except (OSError, http.client.HTTPException) as error:
                    return _reason(error)
                if not chunk:
                    break
                out.write(chunk)
                done += len(chunk)
                if done - told >= _TOLD_BYTES:
                    told = done
                    progress(done)
            progress(done)
            out.flush()
            os.fsync(out.fileno())
    if file.size and done != file.size:
        return "the connection ended" if done < file.size else "more came than was told"
    return None


def _condition(file: RemoteFile, part: Path) -> dict[str, str] | None:
    """Headers by which the rest of `part` comes, or all where the file is another by now (RFC 9110, 13.1.5). None: it
    cannot be told whether it is, neither so nor by a digest at the end."""
    try:
        return {"If-Range": _validator(part).read_text(encoding="latin1")}
    except OSError:
        return {} if file.sha256 or file.git_sha1 else None


def _begin(part: Path, file: RemoteFile, response: http.client.HTTPResponse) -> None:
    """An empty part, for the whole file of that answer. Raises FetchError where that has another size than was told."""
    _forget(part)
    told = response.headers.get("Content-Length")
    if file.size and told is not None and told != str(file.size):
        raise FetchError(
            f"{_shown(file.url)} changed while it was fetched: it has {told} bytes by now, and had {file.size}. Fetch"
            " it again."
        )
    part.touch()
    validator = response.headers.get("ETag") or ""
    if not validator or validator.startswith("W/"):  # files of one weak ETag may differ
        validator = response.headers.get("Last-Modified") or ""
    if validator:
        _validator(part).write_text(validator, encoding="latin1")


def _is_rest(response: http.client.HTTPResponse, start: int, size: int) -> bool:
    """Whether what comes begins there, and is of a file of that size."""
    found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range") or "")
    return found is not None and int(found[1]) == start and found[2] in ("*", str(size))


def _forget(part: Path) -> None:
    for file in (part, _validator(part)):
        file.unlink(missing_ok=True)


def _git_sha1(path: Path) -> str:
    """As git counts a file; those that it holds itself are small."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


# ---- HTTP ------------------------------------------------------------------------------------------------------------


class _Unanswered(Exception):
    """Another try may succeed. why: in a word; message: for the user, where none is made."""

    def __init__(self, why: str, message: str) -> None:
        super().__init__(message)
        self.why = why
        self.message = message


class _Redirects(urllib.request.HTTPRedirectHandler):
    """The token goes to the hub, and not to the storage that it sends on to."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if old.scheme == "https" and new.scheme != "https":
            raise FetchError(f"{_shown(req.full_url)} leads to {_shown(newurl)}, which is not encrypted.")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        token = req.unredirected_hdrs.get("Authorization")
        if request is not None and token and (old.scheme, old.netloc) == (new.scheme, new.netloc):
            request.add_unredirected_header("Authorization", token)
        return request


def _ask(path: str) -> Any:
    """The JSON that the hub's API answers."""
    try:
        with _answer(hub_endpoint() + path) as response:
            return json.loads(response.read(_MAX_ANSWER_BYTES))
    except (ValueError, RecursionError, OSError, http.client.HTTPException):
        raise _odd_answer() from None


def _odd_answer() -> FetchError:
    return FetchError(f"{hub_endpoint()} does not answer as the Hugging Face hub does. Is HF_ENDPOINT right?")


def _answer(url: str) -> http.client.HTTPResponse:
    """The answer to GET. Raises FetchError."""
    try:
        return _open(url, {})
    except _Unanswered as error:
        raise FetchError(error.message) from None


def _open(url: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
    """The answer to GET. Raises _Unanswered, and FetchError for what another try would not mend."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no", "off"):
        raise FetchError(f"{_shown(url)} is not asked, since HF_HUB_OFFLINE is set. Unset it to fetch models.")
    request = urllib.request.Request(url, headers={"User-Agent": "tokenmill", **headers})
    token = _token() if url.startswith(hub_endpoint() + "/") else ""
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        response: http.client.HTTPResponse = urllib.request.build_opener(_Redirects).open(request, timeout=_TIMEOUT_S)
        return response
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(url, error, bool(token)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = _reason(error)
        raise _Unanswered(
            why,
            f"There is no answer from {urllib.parse.urlsplit(url).netloc} ({why}). Check the network and HTTPS_PROXY,"
            " let HF_ENDPOINT name a mirror, or fetch the model elsewhere and pass its path.",
        ) from None


def _refusal(url: str, error: urllib.error.HTTPError, has_token: bool) -> Exception:
    """What a status of an error means to the user."""
    told, shown = error.headers.get("X-Error-Code", ""), _shown(url)
    if error.code in _BUSY:
        why = f"status {error.code}"
        return _Unanswered(why, f"{urllib.parse.urlsplit(url).netloc} cannot answer now ({why}). Try again later.")
    if not url.startswith(hub_endpoint() + "/"):
        return FetchError(f"{shown} cannot be fetched: the server answers {error.code} {_reason(error)}.")
    found = urllib.parse.urlsplit(url).path.removeprefix(urllib.parse.urlsplit(hub_endpoint()).path)
    repository = "/".join(found.removeprefix("/api/models").split("/")[1:3])
    page = f"{hub_endpoint()}/{repository}"
    if told == "GatedRepo" or error.code == 403:
        account = "the account of HF_TOKEN" if has_token else "an account"
        then = "" if has_token else f", and set HF_TOKEN to a token of it (made at {HUB_URL}/settings/tokens)"
        return FetchError(f"{repository} is gated: accept its licence at {page} with {account}{then}.")
    if error.code == 401 and has_token and told != "RepoNotFound":
        return FetchError(f"The hub does not take HF_TOKEN: make a new one at {HUB_URL}/settings/tokens, or unset it.")
    if told in ("EntryNotFound", "RevisionNotFound"):
        return FetchError(f"{page} has no such {'file' if told == 'EntryNotFound' else 'revision'} ({shown}).")
    if error.code in (401, 404):
        private = "" if has_token else ", or set HF_TOKEN if it is private"
        return FetchError(
            f"There is no model {repository} at {hub_endpoint()}: check the name (tokenmill search"
            f" {repository.rpartition('/')[2]}){private}."
        )
    return FetchError(f"{shown} cannot be fetched: the hub answers {error.code} {_reason(error)}.")


def _token() -> str:
    """Of HF_TOKEN, or as the hub's own command line stored it at a login. Raises FetchError for what no header may
    hold, without telling it."""
    token = _stored_token()
    if not (token.isascii() and token.isprintable()):
        raise FetchError("HF_TOKEN, or the token stored by a login to the hub, is none: it must be one line of ASCII.")
    return token


def _stored_token() -> str:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := os.environ.get(name, "").strip():
            return token
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    path = os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")
    try:
        return Path(path).read_text(encoding="utf8").strip()
    except (OSError, ValueError):
        return ""


def _shown(url: str) -> str:
    """Without its query, which may be a secret."""
    return url.partition("?")[0]


def _reason(error: Exception) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(inner).splitlines()[0][:200] if str(inner) else type(inner).__name__

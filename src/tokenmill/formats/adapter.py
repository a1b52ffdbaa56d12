"""Reads a LoRA adapter as PEFT saves it: a folder with adapter_config.json and adapter_model.safetensors.

What the files say is checked against themselves here, against a model in models/lora.py. Only plain LoRA is taken;
whatever would make an adapter run almost right (DoRA, trained biases, whole modules, changed base weights) is refused
by name, and so is a pickled adapter_model.bin. Modules are named as in their model, less PEFT's prefix.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import BadCheckpoint
from .safetensors import open_safetensors, read_json
from .tensor import Tensor

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
KINDS = ("f32", "f16", "bf16")

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(.+)\.lora_([AB])\.weight")
_PLAIN_PATTERN = re.compile(r"\^?[A-Za-z0-9_.]+")
# Key of the config -> what it would mean. Falsy values ask for nothing.
_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules trained beside the adapter",
    "lora_bias": "biases on its matrices",
    "fan_in_fan_out": "transposed weights",
    "layer_replication": "repeated layers",
    "target_parameters": "adapters of single parameters",
    "trainable_token_indices": "trained token embeddings",
    "alora_invocation_tokens": "activation by tokens",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal matrices",
    "arrow_config": "a router of adapters",
}
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True, slots=True)
class LoraModule:
    """The change scale * b @ a of one module's matrix: a is [rank, inputs], b [outputs, rank]."""

    name: str
    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An open adapter, its modules in order of name. `digest`: SHA-256, hex, of all that decides what it computes, and
    of nothing else: equal digests mean equal changes, whatever the files or the adapter are called."""

    path: Path
    modules: tuple[LoraModule, ...]
    digest: str

    @property
    def rank(self) -> int:
        return max(module.rank for module in self.modules)

    @property
    def num_bytes(self) -> int:
        return sum(module.a.data.nbytes + module.b.data.nbytes for module in self.modules)


def open_adapter(path: str | Path, *, inside: str | Path | None = None) -> Adapter:
    """Open an adapter's folder and hash its content. inside: refuse whatever does not really (symbolic links followed)
    lie under this folder. Raises BadCheckpoint."""
    path = Path(path)
    if inside is not None:
        path = _require_inside(path, Path(inside))
    config_file, weights_file = path / CONFIG_NAME, path / WEIGHTS_NAME
    if not config_file.is_file():
        raise BadCheckpoint(f"{path} has no {CONFIG_NAME}, so it is not a LoRA adapter in PEFT's format.")
    if not weights_file.is_file():
        pickled = (path / "adapter_model.bin").exists()
        hint = "; adapter_model.bin is a pickle, which is never read: save it as safetensors" if pickled else ""
        raise BadCheckpoint(f"{path} has no {WEIGHTS_NAME}{hint}.")
    if inside is not None:
        config_file, weights_file = (_require_inside(file, Path(inside)) for file in (config_file, weights_file))
    config = read_json(config_file)
    _check_config(path, config)
    modules = tuple(_modules(path, config, open_safetensors(weights_file)))
    return Adapter(path, modules, _digest(modules))


def _require_inside(path: Path, folder: Path) -> Path:
    real, real_folder = path.resolve(), folder.resolve()
    if not real.is_relative_to(real_folder):
        raise BadCheckpoint(f"{path} does not lie inside {folder}, the only folder that adapters are taken from.")
    return real


def _check_config(path: Path, config: dict[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise BadCheckpoint(f"{path}: peft_type is {kind!r}; only LORA is supported.")
    for key, meaning in _REFUSED.items():
        if config.get(key):
            raise BadCheckpoint(f"{path}: {key} asks for {meaning}, which is not supported; only plain LoRA is.")
    if config.get("bias", "none") != "none":
        raise BadCheckpoint(f"{path}: bias is {config['bias']!r}; adapters that train biases are not supported.")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGE_THE_BASE):
        raise BadCheckpoint(
            f"{path}: init_lora_weights {start!r} changes the base weights too; convert it to plain LoRA with PEFT."
        )


def _modules(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Iterable[LoraModule]:
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
        if found is None:
            raise BadCheckpoint(f"{path}: tensor {name!r} is not part of a plain LoRA adapter of linear layers.")
        if tensor.kind not in KINDS or len(tensor.shape) != 2 or 0 in tensor.shape:
            raise BadCheckpoint(
                f"{path}: tensor {name!r} is {tensor.kind} {tensor.shape}; a matrix of {', '.join(KINDS)} was expected."
            )
        pairs.setdefault(found[1], {})[found[2]] = tensor
    if not pairs:
        raise BadCheckpoint(f"{path} holds no tensors.")
    for name in sorted(pairs):
        pair = pairs[name]
        if len(pair) != 2:
            raise BadCheckpoint(f"{path}: {name} has lora_{next(iter(pair))} without its other half.")
        a, b = pair["A"], pair["B"]
        rank = _setting(path, config, "rank_pattern", "r", name)
        if not a.shape[0] == b.shape[1] == rank:
            raise BadCheckpoint(f"{path}: {name} has matrices {a.shape} and {b.shape}, but its rank is {rank:g}.")
        alpha = _setting(path, config, "alpha_pattern", "lora_alpha", name)
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        yield LoraModule(name, a, b, scale)


def _setting(path: Path, config: dict[str, Any], pattern_key: str, key: str, name: str) -> float:
    """The setting of a module: that of the first pattern which ends its name, else the common one."""
    patterns = config.get(pattern_key) or {}
    if not isinstance(patterns, dict):
        raise BadCheckpoint(f"{path}: {pattern_key} must be an object.")
    value = config.get(key)
    for pattern, own in patterns.items():
        if not _PLAIN_PATTERN.fullmatch(pattern):  # a regular expression of a stranger may never end
            raise BadCheckpoint(f"{path}: {pattern_key} has {pattern!r}; only module names are supported there.")
        if re.match(rf"(.*\.)?({pattern})$", name):
            value = own
            break
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise BadCheckpoint(f"{path}: {key} of {name} must be a number above 0, got {value!r}.")
    return value


def _digest(modules: Iterable[LoraModule]) -> str:
    digest = hashlib.sha256()
    for module in modules:
        digest.update(f"{module.name}\n".encode() + struct.pack("<d", module.scale))
        for tensor in (module.a, module.b):
            digest.update(f"{tensor.kind} {tensor.shape}\n".encode())
            digest.update(tensor.data)
    return digest.hexdigest()

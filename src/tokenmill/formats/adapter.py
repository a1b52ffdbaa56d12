"""Reads a LoRA adapter as PEFT saves it: a folder with adapter_config.json and adapter_model.safetensors.

What the files say is checked against themselves here, against a model in models/lora.py. LoRA and DoRA (Liu et al.,
2024) of linears and of the token embedding are taken; whatever would make an adapter run almost right (trained biases,
whole modules, changed base weights) is refused by name, and so is a pickled adapter_model.bin. Modules are named as in
their model, less PEFT's prefix.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import BadCheckpoint
from .bounded_regex import BadPattern, matches_tail
from .safetensors import open_safetensors, read_json
from .tensor import Tensor

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
KINDS = ("f32", "f16", "bf16")

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(.+)\.(?:lora_([AB])\.weight|lora_embedding_([AB])|(lora_magnitude_vector)(?:\.weight)?)")
_BASE = re.compile(r"(.+)\.base_layer\.weight")
_WHOLE = re.compile(r"(?:.+\.)?(?:lm_head|embed_tokens)\.weight")
# Key of the config -> what it would mean. Falsy values ask for nothing.
_REFUSED = {
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
_KNOWN = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules",
    "task_type", "use_dora", "use_rslora",
}  # fmt: skip
"""Keys that are read here, say nothing about what an adapter computes, or say it by its tensors too."""
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True, slots=True)
class LoraModule:
    """The change scale * b @ a of one module's matrix W [outputs, inputs]: a is [rank, inputs], b [outputs, rank].

    of_tokens  the module is the token embedding, whose inputs are the vocabulary
    magnitude  of DoRA, [outputs]: rows of W + scale * b @ a are scaled to these lengths; None for plain LoRA
    """

    name: str
    a: Tensor
    b: Tensor
    scale: float
    of_tokens: bool = False
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An open adapter, its modules in order of name. `digest`: SHA-256, hex, of all that decides what it computes, and
    of nothing else: equal digests mean equal changes, whatever the files or the adapter are called. `copied`: name and
    shape of the base model's matrices that lie in the file too, as PEFT has it for adapted heads and embeddings."""

    path: Path
    modules: tuple[LoraModule, ...]
    digest: str
    copied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return max(module.rank for module in self.modules)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.data.nbytes for module in self.modules for tensor in module.tensors)


def open_adapter(path: str | Path, *, inside: str | Path | None = None) -> Adapter:
    """Open an adapter's folder and hash its content. inside: refuse whatever does not really (symbolic links followed)
    lie under this folder. Raises BadCheckpoint."""
    path = Path(path)
    if inside is not None:
        path = _require_inside(path, Path(inside))
    config_file, weights_file = path / CONFIG_NAME, path / WEIGHTS_NAME
    if not os.path.isfile(config_file):  # other than Path's, these raise nothing, also for a name that is too long
        raise BadCheckpoint(f"{path} has no {CONFIG_NAME}, so it is not a LoRA adapter in PEFT's format.")
    if not os.path.isfile(weights_file):
        pickled = os.path.exists(path / "adapter_model.bin")
        hint = "; adapter_model.bin is a pickle, which is never read: save it as safetensors" if pickled else ""
        raise BadCheckpoint(f"{path} has no {WEIGHTS_NAME}{hint}.")
    if inside is not None:
        config_file, weights_file = (_require_inside(file, Path(inside)) for file in (config_file, weights_file))
    config = read_json(config_file)
    _check_config(path, config)
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in open_safetensors(weights_file).items()}
    copied = {found[1]: tuple(tensors[name].shape) for name in tensors if (found := _BASE.fullmatch(name))}
    modules = tuple(_modules(path, config, {n: t for n, t in tensors.items() if not _BASE.fullmatch(n)}))
    return Adapter(path, modules, _digest(modules), copied)


def _require_inside(path: Path, folder: Path) -> Path:
    real, real_folder = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if not real.is_relative_to(real_folder):
        raise BadCheckpoint(f"{path} does not lie inside {folder}, the only folder that adapters are taken from.")
    return real


def _check_config(path: Path, config: dict[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise BadCheckpoint(f"{path}: peft_type is {kind!r}; only LORA is supported.")
    for key, meaning in _REFUSED.items():
        if config.get(key):
            raise BadCheckpoint(f"{path}: {key} asks for {meaning}, which is not supported.")
    for key in sorted(config.keys() - _KNOWN - _REFUSED.keys()):
        if config[key]:
            raise BadCheckpoint(f"{path}: {key} = {config[key]!r} is not known here, and may change what it computes.")
    if config.get("bias", "none") != "none":
        raise BadCheckpoint(f"{path}: bias is {config['bias']!r}; adapters that train biases are not supported.")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGE_THE_BASE):
        raise BadCheckpoint(
            f"{path}: init_lora_weights {start!r} changes the base weights too; convert it to plain LoRA with PEFT."
        )


def _modules(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Iterable[LoraModule]:
    parts: dict[str, dict[str, Tensor]] = {}
    of_tokens = set()
    for name, tensor in tensors.items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            whole = "; embeddings or heads that were resized or trained whole are not supported"
            raise BadCheckpoint(
                f"{path}: tensor {name!r} is not part of a plain LoRA adapter of linear layers and embeddings"
                f"{whole if _WHOLE.fullmatch(name) else ''}."
            )
        num_axes = 1 if found[4] else 2
        if tensor.kind not in KINDS or len(tensor.shape) != num_axes or 0 in tensor.shape:
            what = "vector" if found[4] else "matrix"
            raise BadCheckpoint(
                f"{path}: tensor {name!r} is {tensor.kind} {tensor.shape}; a {what} of {', '.join(KINDS)} was expected."
            )
        if found[3]:
            of_tokens.add(found[1])
        parts.setdefault(found[1], {})[found[2] or found[3] or found[4]] = tensor
    if not parts:
        raise BadCheckpoint(f"{path} holds no tensors.")
    use_dora = bool(config.get("use_dora"))
    for name in sorted(parts):
        a, b, magnitude = (parts[name].get(key) for key in ("A", "B", "lora_magnitude_vector"))
        if a is None or b is None:
            raise BadCheckpoint(f"{path}: {name} has lora_{'A' if b is None else 'B'} without its other half.")
        if use_dora != (magnitude is not None):
            raise BadCheckpoint(f"{path}: {name} has {'no' if use_dora else 'a'} magnitude, use_dora is {use_dora}.")
        rank = _setting(path, config, "rank_pattern", "r", name)
        if not a.shape[0] == b.shape[1] == rank:
            raise BadCheckpoint(f"{path}: {name} has matrices {a.shape} and {b.shape}, but its rank is {rank:g}.")
        if magnitude is not None and magnitude.shape[0] != b.shape[0]:
            raise BadCheckpoint(f"{path}: {name} has {magnitude.shape[0]} magnitudes for {b.shape[0]} outputs.")
        alpha = _setting(path, config, "alpha_pattern", "lora_alpha", name)
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        yield LoraModule(name, a, b, scale, name in of_tokens, magnitude)


def _setting(path: Path, config: dict[str, Any], pattern_key: str, key: str, name: str) -> float:
    """The setting of a module: that of the first pattern which ends its name, else the common one."""
    patterns = config.get(pattern_key) or {}
    if not isinstance(patterns, dict):
        raise BadCheckpoint(f"{path}: {pattern_key} must be an object.")
    value = config.get(key)
    for pattern, own in patterns.items():
        try:
            if matches_tail(pattern, name):
                value = own
                break
        except BadPattern as error:
            raise BadCheckpoint(f"{path}: {pattern_key} has the pattern {pattern[:200]!r}: {error}.") from None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise BadCheckpoint(f"{path}: {key} of {name} must be a number above 0, got {value!r}.")
    return value


def _digest(modules: Iterable[LoraModule]) -> str:
    digest = hashlib.sha256()
    for module in modules:
        digest.update(f"{module.name}\n".encode() + struct.pack("<d", module.scale))
        for tensor in module.tensors:
            digest.update(f"{tensor.kind} {tensor.shape}\n".encode())
            digest.update(tensor.data)
    return digest.hexdigest()

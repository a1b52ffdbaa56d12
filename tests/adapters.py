"""Random LoRA adapters as PEFT saves them, and the same change merged into a checkpoint's weights."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tiny import tensor
from tokenmill.formats.adapter import open_adapter
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.formats.ggml import dequantise

Pairs = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Module -> (lora_A [r, K], lora_B [N, r])."""

EMBED = "embed_tokens"
_KINDS = {np.float32: "F32", np.float16: "F16", np.uint16: "BF16", np.int64: "I64", np.bool_: "BOOL"}


def random_pairs(checkpoint: Checkpoint, *, rank: int = 4, seed: int = 0, modules: tuple[str, ...] = ()) -> Pairs:
    """A pair for every matrix of a Hugging Face checkpoint whose module's last name is in `modules` (default: all
    linears), large enough to change what a model says. Of the embedding [V, D]: lora_embedding_A [r, V] and B [D, r].
    """
    pairs = {}
    for index, (name, found) in enumerate(sorted(checkpoint.tensors.items())):
        module = name.removesuffix(".weight")
        last = module.rsplit(".", 1)[-1]
        if len(found.shape) != 2 or last not in (modules or {last} - {EMBED}):
            continue
        rng = np.random.default_rng([seed, index])
        num_rows, num_cols = found.shape[::-1] if last == EMBED else found.shape
        a = rng.standard_normal((rank, num_cols)) * num_cols**-0.5
        b = rng.standard_normal((num_rows, rank)) * 0.5
        pairs[module] = (a.astype(np.float32), b.astype(np.float32))
    return pairs


def random_magnitudes(pairs: Pairs, *, seed: int = 0) -> dict[str, np.ndarray]:
    """DoRA's lengths of the rows of every adapted matrix."""
    rng = np.random.default_rng(seed)
    return {module: rng.uniform(0.5, 3, len(b)).astype(np.float32) for module, (_, b) in pairs.items()}


def write_adapter(
    folder: Path,
    pairs: Pairs,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    magnitudes: Mapping[str, np.ndarray] | None = None,
    copied: Mapping[str, np.ndarray] | None = None,
    **config: Any,
) -> Path:
    """The adapter's folder. magnitudes: those of DoRA. copied: matrices of the base model that PEFT saves too. `config`
    adds to its adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    common = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "target_modules": sorted(pairs)}
    if magnitudes:
        config["use_dora"] = True
    (folder / "adapter_config.json").write_text(json.dumps(common | config))
    tensors = {}
    for module, (a, b) in pairs.items():
        kind = "lora_embedding_{}" if module.endswith(EMBED) else "lora_{}.weight"
        tensors[f"base_model.model.{module}.{kind.format('A')}"] = a
        tensors[f"base_model.model.{module}.{kind.format('B')}"] = b
    for module, magnitude in (magnitudes or {}).items():
        tensors[f"base_model.model.{module}.lora_magnitude_vector"] = magnitude
    for module, weight in (copied or {}).items():
        tensors[f"base_model.model.{module}.base_layer.weight"] = weight
    (folder / "adapter_model.safetensors").write_bytes(safetensors(tensors))
    return folder


def safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    header, data = {}, b""
    for name, values in tensors.items():
        stored = np.ascontiguousarray(values).tobytes()
        dtype, offsets = _KINDS[values.dtype.type], [len(data), len(data) + len(stored)]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        data += stored
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def merged(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """The Hugging Face checkpoint with the adapter added to its weights, in float64: W + scale * B A, for DoRA with
    its rows scaled to their magnitudes. A head that was the embedding becomes a matrix of its own."""
    tensors, metadata = dict(checkpoint.tensors), dict(checkpoint.metadata)
    if metadata.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = replace(tensors["model.embed_tokens.weight"], name="lm_head.weight")
        metadata["tie_word_embeddings"] = False
    for module in open_adapter(folder).modules:
        name = f"{module.name}.weight"
        found = tensors[name]
        a, b = (
            dequantise(half.kind, half.data, half.num_values).reshape(half.shape).astype(np.float64)
            for half in (module.a, module.b)
        )
        weight = dequantise(found.kind, found.data, found.num_values).reshape(found.shape)
        whole = (weight.T if module.of_tokens else weight) + module.scale * (b @ a)
        if module.magnitude is not None:
            wanted = dequantise(module.magnitude.kind, module.magnitude.data, module.magnitude.num_values)
            whole *= (wanted / np.linalg.norm(whole, axis=1))[:, None]
        tensors[name] = tensor(name, whole.T if module.of_tokens else whole)
    return replace(checkpoint, tensors=tensors, metadata=metadata)

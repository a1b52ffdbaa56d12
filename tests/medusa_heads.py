"""Random Medusa heads for a model, and folders of them as their authors and vLLM write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adapters import safetensors
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.models.config import config_from_checkpoint

AUTHORS, VLLM = "authors", "vllm"
Arrays = dict[str, np.ndarray]


def random_heads(
    target: Checkpoint, num_heads: int, num_blocks: int, *, seed: int = 0, with_bias: bool = False
) -> Arrays:
    """By vLLM's names."""
    config, rng = config_from_checkpoint(target), np.random.default_rng(seed)
    width, arrays = config.width, {}
    for head in range(num_heads):
        for block in range(num_blocks):
            arrays[f"blocks.{head}.layers.{block}.weight"] = rng.normal(size=(width, width)) * width**-0.5
            if with_bias:
                arrays[f"blocks.{head}.layers.{block}.bias"] = rng.normal(size=width) * 0.3
        arrays[f"lm_heads.{head}.weight"] = rng.normal(size=(config.vocab_size, width)) * width**-0.5 * 2
    return {name: values.astype(np.float32) for name, values in arrays.items()}


def write_heads(folder: Path, arrays: Mapping[str, np.ndarray], form: str = VLLM, **more: Any) -> Path:
    """A folder of heads in one of the two forms."""
    heads = {name.split(".")[1] for name in arrays if name.startswith("lm_heads")}
    blocks = [name for name in arrays if name.startswith("blocks.0.") and name.endswith("weight")]
    config: dict[str, Any] = {"medusa_num_heads": len(heads), "medusa_num_layers": len(blocks)}
    file = "medusa_lm_head.safetensors"
    if form == VLLM:
        vocab_size, width = arrays["lm_heads.0.weight"].shape
        config = {"model_type": "medusa", "num_heads": len(heads), "num_hidden_layers": len(blocks)}
        config |= {"hidden_size": width, "vocab_size": vocab_size}
        file = "model.safetensors"
    else:
        arrays = {_authors_name(name, len(blocks)): values for name, values in arrays.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | more))
    (folder / file).write_bytes(safetensors(arrays))
    return folder


def _authors_name(name: str, num_blocks: int) -> str:
    part, head, *rest = name.split(".")
    return f"{head}.{num_blocks}.weight" if part == "lm_heads" else f"{head}.{rest[1]}.linear.{rest[2]}"

"""Asks other tools to quantise and store random matrices, and writes what they stored and what they read back to
quantised_goldens.safetensors.

Runs under an interpreter that has torch and the tools named, outside the project's own environment:

    python tests/oracle/make_quantised_goldens.py bitsandbytes modelopt

Cases of tools that are not named stay as they are.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

GOLDENS = Path(__file__).with_name("quantised_goldens.safetensors")
N, K = 24, 360

Case = tuple[str, dict[str, Any], dict[str, torch.Tensor]]
"""(name, quantization_config, parts with what was expected)"""


def bitsandbytes() -> Iterator[Case]:
    """Runs of 32 values go over the ends of rows; 270 scales are more than share one of their own."""
    import bitsandbytes.functional as tool

    weight = 0.1 * torch.randn(N, K)
    for kind, nested in (("nf4", True), ("nf4", False), ("fp4", True), ("fp4", False)):
        codes, state = tool.quantize_4bit(weight, quant_type=kind, compress_statistics=nested, blocksize=32)
        parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        settings = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
        expected = tool.dequantize_4bit(codes, state)
        yield f"{kind}{' with nested scales' if nested else ''}", settings, parts | {"weight": codes, "m": expected}
    codes, scales, _ = tool.int8_vectorwise_quant(weight[:, :96].half())
    expected = tool.int8_vectorwise_dequant(codes, scales)
    stored = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    yield "8-bit", {"load_in_8bit": True}, stored | {"m": expected}


def modelopt() -> Iterator[Case]:
    """A matrix of a small model that the package exported, and what it computes with before or reads back."""
    import modelopt.torch.quantization as tool
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import MXFP8QTensor, NVFP4QTensor
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 160, "num_attention_heads": 2, "num_hidden_layers": 1}
    for name, config in {
        "FP8": tool.FP8_DEFAULT_CFG,
        "FP8 in blocks": tool.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG,
        "FP8 by row": tool.FP8_PER_CHANNEL_PER_TOKEN_CFG,
        "MXFP8": tool.MXFP8_DEFAULT_CFG,
        "NVFP4": tool.NVFP4_DEFAULT_CFG,
    }.items():
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, architectures=["LlamaForCausalLM"], **sizes))
        model = tool.quantize(model, config, lambda given: given(torch.arange(40)[None]))
        matrix = model.model.layers[0].mlp.down_proj
        original = matrix.weight.detach().clone()
        with tempfile.TemporaryDirectory() as folder:
            export_hf_checkpoint(model, export_dir=folder)
            settings = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
            stored = load_file(Path(folder) / "model.safetensors")
        module = "model.layers.0.mlp.down_proj."
        parts = {key.removeprefix(module): part for key, part in stored.items() if key.startswith(module)}
        shape, dtype, scales = original.shape, torch.float32, parts["weight_scale"]
        if name == "MXFP8":  # what computes with these two needs a GPU
            expected = MXFP8QTensor(shape, dtype, parts["weight"]).dequantize(scale=scales)
        elif name == "NVFP4":
            given = {"scale": scales, "double_scale": parts["weight_scale_2"], "block_sizes": {-1: 16}}
            expected = NVFP4QTensor(shape, dtype, parts["weight"]).dequantize(**given)
        else:
            expected = matrix.weight_quantizer(original).detach()
        yield name, settings, parts | {"m": expected}


TOOLS: dict[str, Callable[[], Iterator[Case]]] = {"bitsandbytes": bitsandbytes, "modelopt": modelopt}


def main(tools: list[str]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    settings: dict[str, Any] = {}
    if GOLDENS.exists():
        with safe_open(GOLDENS, "pt") as file:
            settings = json.loads(file.metadata()["settings"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for tool in tools:
        torch.manual_seed(0)
        settings = {name: given for name, given in settings.items() if not name.startswith(f"{tool} ")}
        tensors = {name: part for name, part in tensors.items() if not name.startswith(f"{tool} ")}
        for name, given, parts in TOOLS[tool]():
            expected = parts.pop("m")
            settings[f"{tool} {name}"] = {"quant_method": tool, **given}
            stored = {f"m.{part}": value for part, value in parts.items()} | {"m.expected": expected.half()}
            tensors |= {f"{tool} {name}/{part}": value.clone().contiguous() for part, value in stored.items()}
    save_file(tensors, GOLDENS, {"settings": json.dumps(settings)})


if __name__ == "__main__":
    main(sys.argv[1:])

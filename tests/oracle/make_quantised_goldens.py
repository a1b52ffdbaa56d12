"""Asks other tools to quantise and store random matrices, and writes what they stored and what they read back to
quantised_goldens.safetensors.

Runs under an interpreter that has torch and the tools named, outside the project's own environment:

    python tests/oracle/make_quantised_goldens.py bitsandbytes modelopt auto-round

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


def auto_round() -> Iterator[Case]:
    """What its layers store, and what they make of the rows of a unit matrix."""
    from auto_round.export.export_to_autoround.export import dynamic_import_quant_linear_for_packing as layer_of

    num_outputs, num_inputs, group = 32, 96, 32
    for packing, bits, symmetric in (
        ("auto_round:auto_gptq", 4, True),
        ("auto_round:auto_gptq", 4, False),
        ("auto_round:auto_gptq", 3, False),
        ("auto_round", 2, False),
        ("auto_round", 3, False),
        ("auto_round:gptqmodel", 5, False),
        ("auto_round:exllamav2", 8, False),
        ("auto_round:auto_awq", 4, False),
    ):
        linear = torch.nn.Linear(num_inputs, num_outputs, bias=False)
        scales = (
            (linear.weight.detach().reshape(num_outputs, -1, group).abs().amax(-1) / 2 ** (bits - 1)).half().float()
        )
        zeros = torch.full_like(scales, 1 << (bits - 1))
        if not symmetric:
            zeros = torch.randint_like(scales, 1, 1 << bits)
        kind = layer_of(packing, bits, group, symmetric)
        if "awq" in packing:
            layer = kind.from_linear(linear, bits, group, scales=scales.t(), zeros=zeros.t())
        else:
            layer = kind(bits, group, num_inputs, num_outputs, bias=False)
            layer.device = "cpu"
            layer.pack(linear, scales, zeros, None)
        parts = {key: part for key, part in layer.state_dict().items() if part is not None}
        expected = layer.eval()(torch.eye(num_inputs)).t().float()
        settings = {"packing_format": packing, "bits": bits, "group_size": group, "sym": symmetric, "data_type": "int"}
        yield f"{packing} {bits}-bit{'' if symmetric else ' with zeros'}", settings, parts | {"m": expected}


TOOLS: dict[str, Callable[[], Iterator[Case]]] = {
    "bitsandbytes": bitsandbytes,
    "modelopt": modelopt,
    "auto-round": auto_round,
}


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

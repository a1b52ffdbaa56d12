"""Asks other tools to quantise and store random matrices, and writes what they stored and what they read back to
quantised_goldens.safetensors.

Runs under an interpreter that has torch and the tools named, outside the project's own environment:

    python tests/oracle/make_quantised_goldens.py bitsandbytes

Cases of tools that are not named stay as they are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

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


TOOLS: dict[str, Callable[[], Iterator[Case]]] = {"bitsandbytes": bitsandbytes}


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

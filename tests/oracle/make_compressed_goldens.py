"""Asks the compressed-tensors package to store random matrices in each of its forms, and writes what it stored and what
it reads back to compressed_goldens.safetensors.

Runs under an interpreter that has torch and compressed-tensors, outside the project's own environment. Sparse forms,
and codes that lie whole in their words, are made by releases before 0.11; the rest by those since 0.16:

    python tests/oracle/make_compressed_goldens.py [--add]

`--add` keeps the cases that are there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import compressed_tensors
import torch
from compressed_tensors.quantization import QuantizationScheme
from safetensors import safe_open
from safetensors.torch import save_file

GOLDENS = Path(__file__).with_name("compressed_goldens.safetensors")
N, K = 12, 96


def args(bits: int, kind: str, strategy: str, **others: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **others}


MX = {"group_size": 32, "scale_dtype": "torch.uint8"}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"pack-quantized of {bits} bits": ("pack-quantized", args(bits, "int", "group", group_size=32))
        for bits in (2, 3, 4, 5, 6, 7, 8)
    },
    "pack-quantized of 3 bits with zeros": (
        "pack-quantized",
        args(3, "int", "group", group_size=32) | {"symmetric": False},
    ),
    "float-quantized in blocks": ("float-quantized", args(8, "float", "block", block_structure=[16, 48])),
    "mxfp8-quantized": ("mxfp8-quantized", args(8, "float", "group", **MX)),
    "nvfp4-pack-quantized": (
        "nvfp4-pack-quantized",
        args(4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"),
    ),
    "mxfp4-pack-quantized": ("mxfp4-pack-quantized", args(4, "float", "group", **MX)),
}


def scales_of(weight: torch.Tensor, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Any plausible ones: what is tested is how they are stored and read."""
    if given["strategy"] == "block":
        rows, columns = given["block_structure"]
        return {"weight_scale": 0.002 + 0.003 * torch.rand(-(-N // rows), -(-K // columns))}
    largest = weight.reshape(N, -1, given["group_size"]).abs().amax(-1)
    if given["type"] == "int":
        scales = {"weight_scale": largest / (1 << (given["num_bits"] - 1))}
        if not given["symmetric"]:
            scales["weight_zero_point"] = torch.randint(-3, 3, largest.shape).to(torch.int8)
        return scales
    if given["scale_dtype"] == "torch.uint8":
        return {"weight_scale": 2.0 ** torch.floor(torch.log2(largest / (4 if given["num_bits"] == 4 else 256)))}
    whole = torch.tensor([448 * 6 / weight.abs().max()])
    return {"weight_scale": largest / 6 * whole, "weight_global_scale": whole}


def dense_forms() -> dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    from compressed_tensors.compressors.base import BaseCompressor

    made = {}
    for name, (form, given) in SCHEMES.items():
        weight = 0.1 * torch.randn(N, K)
        scheme = QuantizationScheme(targets=["Linear"], weights=given, format=form)
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress({"weight": weight, **scales_of(weight, given)}, scheme)
        expected = compressor.decompress(dict(stored), scheme)["weight"].float()
        made[name] = (
            {"format": form, "config_groups": {"group_0": {"weights": given}}},
            stored | {"expected": expected},
        )
    return made


def old_forms() -> dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import pack_to_int32
    from compressed_tensors.compressors.sparse_compressors.sparse_24_bitmask import (
        sparse24_bitmask_compress,
        sparse24_bitmask_decompress,
    )
    from compressed_tensors.compressors.sparse_compressors.sparse_bitmask import BitmaskTensor

    made = {}
    shape = torch.tensor([N, K]).reshape(-1, 1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        values, mask = sparse24_bitmask_compress(torch.randn(N, K, dtype=dtype))
        dense = sparse24_bitmask_decompress(values, mask, [N, K])
        sparsity = {"sparsity_config": {"format": "sparse-24-bitmask"}, "format": "dense"}
        tensors = {"compressed": values, "bitmask": mask, "shape": shape, "expected": dense.float()}
        made[f"sparse-24-bitmask of {str(dtype).removeprefix('torch.')}"] = (sparsity, tensors)
    weight = torch.randn(N, K, dtype=torch.bfloat16) * (torch.rand(N, K) < 0.3)
    bitmask = BitmaskTensor.from_dense(weight)
    tensors = {name.removeprefix("m."): value for name, value in bitmask.dict("m").items()}
    tensors["shape"] = tensors["shape"].reshape(-1, 1)
    sparsity = {"sparsity_config": {"format": "sparse-bitmask"}, "format": "dense"}
    made["sparse-bitmask"] = (sparsity, tensors | {"expected": weight.float()})
    codes = torch.randint(-100, 100, (N, K)).to(torch.float32).to(torch.float8_e4m3fn)
    values, mask = sparse24_bitmask_compress(codes)
    dense = sparse24_bitmask_decompress(values, mask, [N, K]).float()
    scales = 0.01 + torch.rand(N, 1)
    given = args(8, "float", "channel")
    made["sparse-24-bitmask of float-quantized"] = (
        {
            "sparsity_config": {"format": "sparse-24-bitmask"},
            "format": "float-quantized",
            "config_groups": {"group_0": {"weights": given}},
        },
        {"compressed": values, "bitmask": mask, "shape": shape, "weight_scale": scales, "expected": dense * scales},
    )
    for bits in (3, 5, 6):
        limit = 1 << (bits - 1)
        integers = torch.randint(-limit, limit, (N, K)).to(torch.int8)
        scales = 0.01 + torch.rand(N, K // 32)
        made[f"pack-quantized of {bits} bits, whole codes"] = (
            {
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": args(bits, "int", "group", group_size=32)}},
            },
            {
                "weight_packed": pack_to_int32(integers, bits),
                "weight_scale": scales,
                "weight_shape": torch.tensor([N, K]),
                "expected": integers * scales.repeat_interleave(32, 1),
            },
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--add", action="store_true")
    add = parser.parse_args().add
    torch.manual_seed(0)
    version = tuple(map(int, compressed_tensors.__version__.split(".")[:2]))
    made = old_forms() if version < (0, 11) else dense_forms()
    tensors: dict[str, torch.Tensor] = {}
    settings: dict[str, Any] = {}
    if add:
        with safe_open(GOLDENS, "pt") as file:
            settings = json.loads(file.metadata()["settings"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, (given, parts) in made.items():
        settings[name] = {"quant_method": "compressed-tensors", **given}
        tensors |= {f"{name}/m.{part}": value.clone().contiguous() for part, value in parts.items()}
    save_file(tensors, GOLDENS, {"settings": json.dumps(settings)})


if __name__ == "__main__":
    main()

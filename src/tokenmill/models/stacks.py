"""Matrices that are packed as a stack: a layer's experts, and what takes each head into and out of a latent space.

E experts  H heads  N outputs  K inputs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..core.errors import BadCheckpoint
from ..formats.quantised import QuantisedTensor
from ..formats.tensor import Tensor
from ..ops.api import GROUP, LatentGeometry, RawTensor
from ..ops.reference_weights import dequantise
from .config import ModelConfig
from .repack import DENSE_KINDS, dense, in_input_order, raw_matrix

_LARGEST_F16 = 65504.0


def expert_matrices(
    tensors: Mapping[str, Tensor | QuantisedTensor], name: str, num_experts: int
) -> list[Tensor | QuantisedTensor]:
    """Each expert's matrix: `name` (less '.weight') has `{e}` where they are stored one by one; else it is that of one
    tensor [E, N, K]."""
    if "{e}" in name:
        return [tensors[f"{name.format(e=expert)}.weight"] for expert in range(num_experts)]
    whole = tensors[f"{name}.weight"]
    if isinstance(whole, QuantisedTensor):
        raise BadCheckpoint(f"{whole.name}: experts of one tensor in {whole.layout} form are not supported.")
    return list(matrices_of(whole))


def matrices_of(tensor: Tensor) -> list[Tensor]:
    """The matrices [N, K] that a tensor [E, N, K] holds one after the other."""
    count, size = tensor.shape[0], tensor.data.nbytes // tensor.shape[0]
    return [
        Tensor(tensor.name, tensor.kind, tensor.shape[1:], tensor.data[index * size : (index + 1) * size])
        for index in range(count)
    ]


def as_matrix(tensor: Tensor | QuantisedTensor) -> Tensor | QuantisedTensor:
    """A vector as a matrix of one row."""
    if isinstance(tensor, Tensor) and len(tensor.shape) == 1:
        return replace(tensor, shape=(1, *tensor.shape))
    return tensor


def of_one_kind(matrices: Sequence[Sequence[RawTensor]]) -> Sequence[Sequence[RawTensor]]:
    """The same matrices, parts of parts, with columns in the order of the inputs and of one kind: the only one that
    they have, else float16, or float32 where that does not hold all values."""
    ordered = [[in_input_order(part) for part in parts] for parts in matrices]
    if len({part.kind for parts in ordered for part in parts}) == 1:
        return ordered
    values = [[dequantise(part) for part in parts] for parts in ordered]
    most = max(float(np.abs(part).max(initial=0)) for parts in values for part in parts)
    kind = "f16" if most <= _LARGEST_F16 else "f32"
    return [[dense(kind, part) for part in parts] for parts in values]


def latent_matrices(
    config: ModelConfig,
    tensor_of: Callable[[str], Tensor | QuantisedTensor],
    as_run: Callable[[Tensor | QuantisedTensor], RawTensor],
) -> tuple[list[RawTensor], list[RawTensor]]:
    """Each head's matrix into the latent space [latent, nope], and out of it [value, latent].

    A file that was made for the absorbed form has both; in another one kv_b gives keys and values of a latent, so that
    of keys is turned round: in float16 if it is quantised, as no block of the stored one is a block of that. Blocks are
    multiplied out where a head's channels do not begin with one."""
    latent = config.latent
    assert latent is not None
    k_up, v_up = _latent_matrices(config, latent, tensor_of, as_run)
    if latent.query_dim % GROUP or latent.nope_dim % GROUP:
        k_up = _multiplied_out(k_up)
    return k_up, v_up if latent.latent_dim % GROUP == 0 else _multiplied_out(v_up)


def _multiplied_out(matrices: list[RawTensor]) -> list[RawTensor]:
    if matrices[0].kind in DENSE_KINDS:
        return matrices
    return [_like(matrix, dequantise(matrix)) for matrix in matrices]


def _latent_matrices(
    config: ModelConfig,
    latent: LatentGeometry,
    tensor_of: Callable[[str], Tensor | QuantisedTensor],
    as_run: Callable[[Tensor | QuantisedTensor], RawTensor],
) -> tuple[list[RawTensor], list[RawTensor]]:
    if config.is_absorbed:
        stacks = [tensor_of(role) for role in ("k_b", "v_b")]
        assert all(isinstance(tensor, Tensor) for tensor in stacks), stacks
        k_up, v_up = ([as_run(part) for part in matrices_of(tensor)] for tensor in stacks if isinstance(tensor, Tensor))
        return k_up, v_up
    stored = tensor_of("kv_b")
    raw = in_input_order(raw_matrix(stored))
    size = latent.nope_dim + latent.value_dim
    heads = [_rows(raw, head * size, size) for head in range(config.num_heads)]
    k_up = []
    for head in heads:
        values = np.ascontiguousarray(dequantise(_rows(head, 0, latent.nope_dim)).T)
        k_up.append(_as_tensor_runs(_like(raw, values), as_run))
    v_up = [_as_tensor_runs(_rows(head, latent.nope_dim, latent.value_dim), as_run) for head in heads]
    return k_up, v_up


def _as_tensor_runs(raw: RawTensor, as_run: Callable[[Tensor | QuantisedTensor], RawTensor]) -> RawTensor:
    """A dense matrix as load makes dense ones, another as it is."""
    if raw.kind not in DENSE_KINDS:
        return raw
    return as_run(Tensor("kv_b", raw.kind, (raw.num_rows, raw.num_cols), memoryview(raw.data.data)))


def _rows(raw: RawTensor, first: int, count: int) -> RawTensor:
    size = raw.row_bytes
    return RawTensor(raw.kind, count, raw.num_cols, raw.data.reshape(-1)[first * size : (first + count) * size])


def _like(raw: RawTensor, values_NK: np.ndarray) -> RawTensor:
    """The values as the kind of `raw` where that is dense."""
    if raw.kind == "bf16":  # each value is one of these already
        bits = (values_NK.view(np.uint32) >> 16).astype(np.uint16)
        return RawTensor("bf16", len(values_NK), values_NK.shape[1], bits.view(np.uint8).reshape(-1))
    fits = raw.kind != "f32" and float(np.abs(values_NK).max(initial=0)) <= _LARGEST_F16
    return dense("f16" if fits else "f32", values_NK)

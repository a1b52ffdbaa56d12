"""The numpy backend: what every function of the kernel interface means, written to be read.

It defines values; other backends match them within a stated tolerance and fix their own bits. It makes no promise of
batch invariance (BLAS picks its own order of summation), and it holds every weight dequantised to float32.

    T tokens  S sequences  L logit rows  D width  K inputs  N outputs  F FFN width  V vocabulary
    H query heads  G KV heads  C channels per head  B blocks  P positions  s slots of a block
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..core.block import KVGroup, num_hidden_blocks
from ..core.speculation import SpeculationConfig
from . import reference_latent, reference_moe, reference_state
from .api import (
    Array,
    Draws,
    Experts,
    HeadGeometry,
    LatentGeometry,
    LowRank,
    PackedCodes,
    RawTensor,
    Routing,
    SampleBatch,
    StateGeometry,
    StepBatch,
    StepLimits,
)
from .drafts import Corpus
from .draws import Mask
from .kv_pool import HostPool
from .reference_drafts import ReferenceDrafter
from .reference_kv import ReferenceKV
from .reference_sample import draw, sample, token_logprobs
from .reference_weights import ReferenceWeight, pack, quantise, round_activations
from .weights import AllInMemory
from .work_queue import ThreadQueue


@dataclass(frozen=True, slots=True)
class ReferenceLora:
    """Changes of one linear: slot -> the change, or None, of each stacked matrix, with its a and b packed."""

    num_slots: int
    max_rank: int
    num_cols: int
    widths: tuple[int, ...]
    changes: dict[int, list[tuple[ReferenceWeight, ReferenceWeight, LowRank] | None]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReferenceProgram:
    """A forward pass that is simply called; its temporaries come and go, so how much they take is not known ahead."""

    ops: ReferenceOps
    forward: Callable[[Any, Any], np.ndarray]
    limits: StepLimits
    scratch_bytes: None = None

    def __call__(self, batch: StepBatch, draws: Draws | None = None) -> Array:
        assert len(batch.tokens_T) <= self.limits.max_tokens, (len(batch.tokens_T), self.limits)
        assert len(batch.logit_rows_L) <= self.limits.max_logit_rows, (len(batch.logit_rows_L), self.limits)
        if draws is None:
            return self.forward(self.ops, batch)
        is_drawn_T = batch.tokens_T < 0
        tokens_T = np.where(is_drawn_T, draws.drawn[np.where(is_drawn_T, ~batch.tokens_T, 0)], batch.tokens_T)
        logits_LV = self.forward(self.ops, replace(batch, tokens_T=tokens_T))
        first = len(batch.logit_rows_L) - len(draws.slots_L)
        draw(logits_LV[first:], draws)
        return logits_LV

    def bind(self, batch: StepBatch, draws: Draws | None = None) -> Callable[[], Array]:
        return lambda: self(batch, draws)


class ReferenceOps(AllInMemory):
    """Every function of `ops.api.Ops` in numpy.

    exact_activations=True leaves the activations of all linears in float32, which makes the model equal to a
    dense one with the dequantised weights: that is what an outside oracle is compared with.
    """

    name = "numpy"
    kv_dtype = "f16"

    def __init__(self, *, exact_activations: bool = False) -> None:
        self.exact_activations = exact_activations
        self.family = "numpy-exact" if exact_activations else "numpy"

    def describe(self) -> dict[str, str]:
        return {"backend": f"numpy {np.__version__}", "activations": "f32" if self.exact_activations else "int8"}

    def publish(self, mask: Mask, until: int) -> None:
        """Whoever reads it takes the interpreter after this has let it go."""
        mask.until[0] = until

    def progress(self) -> None:
        """numpy does not tell."""
        return None

    def seal(self) -> None:
        """Weights are arrays among others."""

    def use_threads(self, num_threads: int, places: Sequence[Sequence[int]] = ()) -> None:
        """It has none."""

    def limit_threads(self, limits: Sequence[tuple[int, int]]) -> None:
        """It has none."""

    def pack(self, parts: Sequence[RawTensor]) -> ReferenceWeight:
        return pack(parts)

    def pack_stack(self, matrices: Sequence[Sequence[RawTensor]]) -> reference_moe.ReferenceStack:
        return reference_moe.pack_stack(matrices)

    def quantise(self, part: RawTensor, kind: str) -> RawTensor:
        return quantise(part, kind)

    def recode(
        self, stored: str, data: np.ndarray, kind: str, num_rows: int, num_cols: int, book: np.ndarray | None
    ) -> None:
        return None

    def recode_integers(
        self, kind: str, codes: PackedCodes, scales_NG: np.ndarray, minimums_NG: np.ndarray | None
    ) -> None:
        return None

    def vector(self, values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values, np.float32)

    def new_pool(self, group: KVGroup, num_blocks: int) -> HostPool:
        return HostPool(group, num_blocks, self.bind_kv)

    def bind_kv(self, pool: np.ndarray, group: KVGroup) -> ReferenceKV:
        """A handle on a pool's bytes, uint8 [num_blocks, group.bytes_per_block]."""
        assert pool.dtype == np.uint8 and pool.shape == (len(pool), group.bytes_per_block), pool.shape
        return ReferenceKV(pool, group)

    def embed(self, table: ReferenceWeight, tokens_T: np.ndarray) -> Array:
        assert len(table.runs) == 1, "an embedding table is one matrix"
        return table.runs[0][0][tokens_T]

    def rms_norm(self, x_TD: np.ndarray, weight_D: np.ndarray, eps: float) -> Array:
        mean_T1 = np.mean(np.square(x_TD), axis=-1, keepdims=True)
        return x_TD / np.sqrt(mean_T1 + np.float32(eps)) * weight_D

    def linear(self, x_TK: np.ndarray, weight: ReferenceWeight) -> Array:
        if weight.order is not None:
            x_TK = x_TK[:, weight.order]
        roundings = {rounding for _, rounding in weight.runs}
        if self.exact_activations:
            inputs = dict.fromkeys(roundings, x_TK)
        else:
            inputs = {rounding: round_activations(x_TK, rounding) for rounding in roundings}
        outputs = [inputs[rounding] @ values_NK.T for values_NK, rounding in weight.runs]
        return outputs[0] if len(outputs) == 1 else np.concatenate(outputs, axis=1)

    def lora_table(
        self, num_slots: int, max_rank: int, num_cols: int, widths: Sequence[int], *, by_token: bool = False
    ) -> ReferenceLora:
        return ReferenceLora(num_slots, max_rank, num_cols, tuple(widths))

    def set_lora(self, table: ReferenceLora, slot: int, changes: Sequence[LowRank | None]) -> int:
        table.changes[slot] = [
            None if change is None else (self.pack([change.a]), self.pack([change.b]), change) for change in changes
        ]
        return sum(a.num_bytes + b.num_bytes for a, b, _ in filter(None, table.changes[slot]))

    def add_lora(
        self, y_TN: np.ndarray, x_TK: np.ndarray, table: ReferenceLora, adapters_T: np.ndarray | None
    ) -> Array:
        return self._add_lora(y_TN, table, adapters_T, lambda rows, a: self.linear(x_TK[rows], a))

    def add_token_lora(
        self, y_TD: np.ndarray, tokens_T: np.ndarray, table: ReferenceLora, adapters_T: np.ndarray | None
    ) -> Array:
        return self._add_lora(y_TD, table, adapters_T, lambda rows, a: self.embed(a, tokens_T[rows]))

    def _add_lora(
        self,
        y_TN: np.ndarray,
        table: ReferenceLora,
        adapters_T: np.ndarray | None,
        narrow: Callable[[np.ndarray, ReferenceWeight], np.ndarray],
    ) -> Array:
        """`narrow`: (rows, a) -> a times the inputs of those rows."""
        if adapters_T is None or not adapters_T.any():
            return y_TN
        out_TN = y_TN.copy()
        for slot in np.unique(adapters_T[adapters_T > 0]).tolist():
            rows, column = np.flatnonzero(adapters_T == slot), 0
            for width, held in zip(table.widths, table.changes.get(slot, [None] * len(table.widths)), strict=True):
                if held is not None:
                    a, b, change = held
                    columns = slice(column, column + width)
                    out_TN[rows, columns] += self.linear(narrow(rows, a) * np.float32(change.scale), b)
                    if change.factors is not None:
                        out_TN[rows, columns] *= change.factors
                column += width
        return out_TN

    def layer_norm(self, x_TD: np.ndarray, weight_D: np.ndarray, bias_D: np.ndarray, eps: float) -> Array:
        centred_TD = x_TD - np.mean(x_TD, axis=-1, keepdims=True)
        return self.rms_norm(centred_TD, weight_D, eps) + bias_D

    def norm_heads(
        self, qkv_TW: np.ndarray, q_weight: np.ndarray, k_weight: np.ndarray, heads: HeadGeometry, eps: float
    ) -> Array:
        out_TW = qkv_TW.copy()
        q_end = heads.num_heads * heads.head_dim
        k_end = q_end + heads.num_kv_heads * heads.head_dim
        for first, end, weight in ((0, q_end, q_weight), (q_end, k_end, k_weight)):
            x_Tnw = qkv_TW[:, first:end].reshape(len(qkv_TW), -1, len(weight))
            out_TW[:, first:end] = self.rms_norm(x_Tnw, weight, eps).reshape(len(qkv_TW), -1)
        return out_TW

    def add(self, x_TD: np.ndarray, y_TD: np.ndarray) -> Array:
        return x_TD + y_TD

    def add_bias(self, x_TN: np.ndarray, bias_N: np.ndarray) -> Array:
        return x_TN + bias_N

    def scale(self, x_TD: np.ndarray, factor: float) -> Array:
        return x_TD * np.float32(factor)

    def soft_cap(self, x_TD: np.ndarray, cap: float) -> Array:
        return np.tanh(x_TD / np.float32(cap)) * np.float32(cap)

    def silu_mul(self, gate_up_T2F: np.ndarray) -> Array:
        gate_TF, up_TF = np.split(gate_up_T2F, 2, axis=1)
        return self.silu(gate_TF) * up_TF

    def gelu_mul(self, gate_up_T2F: np.ndarray) -> Array:
        gate_TF, up_TF = np.split(gate_up_T2F, 2, axis=1)
        return self.gelu(gate_TF) * up_TF

    def gelu_erf_mul(self, gate_up_T2F: np.ndarray) -> Array:
        gate_TF, up_TF = np.split(gate_up_T2F, 2, axis=1)
        return self.gelu_erf(gate_TF) * up_TF

    def relu2(self, x_TF: np.ndarray) -> Array:
        return np.square(np.maximum(x_TF, np.float32(0)))

    def silu(self, x_TF: np.ndarray) -> Array:
        with np.errstate(over="ignore"):  # exp(-x) may be inf, whose reciprocal is the right 0
            return x_TF / (1 + np.exp(-x_TF))

    def gelu(self, x_TF: np.ndarray) -> Array:
        inner_TF = np.float32(math.sqrt(2 / math.pi)) * (x_TF + np.float32(0.044715) * x_TF**3)
        return x_TF / 2 * (1 + np.tanh(inner_TF))

    def gelu_erf(self, x_TF: np.ndarray) -> Array:
        return x_TF / 2 * (1 + _erf(x_TF / np.float32(math.sqrt(2))))

    def rope(self, qkv_TW: np.ndarray, positions_T: np.ndarray, table_PR: np.ndarray, heads: HeadGeometry) -> Array:
        num_turned = table_PR.shape[1]
        half = num_turned // 2
        num_rotated = heads.num_heads + heads.num_kv_heads
        out_TW = qkv_TW.copy()
        x_THC = out_TW[:, : num_rotated * heads.head_dim].reshape(len(qkv_TW), num_rotated, heads.head_dim)
        cos_T1c = table_PR[positions_T, None, :half]
        sin_T1c = table_PR[positions_T, None, half:]
        low_THc, high_THc, rest_THc = x_THC[..., :half], x_THC[..., half:num_turned], x_THC[..., num_turned:]
        rotated_THC = np.concatenate(
            [low_THc * cos_T1c - high_THc * sin_T1c, high_THc * cos_T1c + low_THc * sin_T1c, rest_THc], axis=-1
        )
        out_TW[:, : num_rotated * heads.head_dim] = rotated_THC.reshape(len(qkv_TW), -1)
        return out_TW

    def write_kv(self, kv: ReferenceKV, layer: int, qkv_TW: np.ndarray, batch: StepBatch, heads: HeadGeometry) -> None:
        block_size = kv.group.block_size
        _, k_TGC, v_TGC = _split_heads(qkv_TW, heads)
        sequence_T = np.repeat(np.arange(len(batch.context_lens_S)), np.diff(batch.row_starts_S1))
        block_T = kv.blocks_of(batch)[sequence_T, batch.positions_T // block_size]
        slot_T = batch.positions_T % block_size
        kv.write(layer, block_T, slot_T, k_TGC, v_TGC)

    def paged_attention(
        self,
        kv: ReferenceKV,
        layer: int,
        qkv_TW: np.ndarray,
        batch: StepBatch,
        heads: HeadGeometry,
        scale: float,
        *,
        window: int = 0,
        soft_cap: float = 0.0,
        causal: bool = True,
        sinks_H: np.ndarray | None = None,
    ) -> Array:
        q_THC, _, _ = _split_heads(qkv_TW, heads)
        groups, repeat = heads.num_kv_heads, heads.num_heads // heads.num_kv_heads
        out_THC = np.empty_like(q_THC)
        tables_SB, block_size = kv.blocks_of(batch), kv.group.block_size
        for s, length in enumerate(batch.context_lens_S):
            first, end = batch.row_starts_S1[s], batch.row_starts_S1[s + 1]
            # Blocks that no row of the sequence sees may be anything: they are left out.
            num_hidden = num_hidden_blocks(batch.positions_T[first], abs(window), block_size) if first < end else 0
            start = num_hidden * block_size
            k_GCP, v_GPC = kv.read(layer, tables_SB[s, num_hidden : -(-length // block_size)], length - start)
            q_GrtC = q_THC[first:end].reshape(-1, groups, repeat, heads.head_dim).transpose(1, 2, 0, 3)
            scores_GrtP = (q_GrtC @ k_GCP[:, None]) * np.float32(scale)
            if soft_cap:
                scores_GrtP = self.soft_cap(scores_GrtP, soft_cap)
            behind_tP = batch.positions_T[first:end, None] - np.arange(start, length)
            ahead = 1 if causal else window or length  # keys seen from the query's own on
            seen = batch.positions_T[first:end, None] % -window + 1 if window < 0 else window or length
            scores_GrtP[..., (behind_tP <= -ahead) | (behind_tP >= seen)] = -np.inf
            most_Grt1 = scores_GrtP.max(axis=-1, keepdims=True)
            if sinks_H is not None:
                sinks_Gr11 = sinks_H.reshape(groups, repeat, 1, 1)
                most_Grt1 = np.maximum(most_Grt1, sinks_Gr11)
            weights_GrtP = np.exp(scores_GrtP - most_Grt1)
            sums_Grt1 = weights_GrtP.sum(axis=-1, keepdims=True)
            if sinks_H is not None:
                sums_Grt1 = sums_Grt1 + np.exp(sinks_Gr11 - most_Grt1)
            mixed_GrtC = (weights_GrtP @ v_GPC[:, None]) / sums_Grt1
            out_THC[first:end] = mixed_GrtC.transpose(2, 0, 1, 3).reshape(end - first, heads.num_heads, -1)
        return out_THC.reshape(len(qkv_TW), -1)

    def columns(self, x_TW: np.ndarray, first: int, count: int) -> Array:
        return x_TW[:, first : first + count]

    def join_columns(self, parts: Sequence[np.ndarray]) -> Array:
        return np.concatenate(parts, axis=1)

    def spread_columns(self, x_TN: np.ndarray, places_N: np.ndarray, width: int, other: float) -> Array:
        out = np.full((len(x_TN), width), other, np.float32)
        out[:, places_N] = x_TN
        return out

    def gate_rows(self, x_TD: np.ndarray, gate_T1: np.ndarray) -> Array:
        with np.errstate(over="ignore"):  # as in silu
            return x_TD / (1 + np.exp(-gate_T1))

    def multiply(self, x_TD: np.ndarray, y_TD: np.ndarray) -> Array:
        return x_TD * y_TD

    def norm_groups(self, x_TD: np.ndarray, weight_D: np.ndarray, size: int, eps: float) -> Array:
        ones = np.ones(size, np.float32)
        return self.rms_norm(x_TD.reshape(-1, size), ones, eps).reshape(x_TD.shape) * weight_D

    def causal_conv(
        self,
        kv: ReferenceKV,
        layer: int,
        x_TW: np.ndarray,
        weight_KW: np.ndarray,
        bias_W: np.ndarray | None,
        batch: StepBatch,
        state: StateGeometry,
        *,
        silu: bool = False,
    ) -> Array:
        out_TW = reference_state.convolve(kv, layer, x_TW, weight_KW, bias_W, batch, state)
        return self.silu(out_TW) if silu else out_TW

    def scan_gates(
        self,
        x_TN: np.ndarray,
        y_TH: np.ndarray | None,
        rates_N: np.ndarray | None,
        bias_N: np.ndarray,
        state: StateGeometry,
        *,
        limits: tuple[float, float] = (0.0, float("inf")),
    ) -> Array:
        return reference_state.gates(x_TN, y_TH, rates_N, bias_N, limits)

    def state_scan(
        self,
        kv: ReferenceKV,
        layer: int,
        keys_TX: np.ndarray,
        values_TX: np.ndarray,
        gates_TG: np.ndarray,
        batch: StepBatch,
        state: StateGeometry,
        *,
        skip: np.ndarray | None = None,
        rates_KX: np.ndarray | None = None,
    ) -> Array:
        return reference_state.scan(kv, layer, keys_TX, values_TX, gates_TG, batch, state, skip, rates_KX)

    def linear_heads(self, x_TX: np.ndarray, stack: reference_moe.ReferenceStack) -> Array:
        parts = np.split(x_TX, stack.num_matrices, axis=1)
        return np.concatenate([self.linear(x, w) for x, w in zip(parts, stack.matrices, strict=True)], axis=1)

    def moe_route(
        self,
        logits_TE: np.ndarray,
        routing: Routing,
        bias_E: np.ndarray | None = None,
        scales_E: np.ndarray | None = None,
    ) -> Array:
        return reference_moe.route(logits_TE, routing, bias_E, scales_E)

    def moe_ffn(self, x_TD: np.ndarray, routes_T2k: np.ndarray, experts: Experts) -> Array:
        return reference_moe.ffn(self, x_TD, routes_T2k, experts)

    def latent_queries(
        self,
        q_TW: np.ndarray,
        k_up: reference_moe.ReferenceStack,
        positions_T: np.ndarray,
        table_PR: np.ndarray,
        latent: LatentGeometry,
    ) -> Array:
        return reference_latent.queries(self, q_TW, k_up, positions_T, table_PR, latent)

    def latent_kv(
        self,
        c_TX: np.ndarray,
        weight: np.ndarray,
        eps: float,
        positions_T: np.ndarray,
        table_PR: np.ndarray,
        latent: LatentGeometry,
    ) -> Array:
        return reference_latent.latents(self, c_TX, weight, eps, positions_T, table_PR, latent)

    def write_latent(
        self, kv: ReferenceKV, layer: int, c_TX: np.ndarray, batch: StepBatch, latent: LatentGeometry
    ) -> None:
        reference_latent.write(kv, layer, c_TX, batch, latent)

    def latent_attention(
        self, kv: ReferenceKV, layer: int, q_TX: np.ndarray, batch: StepBatch, latent: LatentGeometry, scale: float
    ) -> Array:
        return reference_latent.attend(kv, layer, q_TX, batch, latent, scale)

    def gather_rows(self, x_TD: np.ndarray, rows_L: np.ndarray) -> Array:
        return x_TD[rows_L]

    def store_rows(self, x_TW: np.ndarray, array: np.ndarray) -> None:
        array[: len(x_TW)] = x_TW

    def load_rows(self, array: np.ndarray, tokens_T: np.ndarray) -> Array:
        return array[: len(tokens_T)]

    def compile(self, forward: Callable[[Any, Any], np.ndarray], limits: StepLimits) -> ReferenceProgram:
        return ReferenceProgram(self, forward, limits)

    def open_queue(self, when_idle: Callable[[], bool]) -> ThreadQueue:
        return ThreadQueue(when_idle)

    def sample(self, logits_LV: np.ndarray, how: SampleBatch) -> np.ndarray:
        return sample(logits_LV, how)

    def token_logprobs(
        self, logits_LV: np.ndarray, tokens_L: np.ndarray, num_top: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return token_logprobs(logits_LV, tokens_L, num_top)

    def new_drafter(
        self, config: SpeculationConfig, vocab_size: int, corpora: Sequence[Corpus] = ()
    ) -> ReferenceDrafter:
        return ReferenceDrafter(config, vocab_size, corpora)

    def close(self) -> None:
        """Nothing to free."""


_erf = np.vectorize(math.erf, otypes=[np.float32])


def _split_heads(qkv_TW: np.ndarray, heads: HeadGeometry) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q [T, H, C], k [T, G, C], v [T, G, C]."""
    x_THC = qkv_TW.reshape(len(qkv_TW), -1, heads.head_dim)
    first_value = heads.num_heads + heads.num_kv_heads
    return x_THC[:, : heads.num_heads], x_THC[:, heads.num_heads : first_value], x_THC[:, first_value:]

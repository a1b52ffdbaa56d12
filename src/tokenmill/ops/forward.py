"""The functions that a forward pass is written in: arrays in, arrays out.

Shape letters: T tokens of a step, S sequences (rows of the plan), L rows that want logits, D model width, K inputs and
N outputs of a linear, F FFN width, V vocabulary, H query heads, G KV heads, C channels per head, B blocks.

`ops/reference.py` (numpy) defines every function; `ops/native` runs them as a recorded program. Fixed orders that a
backend of the exact family must keep, so that a token's value never depends on the batch around it:

- linear, quantised weight: activations are quantised per 32 consecutive values of one row (scale = max|x| / 127, round
  half to even); groups of 32 are walked in order, one fused multiply-add each into a float32 accumulator.
- linear, dense weight: K is walked in order, one fused multiply-add each. For bf16 weights activations are rounded to
  bf16 (below 2^-56 they, and weights, are zero), and of two neighbours in K the second is added first; on a matrix unit
  each 32 of K are two chains of their own, over even and odd places, whose sum is added.
- paged_attention: spans of 256 positions counted from 0, each softmaxed from a fresh state, merged in order. Over int8
  KV a backend may round queries, and in each span the weights of the values, to 15 bits.
- add_lora: K and then r are walked in order, one fused multiply-add each, for every row by itself.
- moe_route: a row by itself; equal scores go to the lower expert id. moe_ffn: an expert's linears as any others; a
  row's experts are added in ascending id, acc = fma(weight, y, acc) from 0.
- latent_attention: queries, stored latents and, in each span, the weights of the values are rounded to bf16 (below
  2^-56 they are zero); products are summed in float32, in one chain over pairs of neighbours, the second first; spans
  as in paged_attention, and the sum of a span's weights is that of the rounded ones. Over int8 the codes are the
  factors: their scale multiplies scores and, before they are rounded, weights of values, whose sum is taken without.
- causal_conv: taps in order, each a fused step. state_scan: sums over a key's channels are four chains of fused steps,
  of channels i, i + 4, .., added as (0 + 1) + (2 + 3); positions one by one, so that no cut of a prompt shows.
- row sums (norms, softmax): sixteen interleaved partial sums, then a fixed tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .api import Array, Experts, HeadGeometry, LatentGeometry, Routing, StateGeometry


class ForwardOps(Protocol):
    """Functions never modify their inputs, but that write_kv writes the pool, store_rows its array, and add_lora may
    write into y. (What the native backend writes over is chosen afterwards, where nobody reads the input again:
    ops/native/fuse.py.) A `table` or `weight` is what the backend's `pack` made, a stack what its `pack_stack` made, a
    `kv` what its `bind_kv` made; `tokens_T`, `positions_T`, `rows_L` and `adapters_T` are the batch's own."""

    def embed(self, table: Any, tokens_T: Array) -> Array:
        """[T, D] float32: dequantised rows of the table, by the step's tokens or places."""
        ...

    def rms_norm(self, x_TD: Array, weight_D: Array, eps: float) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight, per row."""
        ...

    def layer_norm(self, x_TD: Array, weight_D: Array, bias_D: Array, eps: float) -> Array:
        """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias, per row."""
        ...

    def norm_heads(self, qkv_TW: Array, q_weight: Array, k_weight: Array, heads: HeadGeometry, eps: float) -> Array:
        """rms_norm of the q and k columns: head by head where the weights have C values, else over all q heads
        (weight of H*C values) and over all k heads (G*C) together. The v columns stay."""
        ...

    def linear(self, x_TK: Array, weight: Any) -> Array:
        """[T, N] = x @ weight.T, x in the order of the weight's columns"""
        ...

    def add_lora(self, y_TN: Array, x_TK: Array, table: Any, adapters_T: Array) -> Array:
        """(y + (x @ a.T * scale) @ b.T) * factors for rows whose entry of the batch's adapters_T (or adapters_L) names
        a slot, each stacked matrix's columns by its own change; other rows stay as they are, bit for bit. x is taken as
        float32, before any quantisation. y is given up: a backend may write into it."""
        ...

    def add_token_lora(self, y_TD: Array, tokens_T: Array, table: Any, adapters_T: Array) -> Array:
        """As add_lora with a table by tokens: (y + (a[tokens] * scale) @ b.T) * factors, y being embedded tokens."""
        ...

    def add(self, x_TD: Array, y_TD: Array) -> Array: ...

    def add_bias(self, x_TN: Array, bias_N: Array) -> Array:
        """The same vector added to every row."""
        ...

    def scale(self, x_TD: Array, factor: float) -> Array: ...

    def soft_cap(self, x_TD: Array, cap: float) -> Array:
        """cap * tanh(x / cap)"""
        ...

    def silu_mul(self, gate_up_T2F: Array) -> Array:
        """silu(gate) * up, the gate in columns [0, F) and up in [F, 2F)."""
        ...

    def gelu_mul(self, gate_up_T2F: Array) -> Array:
        """gelu(gate) * up, columns as in silu_mul."""
        ...

    def gelu_erf_mul(self, gate_up_T2F: Array) -> Array:
        """gelu_erf(gate) * up, columns as in silu_mul."""
        ...

    def silu(self, x_TF: Array) -> Array:
        """x * sigmoid(x)"""
        ...

    def gelu(self, x_TF: Array) -> Array:
        """The tanh form: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))."""
        ...

    def gelu_erf(self, x_TF: Array) -> Array:
        """The form by the error function: x / 2 * (1 + erf(x / sqrt(2)))."""
        ...

    def relu2(self, x_TF: Array) -> Array:
        """max(x, 0)^2 (Primer, arXiv 2109.08668)."""
        ...

    def rope(self, qkv_TW: Array, positions_T: Array, table_PR: Array, heads: HeadGeometry) -> Array:
        """Rotate the first R channels of every q and k head; pairs are (i, i + R/2) and channels from R on stay.
        table_PR row p: cos of R/2 pairs, then sin."""
        ...

    def write_kv(self, kv: Any, layer: int, qkv_TW: Array, batch: Any, heads: HeadGeometry) -> None:
        """Store the k and v columns of every token of the step into its slot. Where K or V of a token and head are not
        finite as stored, K becomes NaN, so that who sees the token becomes NaN, and V 0, so that who does not see it
        does not.

        In int8 KV, keys are divided by 2 to the power of their channels' exponents (KVGroup.key_exponents), and each
        head of a token is rotated: each block of 2^n channels, the largest that divides them, times the Hadamard matrix
        of +1 and -1, by sums and differences of channels 1, 2, 4, .. apart (QuaRot, arXiv 2404.00456; attention makes
        up for it). Then it becomes codes round-half-even(x * (127 / max|x|)) with the scale max|x| / 127; below a
        maximum of 1e-30 all are 0."""
        ...

    def paged_attention(
        self,
        kv: Any,
        layer: int,
        qkv_TW: Array,
        batch: Any,
        heads: HeadGeometry,
        scale: float,
        *,
        window: int = 0,
        soft_cap: float = 0.0,
        causal: bool = True,
        sinks_H: Array | None = None,
    ) -> Array:
        """[T, H*C]: attention of each query row over its sequence's KV, which write_kv has just completed.

        causal    a query sees its own position and those before it; else every position of its sequence
        window    how many positions a query sees, its own included; where it also sees those after it, so many of them
                  too; 0 for all. Below 0, of causal attention: those from the last multiple of -window on (chunks)
        soft_cap  scaled scores become cap * tanh(score / cap) before the softmax; 0 for off
        sinks     of each head, the score of one more key whose value is 0 (after scale and cap), folded in last
        """
        ...

    def columns(self, x_TW: Array, first: int, count: int) -> Array:
        """Columns [first, first + count) of every row."""
        ...

    def join_columns(self, parts: Sequence[Array]) -> Array:
        """Rows side by side."""
        ...

    def spread_columns(self, x_TN: Array, places_N: np.ndarray, width: int, other: float) -> Array:
        """[T, width]: column places_N[n] is column n of x, and all others are `other`. places_N: int32, each another
        column."""
        ...

    def gate_rows(self, x_TD: Array, gate_T1: Array) -> Array:
        """x * sigmoid(gate), a number for each row, or one for each value [T, D]."""
        ...

    def multiply(self, x_TD: Array, y_TD: Array) -> Array: ...

    def norm_groups(self, x_TD: Array, weight_D: Array, size: int, eps: float) -> Array:
        """rms_norm of every `size` columns by themselves."""
        ...

    def linear_heads(self, x_TX: Array, stack: Any) -> Array:
        """[T, H*N]: of each head's K columns of x [T, H*K], x @ matrix.T with that head's matrix [N, K]."""
        ...

    def moe_route(
        self, logits_TE: Array, routing: Routing, bias_E: Array | None = None, scales_E: Array | None = None
    ) -> Array:
        """[T, 2k] float32: of each row the ids of its experts, ascending (-1 for none, behind the others), then the
        weights of these (0 for none).

        Scores are softmax(logits), sigmoid(logits), or with SOFTMAX_CHOSEN the logits themselves. Choice is by score
        + bias, which weights do not see: of the `top_groups` best groups the top_k best experts, ties to the lower
        group and the lower id. Weights are the scores of those chosen, with SOFTMAX_CHOSEN their softmax; those below
        min_share of the greatest are dropped; then they are normalised (sums in ascending id), scaled, and multiplied
        by the scales of their experts. A row with a logit that is not finite gets experts 0..k-1 with NaN weights, so
        that it becomes NaN and no other row does."""
        ...

    def moe_ffn(self, x_TD: Array, routes_T2k: Array, experts: Experts) -> Array:
        """[T, D]: sum over a row's experts e of weight_e * (down_e(act(gate_e(x), up_e(x)))), with biases where the
        experts have them; gate in the first F outputs of gate_up."""
        ...

    def latent_queries(
        self, q_TW: Array, k_up: Any, positions_T: Array, table_PR: Array, latent: LatentGeometry
    ) -> Array:
        """[T, H*(latent_dim + rope_dim)]: of each head's (nope_dim + rope_dim) columns the first through the head's
        matrix [latent_dim, nope_dim], the others rotated as in `rope` (R = rope_dim)."""
        ...

    def latent_kv(
        self, c_TX: Array, weight: Array, eps: float, positions_T: Array, table_PR: Array, latent: LatentGeometry
    ) -> Array:
        """[T, latent_dim + rope_dim]: rms_norm of the first latent_dim columns, rotation of the others."""
        ...

    def write_latent(self, kv: Any, layer: int, c_TX: Array, batch: Any, latent: LatentGeometry) -> None:
        """Store every token's latent (of latent_kv) into its slot. bf16: below 2^-56 it is 0, as attention takes it.
        int8: as in write_kv, one scale a token. A latent that is not finite as stored becomes NaN in the channels that
        are the key alone (of which there is at least one) and 0 elsewhere, so that who sees the token becomes NaN, and
        who does not see it does not."""
        ...

    def latent_attention(
        self, kv: Any, layer: int, q_TX: Array, batch: Any, latent: LatentGeometry, scale: float
    ) -> Array:
        """[T, H*latent_dim]: causal attention of every head's query over its sequence's latents, which write_latent has
        just completed."""
        ...

    def causal_conv(
        self,
        kv: Any,
        layer: int,
        x_TW: Array,
        weight_KW: Array,
        bias_W: Array | None,
        batch: Any,
        state: StateGeometry,
        *,
        silu: bool = False,
    ) -> Array:
        """[T, W]: bias + sum of weight[j] * x K - 1 - j positions before, j rising, in each channel by itself; then
        silu of it. Inputs before the step's are those that the state keeps (0 before the sequence), which goes on."""
        ...

    def scan_gates(
        self,
        x_TN: Array,
        y_TH: Array | None,
        rates_N: Array | None,
        bias_N: Array,
        state: StateGeometry,
        *,
        limits: tuple[float, float] = (0.0, float("inf")),
    ) -> Array:
        """[T, state.gates_width], with steps softplus(x + bias) held within limits, N = state.num_steps: the decays
        e^(rate * step), of heads or of channels of their keys, then of each head its factor: sigmoid(y), or without y
        the step. BY_VALUE, without y and rates: the steps, which are the factors of columns."""
        ...

    def state_scan(
        self,
        kv: Any,
        layer: int,
        keys_TX: Array,
        values_TX: Array,
        gates_TG: Array,
        batch: Any,
        state: StateGeometry,
        *,
        skip: Array | None = None,
        rates_KX: Array | None = None,
    ) -> Array:
        """[T, H*value_dim]: of each head, position by position, S = decay * S + k (x) u and out = q S (+ skip * v),
        where u = factor * v or, with is_delta, factor * (v - k S) of the decayed S. The delta rule with gates: Yang,
        Kautz and Hatamizadeh, arXiv 2412.06464; without: Mamba-2, arXiv 2405.21060. BY_VALUE, decay is
        e^(rates * factor) with rates [key_dim, H*value_dim], and factor and skip are [H*value_dim], else [H]. keys:
        queries [num_key_heads, key_dim], then keys; gates: of scan_gates. S is 0 before the sequence; it stays where a
        block ends that has a place in the table, and behind the step's last row."""
        ...

    def gather_rows(self, x_TD: Array, rows_L: Array) -> Array: ...

    def store_rows(self, x_TW: Array, array: np.ndarray) -> None:
        """Copy x into the first T rows of an array of the caller, float32 of at least as many rows as a step may have
        tokens: what a step leaves beside its logits."""
        ...

    def load_rows(self, array: np.ndarray, tokens_T: Array) -> Array:
        """[T, W]: the first T rows of such an array, as they are when the step is computed."""
        ...

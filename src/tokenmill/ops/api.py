"""What a backend offers beside the functions that a forward pass is written in (ops/forward.py): packing, compiling,
drawing; and the few plain types that both take.

Shape letters: T tokens of a step, S sequences (rows of the plan), L rows that want logits, D model width, K inputs and
N outputs of a linear, F FFN width, V vocabulary, H query heads, G KV heads, C channels per head, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..core.block import KVGroup
from ..core.speculation import SpeculationConfig
from .drafts import Corpus, Drafter
from .draws import NEVER as NEVER
from .draws import Draws as Draws
from .draws import Mask as Mask
from .draws import SampleBatch as SampleBatch
from .kv_pool import KVPool
from .weights import BLOCK_BYTES as BLOCK_BYTES
from .weights import CODE_OFFSETS as CODE_OFFSETS
from .weights import CODE_VALUES as CODE_VALUES
from .weights import EXACT_FACTORS as EXACT_FACTORS
from .weights import GROUP as GROUP
from .weights import LARGEST_POWER as LARGEST_POWER
from .weights import QUANTISATIONS as QUANTISATIONS
from .weights import SUPERBLOCK_BYTES as SUPERBLOCK_BYTES
from .weights import DiskOps
from .weights import PackedCodes as PackedCodes
from .weights import RawTensor as RawTensor
from .weights import Stack as Stack
from .weights import Weight as Weight
from .weights import block_of as block_of
from .weights import same_order as same_order
from .work_queue import WorkQueue

Array = Any
"""What a backend computes on: an ndarray for the reference, a buffer handle while the native backend records."""

SPAN = 256
"""Positions per attention span."""


@dataclass(frozen=True, slots=True)
class HeadGeometry:
    """Columns of a fused qkv row: H query heads, G key heads, G value heads, C channels each, in that order."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentGeometry:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in its absorbed form: H heads share one key of
    `latent_dim` + `rope_dim` channels a token, whose first `latent_dim` are the value. A head's query comes as
    `nope_dim` channels, which are taken into the latent space, and `rope_dim` that turn; its output of `latent_dim`
    channels is taken to `value_dim`."""

    num_heads: int
    nope_dim: int
    rope_dim: int
    latent_dim: int
    value_dim: int

    @property
    def key_dim(self) -> int:
        return self.latent_dim + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Channels of a head's query before it is taken into the latent space."""
        return self.nope_dim + self.rope_dim


BY_HEAD, BY_KEY, BY_VALUE = "head", "key", "value"
"""What of a state decays by a factor of its own: each head; each channel of its keys (Kimi Linear, arXiv 2510.26692);
or each value of it, by the step of its column (Mamba, arXiv 2312.00752)."""


@dataclass(frozen=True, slots=True)
class StateGeometry:
    """What a layer keeps of a sequence that has a state of fixed size: the last `taps` - 1 inputs of a convolution over
    `conv_width` channels, and of each of H heads a matrix S [key_dim, value_dim]; H = 0: none. Heads share queries and
    keys in runs of H / num_key_heads. How S changes: ForwardOps.state_scan; decay: BY_HEAD, BY_KEY or BY_VALUE."""

    conv_width: int
    taps: int
    num_heads: int = 0
    num_key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    is_delta: bool = False
    decay: str = BY_HEAD

    @property
    def num_steps(self) -> int:
        """Of a token: those that its decays are made of."""
        return self.num_heads * {BY_HEAD: 1, BY_KEY: self.key_dim, BY_VALUE: self.value_dim}[self.decay]

    @property
    def gates_width(self) -> int:
        """Columns of what ForwardOps.scan_gates gives."""
        return self.num_steps if self.decay == BY_VALUE else self.num_steps + self.num_heads

    @property
    def num_values(self) -> int:
        """Float32 values that a layer keeps."""
        return (self.taps - 1) * self.conv_width + self.num_heads * self.key_dim * self.value_dim

    @property
    def keys_width(self) -> int:
        """Channels of all keys of a token, or of all queries."""
        return self.num_key_heads * self.key_dim

    @property
    def values_width(self) -> int:
        return self.num_heads * self.value_dim


SOFTMAX, SOFTMAX_CHOSEN, SIGMOID = "softmax", "softmax_chosen", "sigmoid"
SPARSE_MIXER = "sparse_mixer"
"""How router logits become scores: by a softmax over all experts, or over those that are chosen, or each by itself."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's router logits choose its experts and weigh them; see ForwardOps.moe_route.

    score        SOFTMAX, SOFTMAX_CHOSEN, SIGMOID, or SPARSE_MIXER (arXiv 2409.12136): experts are chosen one after the
                 other; each weighs its softmax over those not chosen before it and near it
    margin       of SPARSE_MIXER: near the best is who has a logit s below its b by at most margin * max(|s|, b)
    num_groups   runs of experts of equal length, of which only the best `top_groups` may be chosen from
    group_score  a group's score is that of its best expert (1) or the sum of its best two (2)
    normalise    chosen weights are divided by their sum, plus `floor`
    scale        what weights are then multiplied by
    min_share    experts whose weight is below this share of the token's greatest are dropped, before normalising
                 (adaptive top-k); 0: none is
    """

    num_experts: int
    top_k: int
    score: str = SOFTMAX
    num_groups: int = 1
    top_groups: int = 1
    group_score: int = 1
    normalise: bool = True
    floor: float = 0.0
    scale: float = 1.0
    min_share: float = 0.0
    margin: float = 0.0

    def __post_init__(self) -> None:
        assert self.score in (SOFTMAX, SOFTMAX_CHOSEN, SIGMOID, SPARSE_MIXER), self
        assert self.score != SPARSE_MIXER or (self.num_groups == 1 and not self.normalise), self
        assert self.num_groups >= 1 and self.num_experts % self.num_groups == 0, self
        assert 1 <= self.top_groups <= self.num_groups and self.group_score in (1, 2), self
        assert 1 <= self.top_k <= self.num_experts // self.num_groups * self.top_groups, self
        assert 0 <= self.min_share <= 1, self


@dataclass(frozen=True, slots=True)
class ExpertActivation:
    """What an expert makes of gate and up. kind: "silu" or "gelu": act(gate) * up. "swiglu": gate is cut to at most
    `limit` and up to [-limit, limit], then gate * sigmoid(alpha * gate) * (up + 1). "relu2": of an expert without a
    gate, max(up, 0)^2."""

    kind: str = "silu"
    limit: float = 0.0
    alpha: float = 0.0


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's E routed experts, each of FFN width F: two stacks, of which the first has 2F rows, or F without gates,
    and biases [E, 2F] and [E, D] where it has them. tally: int64 [E], to which each step adds the rows that each expert
    computed; None where nobody counts."""

    gate_up: Stack
    down: Stack
    activation: ExpertActivation
    gate_up_bias: Array | None = None
    down_bias: Array | None = None
    tally: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class LowRank:
    """A low-rank change of a matrix [N, K]: scale * b @ a, with a [r, K] and b [N, r] of kinds f32 or f16. In a table
    by tokens a is stored the other way round, [K, r]. factors: float32 [N], what each output of the changed matrix is
    then multiplied by; None for 1."""

    a: RawTensor
    b: RawTensor
    scale: float
    factors: np.ndarray | None = None


@dataclass(slots=True)
class StepBatch:
    """One step as arrays (all int32, C-contiguous). Sequence s owns tokens row_starts[s] .. row_starts[s + 1].

    tokens_T          token ids; ~s, which is negative, stands for the token that lies in slot s of `Draws.drawn`
    positions_T       position of each token in its sequence
    row_starts_S1     S + 1 offsets into T
    context_lens_S    KV length of each sequence after this step's tokens are written
    block_tables_SB   physical block ids, padded with 0 to the longest; with several KV groups, S rows for each in turn
                      (KVGroup.table). What no query of the step sees may hold any id of the pool
    logit_rows_L      indices into T whose logits are wanted
    adapters_T        LoRA slot of each token, 0 for none; None: no token has one
    places_T          row of each token in a table of learned positions; None where the model has none
    state_blocks_T    further blocks of the group of states, in which the state behind each token stays, too; NO_BLOCK
                      for none; None: no token has one
    """

    tokens_T: np.ndarray
    positions_T: np.ndarray
    row_starts_S1: np.ndarray
    context_lens_S: np.ndarray
    block_tables_SB: np.ndarray
    logit_rows_L: np.ndarray
    adapters_T: np.ndarray | None = None
    places_T: np.ndarray | None = None
    state_blocks_T: np.ndarray | None = None

    @property
    def adapters_L(self) -> np.ndarray | None:
        """LoRA slot of each logit row."""
        return None if self.adapters_T is None else self.adapters_T[self.logit_rows_L]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Largest step a compiled forward must take; buffers are sized by it."""

    max_tokens: int
    max_seqs: int
    max_blocks_per_seq: int
    max_logit_rows: int


class Program(Protocol):
    """A compiled forward. The logits are float32 and valid until the next call; one call may run at a time."""

    @property
    def scratch_bytes(self) -> int | None:
        """All memory it ever holds besides weights, KV and its caller's arrays, logits included; None where the
        backend cannot tell ahead."""
        ...

    def __call__(self, batch: StepBatch, draws: Draws | None = None) -> np.ndarray: ...

    def bind(self, batch: StepBatch, draws: Draws | None = None) -> Callable[[], np.ndarray]:
        """The same call, to be made once and later, by whoever has it or by a queue of this backend. Checks what can
        be checked now; may run beside a call."""
        ...


class Ops(DiskOps, Protocol):
    """A backend. Functions never modify their inputs (write_kv writes the pool, which is its purpose). A `table` or
    `weight` is what this backend's `pack` made, a `kv` that of a pool of its own."""

    name: str

    @property
    def family(self) -> str:
        """Kernel family: part of the numerics id."""
        ...

    @property
    def kv_dtype(self) -> str:
        """The 16-bit type of KV whose attention is fastest here, one of KV_DTYPES."""
        ...

    def describe(self) -> dict[str, str]:
        """Printable facts: instruction set, threads."""
        ...

    def progress(self) -> int | None:
        """A number that changes while a call computes, within a step too; None where that cannot be told. From any
        thread, until `close`."""
        ...

    def pack(self, parts: Sequence[RawTensor]) -> Weight:
        """One weight from matrices stacked along N (parts may differ in kind). Threads; done once, at load."""
        ...

    def pack_stack(self, matrices: Sequence[Sequence[RawTensor]]) -> Stack:
        """Each entry is the parts of one matrix, stacked along N as in `pack`; all have the same shapes and kinds, and
        no order of columns."""
        ...

    def quantise(self, part: RawTensor, kind: str) -> RawTensor:
        """A dense matrix as one of QUANTISATIONS. Scales and minimums are rounded to float16 before codes are made
        with them; a code is (x - m) * (1 / d), rounded half to even, within the kind's range. Of each 32 values:

        q8_0  d = max|x| / 127, codes -127..127
        q4_0  d = the value furthest from 0 (the greater, of two as far) / -8, codes -8..7
        q4_1  d = (max - min) / 15, m = min, codes 0..15
        """
        ...

    def recode(
        self, stored: str, data: np.ndarray, kind: str, num_rows: int, num_cols: int, book: np.ndarray | None
    ) -> RawTensor | None:
        """Blocks of a checkpoint's format (uint8) as blocks of `kind`, as models/repack.py defines it but faster; or of
        another kind, with the same values, where that is better here than super-blocks. None
        for a format that this backend leaves to it, and where scales or minimums cannot be rounded to float16. book:
        int8 rows that the format's indices lead into, where it has such."""
        ...

    def recode_integers(
        self, kind: str, codes: PackedCodes, scales_NG: np.ndarray, minimums_NG: np.ndarray | None
    ) -> RawTensor | None:
        """Likewise of codes [N, K], with float16 scales and minimums [N, G]."""
        ...

    def seal(self) -> None:
        """What is packed so far is not written again: processes that are forked from this one share its memory."""
        ...

    def use_threads(self, num_threads: int, places: Sequence[Sequence[int]] = ()) -> None:
        """Compute with so many from now on. To be called before anything is compiled. A backend of one thread has none
        beside the caller's, and may be taken along by a fork. places: processors that each of them may run on, as the
        system numbers them; empty: any."""
        ...

    def limit_threads(self, limits: Sequence[tuple[int, int]]) -> None:
        """Of each (rows, threads), rows rising: steps of at most so many rows take so many of the threads; steps of
        more take all. Changes no result. Not while a call is made."""
        ...

    def vector(self, values: np.ndarray) -> Array:
        """A float32 parameter vector or table (norm weights, RoPE factors) as this backend wants it."""
        ...

    def new_pool(self, group: KVGroup, num_blocks: int) -> KVPool:
        """Memory for the blocks of a KV group, of zeros. Its handle reads the step's table `group.table`."""
        ...

    def lora_table(
        self, num_slots: int, max_rank: int, num_cols: int, widths: Sequence[int], *, by_token: bool = False
    ) -> Any:
        """Room for low-rank changes of one linear with `num_cols` inputs, made of stacked matrices of `widths` outputs:
        in each of the slots 1..num_slots one change of rank up to max_rank for each matrix. All are empty at first.
        by_token: the linear is the token embedding [D, V], whose inputs are the vocabulary."""
        ...

    def set_lora(self, table: Any, slot: int, changes: Sequence[LowRank | None]) -> int:
        """Fill a slot of a table (or empty it, with None for every matrix); returns the bytes it holds then. Between
        steps only: compiled programs see it from their next call."""
        ...

    def compile(self, forward: Callable[[Any, Any], Array], limits: StepLimits) -> Program:
        """`forward(ops, batch) -> logits [L, V]`, `ops` being ForwardOps, as one callable on a StepBatch.

        The native backend runs it once on a recorder and replays a flat program; the reference just calls it.
        """
        ...

    def open_queue(self, when_idle: Callable[[], bool]) -> WorkQueue:
        """Where calls of this backend's programs are made beside the event loop. The caller closes it before the
        backend. when_idle: a small piece of work that can wait; tells whether there may be more."""
        ...

    def sample(self, logits_LV: np.ndarray, how: SampleBatch) -> np.ndarray:
        """int32 [L]: temperature, filters, and an exponential race, as reference_sample.py defines them.
        Greedy and all ties: the lower id. -1 for a row whose logits are not all finite; whoever rules tokens out
        gives them NEVER."""
        ...

    def publish(self, mask: Mask, until: int) -> None:
        """The words of `mask` are those of output positions below `until`. A draw that sees this sees them too. From
        any thread; takes under a microsecond and keeps the interpreter."""
        ...

    def token_logprobs(
        self, logits_LV: np.ndarray, tokens_L: np.ndarray, num_top: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of each row's raw log softmax: logprob [L] f32 and rank [L] i32 (1 = best) of the given token, and the
        num_top best ids [L, num_top] i32 with their logprobs [L, num_top] f32, best first, ties to the lower id.
        Where the row's logits are not all finite, logprobs are NaN, the rank is 0 and the ids mean nothing."""
        ...

    def new_drafter(self, config: SpeculationConfig, vocab_size: int, corpora: Sequence[Corpus] = ()) -> Drafter:
        """Drafters without a model for the sequences of a worker. They are freed with the backend, and look into the
        arrays of the corpora until then."""
        ...

    def close(self) -> None:
        """Stop threads and free weights and scratch. May be called again."""
        ...

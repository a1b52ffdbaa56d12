"""Exactness of mixtures of experts: a request's tokens and logprobs do not depend on what runs beside it, whoever
shares its experts. As test_exactness.py, with its mixes, on models whose experts tie.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_exactness import BLOCK_SIZE, NUM_BLOCKS, TINY_SHAPE, alone, check_mix, native_ops, random_mix, run_mixes

from tiny_moe import ROUTING, gpt_oss_config, moe_checkpoint, moe_config, read_tiny_moe
from tokenmill.core.block import full_groups
from tokenmill.core.request import Request, SamplingParams
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.models.config import ModelConfig
from tokenmill.ops import reference_moe
from tokenmill.ops.api import SIGMOID, SOFTMAX_CHOSEN, ExpertActivation, Experts, Ops, RawTensor, Routing
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.library import ISAS, TILE_ISAS
from tokenmill.ops.native.record import Recorder
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker.build import Worker
from workers import build_worker

needs_native = pytest.mark.skipif(
    available() is not None or not hasattr(Recorder, "moe_ffn"), reason=f"no native experts: {available()}"
)
MODELS: dict[str, ModelConfig] = {
    "plain": moe_config(),
    "chosen": moe_config(Routing(8, 4, SOFTMAX_CHOSEN), shared_width=32, shared_mix=True),
    "groups": moe_config(
        Routing(16, 3, SIGMOID, num_groups=4, top_groups=2, group_score=2, floor=1e-20, scale=2.5),
        shared_width=64,
        choice_bias=True,
    ),
    "adaptive": moe_config(replace(ROUTING, top_k=6)),
    "gpt_oss": gpt_oss_config(),
}
PREEMPTING = 14
"""A seed whose mix preempts with GPT-OSS, whose answers most seeds let end early."""


@pytest.fixture
def make_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Worker]]:
    read_tiny_moe(monkeypatch)
    made: list[Worker] = []

    def make(checkpoint: Checkpoint, ops: Ops, **how: Any) -> Worker:
        limits = {"max_model_len": 128, "max_num_batched_tokens": 128, "max_num_seqs": 8, "block_size": BLOCK_SIZE}
        made.append(build_worker(checkpoint, ops, groups=full_groups(NUM_BLOCKS), **limits, **how))
        return made[-1]

    yield make
    for worker in made:
        worker.executor.close()


def min_share(name: str) -> float:
    return 0.6 if name == "adaptive" else 0.0


@pytest.mark.parametrize("name", MODELS)
def test_mixes_on_numpy(make_worker: Callable[..., Worker], name: str) -> None:
    """The same tokens whatever the batch, the chunks, the cache and preemption."""
    checkpoint = moe_checkpoint(MODELS[name])
    worker = make_worker(checkpoint, ReferenceOps(), kv_dtype="f32", expert_min_share=min_share(name))
    seeds = (0, PREEMPTING) if name == "gpt_oss" else (0, 11)
    run_mixes(worker, [(seed, TINY_SHAPE) for seed in seeds], exact=False)


RESERVE = range(20, 32)
"""Seeds of mixes that are run until one has preempted, where none of a test's own has."""


def run_long_mixes(worker: Worker, seeds: Sequence[int]) -> None:
    """Bit for bit; of requests that no end token ends."""
    preemptions = hits = 0
    for seed in (*seeds, *RESERVE):
        if seed in RESERVE and preemptions and hits:
            break
        rng = random.Random(seed)
        mix = random_mix(rng, vocab_size=worker.model_config.vocab_size, **TINY_SHAPE)
        mix = replace(mix, arrivals=[(at, replace(each, eos_token_ids=())) for at, each in mix.arrivals])
        core = check_mix(worker, mix, rng, exact=True, where=f"seed {seed}")
        preemptions += core.stats().num_preemptions
        hits += core.stats().prefix_hits
    assert preemptions and hits, "mixes that never preempt nor share a prefix prove too little"


KERNELS = [
    pytest.param(isa, kind, kv, id=f"{isa}-{kind or 'f32'}-{kv}")
    for isa, kind, kv in (
        (ISAS[0], "q4_0", "f16"),
        (ISAS[-1], None, "int8"),
        (ISAS[-1], "q8_0", "bf16"),
        (ISAS[-1], "bf16", "f16"),
        (TILE_ISAS[-1], "q4_1", "bf16"),
        (TILE_ISAS[-1], "bf16", "bf16"),
    )
]


@pytest.mark.exact
@needs_native
@pytest.mark.sampled(1 / 10)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("isa", "quantization", "kv_dtype"), KERNELS)
def test_mixes_bit_for_bit(
    make_worker: Callable[..., Worker], name: str, isa: str, quantization: str | None, kv_dtype: str
) -> None:
    """Tokens and logprobs equal to the last bit, in every kernel family: rows are grouped by expert, never changed by
    it."""
    ops = native_ops(isa)
    how = {"kv_dtype": kv_dtype, "quantization": quantization, "expert_min_share": min_share(name)}
    worker = make_worker(moe_checkpoint(MODELS[name]), ops, **how)
    run_long_mixes(worker, (0, PREEMPTING))


# ---- ties, and counts ----

REQUEST = Request("r", tuple(range(40)), SamplingParams(temperature=0.0, logprobs=2), 20, seed=1, eos_token_ids=())


def check_ties(make: Callable[..., Worker], make_ops: Callable[[], Ops]) -> None:
    """Experts 2i and 2i + 1 always tie. Of two chosen ones both are the best pair's lower and higher; of one, or the
    third, it is the lower: with one choice the odd ones compute nothing, and may hold anything."""
    config = moe_config(replace(ROUTING, top_k=1))
    checkpoint = moe_checkpoint(config)
    found = []
    for factor in (1, 1000):
        changed = {
            name: replace(each, data=memoryview(np.frombuffer(each.data, np.float32) * np.float32(factor)).cast("B"))
            for name, each in checkpoint.tensors.items()
            if any(f"experts.{odd}." in name for odd in (1, 3, 5, 7))
        }
        worker = make(replace(checkpoint, tensors={**checkpoint.tensors, **changed}), make_ops())
        found.append(alone(worker, REQUEST, 128))
        load = worker.expert_load()
        assert load is not None and load.layers == (1, 2)
        num_rows = len(REQUEST.prompt_tokens) + len(found[-1].tokens) - 1
        for tokens in load.tokens:
            assert sum(tokens) == num_rows, "each row counts once for each of its experts"
            assert not any(tokens[1::2]), "a tie goes to the lower expert"
    assert found[0] == found[1], "what is not chosen changes nothing"


BACKENDS = [
    pytest.param(ReferenceOps, id="numpy"),
    pytest.param(NativeOps, id="native", marks=needs_native),
]


@pytest.mark.parametrize("make_ops", BACKENDS)
def test_ties_go_to_the_lower_expert(make_worker: Callable[..., Worker], make_ops: Callable[[], Ops]) -> None:
    check_ties(make_worker, make_ops)


def test_a_tie_that_goes_to_the_higher_expert_is_caught(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the choice looks from the other end."""

    def from_the_end(choice_E: np.ndarray, routing: Routing) -> np.ndarray:
        order = np.argsort(-choice_E[::-1], kind="stable")[: routing.top_k]
        return np.sort(routing.num_experts - 1 - order)

    monkeypatch.setattr(reference_moe, "_choose", from_the_end)
    with pytest.raises(AssertionError, match="lower expert"):
        check_ties(make_worker, ReferenceOps)


@pytest.mark.parametrize("make_ops", BACKENDS)
def test_adaptive_top_k_drops_experts_and_is_of_another_numerics_id(
    make_worker: Callable[..., Worker], make_ops: Callable[[], Ops]
) -> None:
    """A share of 0 is the plain model; a greater one computes less, and what it drops it says in the id. A share of 1
    leaves the best expert, and those that tie with it."""
    checkpoint = moe_checkpoint(MODELS["adaptive"])
    workers = [make_worker(checkpoint, make_ops(), expert_min_share=share) for share in (0.0, 0.0, 0.6, 1.0)]
    streams = [alone(worker, REQUEST, 128) for worker in workers]
    plain, again, some, best = (worker.config.numerics_id for worker in workers)
    assert plain == again and len({plain, some, best}) == 3
    assert streams[0] == streams[1] != streams[2]
    loads = [worker.expert_load() for worker in workers]
    rows = len(REQUEST.prompt_tokens) + 19
    sums = [[sum(tokens) for tokens in load.tokens] for load in loads if load is not None]
    assert sums[0] == [6 * rows] * 2 and sums[3] == [2 * rows] * 2
    assert all(2 * rows < each < 6 * rows for each in sums[2])


# ---- the order of the sum, at the operation ----


class RowByRow(ReferenceOps):
    """Its linears are computed row by row, so that no bit depends on how many there are."""

    def linear(self, x_TK: np.ndarray, weight: Any) -> Any:
        return np.concatenate([super(RowByRow, self).linear(x_K[None], weight) for x_K in x_TK])


def experts_of(ops: ReferenceOps, rng: np.random.Generator) -> Experts:
    def stack(rows: int, cols: int) -> Any:
        values = rng.normal(size=(8, rows, cols)).astype(np.float32)
        return ops.pack_stack([[RawTensor("f32", rows, cols, each.view(np.uint8).reshape(-1))] for each in values])

    return Experts(stack(64, 32), stack(32, 32), ExpertActivation())


def check_rows_alone(ffn: Callable[..., np.ndarray]) -> None:
    """A row's sum is the same bits beside any others."""
    ops, rng = RowByRow(), np.random.default_rng(0)
    experts = experts_of(ops, rng)
    x_TD = rng.normal(size=(24, 32)).astype(np.float32)
    routes_T2k = ops.moe_route(rng.normal(size=(24, 8)).astype(np.float32), Routing(8, 4))
    whole = ffn(ops, x_TD, routes_T2k, experts)
    for rows in ([5], [7, 5], list(range(23, -1, -1))):
        assert np.array_equal(ffn(ops, x_TD[rows], routes_T2k[rows], experts), whole[rows]), rows


def test_a_sum_in_order_of_arrival_is_caught() -> None:
    """Planted: experts are added as the first row that wants each comes along."""

    def by_arrival(ops: Any, x_TD: np.ndarray, routes_T2k: np.ndarray, experts: Experts) -> np.ndarray:
        order = list(dict.fromkeys(routes_T2k[::-1, : routes_T2k.shape[1] // 2].astype(int).reshape(-1).tolist()))
        out_TD = np.zeros_like(x_TD)
        for e in order:
            one_T2k = routes_T2k.copy()
            one_T2k[:, :4] = np.where(routes_T2k[:, :4] == e, routes_T2k[:, :4], -1)
            out_TD += reference_moe.ffn(ops, x_TD, one_T2k, experts)
        return out_TD

    check_rows_alone(reference_moe.ffn)
    with pytest.raises(AssertionError, match="5"):
        check_rows_alone(by_arrival)

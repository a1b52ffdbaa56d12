"""Exactness: a request's tokens and logprobs do not depend on what runs beside it.

Random mixes (arrivals, chunk budgets, batch sizes, shared prefixes, pools so small that sequences are preempted,
aborts, resumed streams, several steps in flight) run through the real engine core and worker, and every request is
compared with its own run alone: nothing shared, nothing cached, the prompt in one chunk. On the native backend all bits
must agree. On numpy, whose BLAS sums in an order of its own, tokens must agree and logprobs within 1e-4: that shows the
engine's half.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from adapters import random_pairs, write_adapter
from grammar_cases import END, Characters, follows, random_grammar, vocabulary
from tiny import tiny_checkpoint
from tokenmill.core.block import KVGroupSpec, full_groups, state_group, window_group
from tokenmill.core.config import EngineConfig
from tokenmill.core.effects import Effects, JobEnded
from tokenmill.core.events import Abort, LoadAdapter, Output, Submit
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.step import TokenLogprob
from tokenmill.engine.core import EngineCore
from tokenmill.formats.checkpoint import Checkpoint, open_checkpoint
from tokenmill.models import loader as registry
from tokenmill.models.lora import LoraLimits
from tokenmill.ops.api import Ops
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.library import available_isas
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker import build, grammars
from tokenmill.worker.build import Worker
from tokenmill.worker.grammars import Grammars
from workers import build_worker

BLOCK_SIZE = 16
NUM_BLOCKS = 96
NUM_STATES = 40
needs_native = pytest.mark.skipif(available() is not None, reason=str(available()))


@dataclass
class Stream:
    """All that a client saw of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: tuple[str, int | None] | None = None

    def take(self, output: Output) -> None:
        assert self.finish is None, "output after the end"
        assert not output.error, output.error
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        if output.finish_reason is not None:
            self.finish = (output.finish_reason, output.stop_token)


@dataclass(frozen=True)
class Mix:
    """`arrivals`: (round, request); `aborts`: round -> request ids; `adapters`: digests that requests name."""

    config: EngineConfig
    arrivals: list[tuple[int, Request]]
    aborts: dict[int, list[str]]
    adapters: tuple[str, ...] = ()


def run(worker: Worker, mix: Mix) -> tuple[dict[str, Stream], EngineCore]:
    """Drive core and worker to the end. Plans run ahead of commits as far as `steps_in_flight` allows."""
    core = EngineCore(mix.config)
    for digest in mix.adapters:
        load = LoadAdapter(0, "")
        core.handle(load, 0.0), core.handle(JobEnded(load, digest), 0.0)
    streams = {request.id: Stream() for _, request in mix.arrivals}
    arrivals = deque(sorted(mix.arrivals, key=lambda pair: pair[0]))
    results: deque = deque()
    now = 0.0

    def take(effects: Effects) -> None:
        for output in effects.outputs:
            streams[output.request_id].take(output)
        for job in effects.jobs:
            take(core.handle(JobEnded(job, asyncio.run(worker.executor.run(job))), now))

    for round_number in range(100_000):
        while arrivals and arrivals[0][0] <= round_number:
            take(core.handle(Submit((arrivals.popleft()[1],)), now))
        for request_id in mix.aborts.get(round_number, ()):
            take(core.handle(Abort((request_id,)), now))
        while (plan := core.plan(now)) is not None:
            results.append(worker.executor.execute_now(plan))
        if results:
            take(core.commit(results.popleft(), now))
        core.check()
        if not (arrivals or core.has_work):
            assert all(stream.finish is not None for stream in streams.values())
            return streams, core
    raise AssertionError("the mix did not end")


def alone(worker: Worker, request: Request, max_model_len: int) -> Stream:
    """The request by itself, from the original prompt, in whole chunks, without prefix cache."""
    config = EngineConfig(
        groups=(*full_groups(NUM_BLOCKS), *others_of(worker, NUM_STATES, 1)),
        max_model_len=max_model_len,
        block_size=BLOCK_SIZE,
        max_num_seqs=1,
        max_num_batched_tokens=max_model_len,
        enable_prefix_caching=False,
        steps_in_flight=1,
    )
    adapters = (request.adapter,) if request.adapter else ()
    streams, _ = run(worker, Mix(config, [(0, replace(request, output_tokens=()))], {}, adapters))
    return streams[request.id]


def others_of(worker: Worker, num_blocks: int, interval: int) -> tuple[KVGroupSpec, ...]:
    """The groups beside that of layers which see everything: of windows, with blocks for one sequence at least, and of
    states."""
    return tuple(
        state_group(num_blocks, interval)
        if group.state_values
        else window_group(max(num_blocks, 2 - (1 - group.window) // BLOCK_SIZE), group.window)
        for group in worker.kv_groups[1:]
    )


def random_sampling(rng: random.Random, vocab_size: int) -> SamplingParams:
    def token() -> int:
        return rng.randrange(vocab_size)

    options: dict = {"temperature": rng.choice([0.0, 0.0, 0.7, 1.0, 1.5])}
    for name, values in (
        ("top_k", (1, 5, 40)),
        ("top_p", (0.5, 0.95)),
        ("min_p", (0.05, 0.3)),
        ("repetition_penalty", (1.3, 0.8)),
        ("presence_penalty", (1.0, -1.0)),
        ("frequency_penalty", (0.7,)),
        ("min_tokens", (5,)),
        ("logprobs", (0, 3)),
        ("logit_bias", (((token(), 5.0), (token(), -50.0)),)),
        ("allowed_token_ids", (tuple(sorted(token() for _ in range(30))),)),
        ("stop_token_ids", ((token(), token()),)),
    ):
        if rng.random() < 0.25:
            options[name] = rng.choice(values)
    if rng.random() < 0.15:
        options["prompt_logprobs"] = rng.choice([0, 2])
    options["max_tokens"] = None
    return SamplingParams(**options, **random_filters(random.Random(repr(options))))


def random_filters(rng: random.Random) -> dict:
    options: dict = {}
    for name, values in (
        ("typical_p", (0.3, 0.9)),
        ("top_n_sigma", (0.7, 2.0)),
        ("xtc_probability", (0.5, 1.0)),
        ("dry_multiplier", (0.8, 5.0)),
        ("dry_allowed_length", (1,)),
        ("dry_penalty_last_n", (20,)),
    ):
        if rng.random() < 0.25:
            options[name] = rng.choice(values)
    return options


def with_grammar(request: Request, number: int) -> Request:
    """Two of three requests follow a grammar; some ignore the end, or are narrowed in other ways too."""
    rng = random.Random(f"grammar {number}")
    if rng.random() < 0.3:
        return request
    sampling = replace(
        request.sampling,
        grammar=random_grammar(rng),
        allowed_token_ids=(),
        ignore_eos=rng.random() < 0.3,
        logit_bias=((END, rng.choice([-3.0, 0.0])),),
    )
    return replace(request, sampling=sampling, eos_token_ids=(END,))


def random_words(number: int, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Sequences that one in three requests must not produce: single tokens and pairs."""
    rng = random.Random(number)
    count = rng.choice([0, 0, 40])
    return tuple(tuple(rng.randrange(vocab_size) for _ in range(rng.choice([1, 1, 2]))) for _ in range(count))


def random_mix(
    rng: random.Random,
    *,
    vocab_size: int,
    num_requests: int,
    max_prompt: int,
    max_output: int,
    adapters: tuple[str, ...] = (),
) -> Mix:
    max_model_len = max_prompt + max_output
    smallest = -(-max_model_len // BLOCK_SIZE)
    config = EngineConfig(
        groups=full_groups(rng.choice([smallest + 1, 2 * smallest, NUM_BLOCKS])),
        max_model_len=max_model_len,
        block_size=BLOCK_SIZE,
        max_num_seqs=rng.choice([1, 3, 8]),
        max_num_batched_tokens=rng.choice([8, 24, 64]),
        enable_prefix_caching=rng.random() < 0.8,
        steps_in_flight=rng.choice([1, 2, 3]),
    )
    prefixes = [[rng.randrange(vocab_size) for _ in range(max_prompt)] for _ in range(2)]
    arrivals, aborts = [], {}
    for number in range(num_requests):
        shared = rng.randrange(max_prompt)
        own = [rng.randrange(vocab_size) for _ in range(rng.randrange(1, max_prompt - shared + 1))]
        request = Request(
            id=f"r{number}",
            prompt_tokens=tuple(rng.choice(prefixes)[:shared] + own),
            sampling=random_sampling(rng, vocab_size),
            max_tokens=rng.randrange(1, max_output + 1),
            seed=rng.randrange(2**64),
            choice=rng.randrange(3),
            eos_token_ids=(rng.randrange(vocab_size),),
            priority=rng.choice([0, 0, 0, 1]),
            adapter=rng.choice(["", *adapters]) if adapters else "",
            bad_words=random_words(number, vocab_size),
            dry_breakers=(3, 5, 50) if number % 2 else (),
        )
        at = rng.randrange(30)
        arrivals.append((at, request))
        if rng.random() < 0.1:
            aborts.setdefault(at + rng.randrange(20), []).append(request.id)
    return Mix(config, arrivals, aborts, adapters)


def check_mix(
    worker: Worker, mix: Mix, rng: random.Random, *, exact: bool, where: str, plain: Worker | None = None
) -> EngineCore:
    """Every stream equals the request's run alone, on `plain` where that is another worker; an aborted one is a
    beginning of it, a resumed one its rest."""
    max_model_len = mix.config.max_model_len
    expected = {request.id: alone(plain or worker, request, max_model_len) for _, request in mix.arrivals}
    arrivals = []
    skipped = {}
    for at, request in mix.arrivals:
        produced = expected[request.id].tokens
        resumable = request.sampling.prompt_logprobs is None and len(produced) > 1
        skipped[request.id] = rng.randrange(len(produced) - 1) if resumable and rng.random() < 0.3 else 0
        arrivals.append((at, replace(request, output_tokens=tuple(produced[: skipped[request.id]]))))
    streams, core = run(worker, replace(mix, arrivals=arrivals))
    for _, request in arrivals:
        got, want, skip = streams[request.id], expected[request.id], skipped[request.id]
        name = f"{where} {request.id}"
        num_tokens = len(want.tokens) - skip
        if got.finish == ("abort", None):
            num_tokens = len(got.tokens)
        else:
            assert got.finish == want.finish, name
        assert got.tokens == want.tokens[skip : skip + num_tokens], name
        if request.sampling.logprobs is not None:
            compare(got.logprobs, want.logprobs[skip : skip + num_tokens], exact, name)
        if got.tokens or got.finish != ("abort", None):
            compare(got.prompt_logprobs, want.prompt_logprobs, exact, name)
    assert core.stats().num_held_blocks == 0
    return core


def compare(got: list[TokenLogprob], want: list[TokenLogprob], exact: bool, name: str) -> None:
    if exact:
        assert got == want, name
        return
    assert [entry.token for entry in got] == [entry.token for entry in want], name
    for one, other in zip(got, want, strict=True):
        assert abs(one.logprob - other.logprob) < 1e-4, name


def run_mixes(
    worker: Worker, shapes: list[tuple[int, dict[str, int]]], *, exact: bool, adapters: tuple[str, ...] = ()
) -> None:
    """`shapes`: (seed, shape of its mix)."""
    preemptions = hits = 0
    for seed, shape in shapes:
        rng = random.Random(seed)
        mix = random_mix(rng, vocab_size=worker.model_config.vocab_size, adapters=adapters, **shape)
        own = random.Random(f"states {seed}")
        others = others_of(worker, own.choice([5, 12, NUM_STATES]), own.choice([1, 2, 5]))
        mix = replace(mix, config=replace(mix.config, groups=(*mix.config.groups, *others)))
        core = check_mix(worker, mix, rng, exact=exact, where=f"seed {seed}")
        preemptions += core.stats().num_preemptions
        hits += core.stats().prefix_hits
    assert preemptions and hits, "mixes that never preempt nor share a prefix prove too little"


CROWDED = {"num_requests": 8, "max_prompt": 40, "max_output": 80}
"""A mix of sequences that grow; where its pool is a small one, as with the seeds below, some are preempted."""


def crowded_mixes(isa: str) -> list[tuple[int, dict[str, int]]]:
    """For run_mixes: one where kernels are slow."""
    return [(seed, CROWDED) for seed in ((201,) if "scalar" in isa else (201, 215, 216))]


def native_ops(isa: str) -> NativeOps:
    """Skips the test where the processor lacks it."""
    if isa not in available_isas((isa,)):
        pytest.skip(f"this processor has no {isa}")
    return NativeOps(2, isa)


def worker_maker(
    checkpoint: Callable[[str], Checkpoint], groups: tuple[KVGroupSpec, ...]
) -> Iterator[Callable[..., Worker]]:
    """What a fixture `make_worker` yields from: makes workers of tiny models by name, and closes them."""
    made: list[Worker] = []

    def make(name: str, ops: Ops, kv_dtype: str, *, max_model_len: int = 128, **how: Any) -> Worker:
        limits = {"max_model_len": max_model_len, "max_num_batched_tokens": max_model_len, "max_num_seqs": 8}
        worker = build_worker(
            checkpoint(name), ops, groups=groups, block_size=BLOCK_SIZE, kv_dtype=kv_dtype, **limits, **how
        )
        made.append(worker)
        return worker

    yield make
    for worker in made:
        worker.executor.close()


@pytest.fixture
def tiny_worker(request, monkeypatch):
    """The tiny model on the backend that the test's parameter makes. Its digest is of no file."""
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "tiny")
    make_ops, kv_dtype = request.param
    worker = build_worker(
        tiny_checkpoint(),
        make_ops(),
        max_model_len=128,
        groups=full_groups(NUM_BLOCKS),
        max_num_batched_tokens=128,
        max_num_seqs=8,
        block_size=BLOCK_SIZE,
        kv_dtype=kv_dtype,
    )
    yield worker
    worker.executor.close()


TINY_SHAPE = {"num_requests": 10, "max_prompt": 80, "max_output": 40}


@pytest.mark.parametrize("tiny_worker", [(ReferenceOps, "f32")], indirect=True, ids=["numpy"])
def test_mixes_on_numpy(tiny_worker):
    """The engine's half: the same tokens whatever the batch, the chunks, the cache and preemption."""
    run_mixes(tiny_worker, [(seed, TINY_SHAPE) for seed in (0, 1, 2, 3, 11, 14)], exact=False)


@pytest.mark.exact
@needs_native
@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize(
    "tiny_worker", [(NativeOps, "f16"), (NativeOps, "bf16"), (NativeOps, "int8")], indirect=True, ids=lambda it: it[1]
)
def test_mixes_bit_for_bit(tiny_worker):
    """Tokens and logprobs equal to the last bit, over many small mixes."""
    run_mixes(tiny_worker, [(seed, TINY_SHAPE) for seed in range(100, 130)], exact=True)


def check_grammars(worker: Worker, seeds: range, *, exact: bool) -> None:
    """Mixes of requests with grammars and without. What ends by itself is an answer to its grammar."""
    worker.executor._grammars.load = vocabulary
    num_whole = preemptions = 0
    for seed in seeds:
        rng = random.Random(seed)
        mix = random_mix(rng, vocab_size=worker.model_config.vocab_size, **TINY_SHAPE)
        mix = replace(mix, arrivals=[(at, with_grammar(each, seed * 100 + at)) for at, each in mix.arrivals])
        core = check_mix(worker, mix, rng, exact=exact, where=f"seed {seed}")
        preemptions += core.stats().num_preemptions
        for _, request in mix.arrivals:
            if request.sampling.grammar:
                found = alone(worker, request, mix.config.max_model_len)
                if found.finish == ("stop", END):
                    num_whole += 1
                    assert follows(request.sampling.grammar, Characters().decode(found.tokens)), seed
                else:
                    assert found.finish is not None and END not in found.tokens
    assert preemptions and num_whole > len(seeds)


@pytest.mark.parametrize("tiny_worker", [(ReferenceOps, "f32")], indirect=True, ids=["numpy"])
def test_grammars_on_numpy(tiny_worker):
    check_grammars(tiny_worker, range(6), exact=False)


@pytest.mark.exact
@needs_native
@pytest.mark.parametrize("tiny_worker", [(NativeOps, "f16")], indirect=True, ids=["native"])
def test_grammars_bit_for_bit_where_masks_are_put_off(tiny_worker, monkeypatch):
    """One mask is made of those that are asked for together: the others' rows draw their tokens in later steps."""
    monkeypatch.setattr(grammars, "_SLOW_S", 0.0)
    monkeypatch.setattr(grammars, "STEP_S", 0.0)
    let_go, late = Grammars._let_go, []
    monkeypatch.setattr(Grammars, "_let_go", lambda self, one: (late.append(one.lacks_mask), let_go(self, one))[1])
    check_grammars(tiny_worker, range(600, 615), exact=True)
    assert sum(late) > 40, sum(late)


@pytest.mark.exact
@needs_native
@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("tiny_worker", [(NativeOps, "f16")], indirect=True, ids=["native"])
def test_grammars_bit_for_bit(tiny_worker):
    """Chunked, batched, preempted and resumed: each answer is what it is alone, and follows its grammar."""
    check_grammars(tiny_worker, range(500, 530), exact=True)


@pytest.mark.exact
@needs_native
def test_adapters_bit_for_bit(monkeypatch, tmp_path):
    """The base and two adapters on equal prompts: no request ever sees KV that another's weights made, and none is
    changed by who shares its steps."""
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "tiny")
    base = tiny_checkpoint()
    limits = {"max_model_len": 128, "groups": full_groups(NUM_BLOCKS), "max_num_batched_tokens": 128, "max_num_seqs": 8}
    worker = build_worker(base, NativeOps(), block_size=BLOCK_SIZE, lora=LoraLimits(2, 8), **limits)
    folders = [write_adapter(tmp_path / str(seed), random_pairs(base, seed=seed)) for seed in (1, 2)]
    adapters = tuple(asyncio.run(worker.executor.run(LoadAdapter(0, str(folder)))) for folder in folders)
    run_mixes(worker, [(seed, TINY_SHAPE) for seed in range(300, 315)], exact=True, adapters=adapters)
    worker.executor.close()


@pytest.mark.exact
@needs_native
@pytest.mark.parametrize("kv_dtype", ["f16", "int8"])
def test_real_model_bit_for_bit(smollm2, kv_dtype):
    """The same promise on the default model: quantised weights, longer prompts, several spans of attention."""
    worker = build_worker(
        open_checkpoint(smollm2),
        NativeOps(),
        max_model_len=360,
        groups=full_groups(NUM_BLOCKS),
        max_num_batched_tokens=360,
        max_num_seqs=8,
        block_size=BLOCK_SIZE,
        kv_dtype=kv_dtype,
    )
    long = {"num_requests": 4, "max_prompt": 300, "max_output": 24}
    crowded = {"num_requests": 5, "max_prompt": 50, "max_output": 40}
    run_mixes(worker, [(205, long), (213, crowded)], exact=True)
    worker.executor.close()


WINDOWS = {"local": (True, True), "global and local": (False, True)}
SEVERAL_WINDOWS = ((9, 0, 40), (21, 4, 9), (0, 50, 5, 50))
"""What layer after layer sees; 0: everything."""


def windowed_checkpoint(windows: tuple[int, ...], max_model_len: int) -> Checkpoint:
    checkpoint = tiny_checkpoint(num_layers=len(windows))
    sizes = checkpoint.metadata
    checkpoint.metadata |= {
        "architectures": ["MinistralForCausalLM"],
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
        "sliding_window": max(windows),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        LAYER_WINDOWS: windows,
        "max_position_embeddings": max_model_len,
    }
    return checkpoint


def windowed_groups(windows: tuple[int, ...]) -> tuple[KVGroupSpec, ...]:
    return tuple(
        window_group(NUM_BLOCKS, window) if window else full_groups(NUM_BLOCKS)[0] for window in sorted(set(windows))
    )


def windowed_workers(make_ops, windows: tuple[int, ...], max_model_len: int) -> tuple[Worker, Worker]:
    """(a worker whose windows are KV groups of their own, the same with all layers on one table that keeps it all)"""
    workers = []
    for groups in (windowed_groups(windows), full_groups(NUM_BLOCKS)):
        worker = build_worker(
            windowed_checkpoint(windows, max_model_len),
            make_ops(),
            max_model_len=max_model_len,
            groups=groups,
            max_num_batched_tokens=max_model_len,
            max_num_seqs=8,
            block_size=BLOCK_SIZE,
            kv_dtype="f32" if make_ops is ReferenceOps else "f16",
        )
        workers.append(worker)
    assert [group.window for group in workers[0].kv_groups] == sorted(set(windows)) and len(workers[1].kv_groups) == 1
    return workers[0], workers[1]


def run_windowed(make_ops, windows: tuple[int, ...], seeds: range, shape: dict[str, int]) -> EngineCore:
    """Mixes over windows' pools from the smallest possible on; returns the last core."""
    max_model_len = shape["max_prompt"] + shape["max_output"]
    worker, plain = windowed_workers(make_ops, windows, max_model_len)
    hits = 0
    for seed in seeds:
        rng = random.Random(seed)
        mix = random_mix(rng, vocab_size=worker.model_config.vocab_size, **shape)
        config = replace(mix.config, groups=tuple(small_pool(rng, group, mix.config) for group in worker.config.groups))
        exact = make_ops is NativeOps
        where = f"windows {windows}, seed {seed}"
        core = check_mix(worker, replace(mix, config=config), rng, exact=exact, where=where, plain=plain)
        hits += core.stats().prefix_hits
    assert hits, "mixes that never share a prefix prove too little"
    worker.executor.close()
    plain.executor.close()
    return core


def small_pool(rng: random.Random, group: KVGroupSpec, config: EngineConfig) -> KVGroupSpec:
    if not group.window:
        return replace(group, num_blocks=min(NUM_BLOCKS, config.groups[0].num_blocks))
    fewest = 1 + -(-(group.window - 1) // BLOCK_SIZE)
    return replace(group, num_blocks=min(NUM_BLOCKS, rng.choice([fewest, fewest + 2, 2 * fewest + 4, NUM_BLOCKS])))


LAYER_WINDOWS = "layer_windows"


@pytest.fixture
def no_digest(monkeypatch):
    """Tiny models are of no file, and may have windows of several sizes, which no family's keys can tell."""
    read = registry.config_from_checkpoint

    def read_with_windows(checkpoint):
        config = read(checkpoint)
        layers = zip(config.layers, checkpoint.metadata[LAYER_WINDOWS], strict=True)
        return replace(config, layers=tuple(replace(layer, window=window) for layer, window in layers))

    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "tiny")
    monkeypatch.setattr(registry, "config_from_checkpoint", read_with_windows)


@pytest.mark.parametrize("kinds", WINDOWS.values(), ids=WINDOWS)
def test_windows_on_numpy(no_digest, kinds):
    """What slid out is never read: tokens equal those of a worker that keeps every block."""
    run_windowed(ReferenceOps, tuple(21 * kind for kind in kinds), range(300, 302), TINY_SHAPE)


@pytest.mark.exact
@needs_native
@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("window", [1, 5, 16, 21, 50])
@pytest.mark.parametrize("kinds", WINDOWS.values(), ids=WINDOWS)
def test_windows_bit_for_bit(no_digest, kinds, window):
    """The same bits whether blocks behind the window are given back or kept: windows smaller than a block, whole blocks
    and in between, with tiny pools, shared prefixes, preemption and steps in flight."""
    run_windowed(NativeOps, tuple(window * kind for kind in kinds), range(400, 406), TINY_SHAPE)


@pytest.mark.exact
@needs_native
@pytest.mark.parametrize("windows", SEVERAL_WINDOWS)
def test_several_windows_bit_for_bit(no_digest, windows):
    """Each size of window is a group with a pool of its own: the same bits as with every block kept."""
    run_windowed(NativeOps, windows, range(420, 424), TINY_SHAPE)


@pytest.mark.exact
@needs_native
@pytest.mark.parametrize("window", [70, 300])
def test_windows_over_several_spans(no_digest, window):
    """Contexts of four spans of attention, of which a window hides the first."""
    shape = {"num_requests": 5, "max_prompt": 900, "max_output": 20}
    run_windowed(NativeOps, (0, window), range(501, 506), shape)

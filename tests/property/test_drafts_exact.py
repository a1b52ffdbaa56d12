"""Exactness with drafts: however many tokens a step gives, a request's tokens, logprobs and end are those of its run
alone, which has none. As test_exactness.py, with its mixes (penalties, DRY, XTC, bias, allowed tokens, min_tokens, stop
tokens, prompt logprobs, chunks, shared prefixes, preemption, resumption, several steps in flight), in every kind of KV.

The drafter is the test's own: it has watched each request's run alone, and proposes what it knows, or lies.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import eq
from pathlib import Path
from typing import Any

import pytest
from test_exactness import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    NUM_STATES,
    Mix,
    Stream,
    alone,
    check_mix,
    no_digest,  # noqa: F401, a fixture
    others_of,
    random_mix,
    run,
    small_pool,
    windowed_workers,
    with_grammar,
)

from adapters import random_pairs, write_adapter
from grammar_cases import vocabulary
from tiny import VOCAB_SIZE, tiny_checkpoint
from tiny_hybrid import MODELS, hybrid_checkpoint
from tiny_latent import latent_checkpoint
from tokenmill.core.block import full_groups, state_group
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs, Work
from tokenmill.core.effects import JobEnded
from tokenmill.core.events import LoadAdapter, Submit
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.speculation import NGRAM, SpeculationConfig
from tokenmill.core.step import Drafts, PlanRow, RowResult, StepPlan, StepResult
from tokenmill.engine import commit
from tokenmill.engine.core import EngineCore
from tokenmill.engine.speculation import Candidate, Speculation
from tokenmill.engine.state import EngineState
from tokenmill.models.lora import LoraLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.record import Recorder
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker import build, grammars
from tokenmill.worker.build import Worker
from tokenmill.worker.draft_length import DraftLength
from tokenmill.worker.runner import Runner
from workers import build_worker

needs_native = pytest.mark.skipif(
    available() is not None or not hasattr(Recorder, "moe_ffn"), reason=f"no native experts: {available()}"
)
CROWDED = {"num_requests": 8, "max_prompt": 50, "max_output": 60}
SEEDS = (31, 39, 46)
MOST = 6
NOTHING = Drafts((), "test", ())
LOOKS_FOR_NOTHING = SpeculationConfig((NGRAM,), prompt_lookup_min=64, prompt_lookup_max=64)
KINDS = RIGHT, LYING, MIXED = "right", "lying", "mixed"
Key = tuple[int, int, tuple[int, ...], str]


class Drafting:
    """An executor whose steps another computes. It remembers what each sequence has drawn at which position, and
    proposes after a token what an earlier run of the same sequence drew next. Where nothing is known, the other's
    proposals stay: without any, a first run is one without drafts."""

    def __init__(self, executor: Any, seed: int, known: dict[Key, dict[int, int]] | None = None) -> None:
        self._executor = executor
        self._rng = random.Random(seed)
        self.known = defaultdict[Key, dict[int, int]](dict) if known is None else known
        self._key_of: dict[int, Key] = {}
        self._num_output: dict[int, int] = {}
        self.num_drafted = Counter[str]()
        self.num_accepted = Counter[str]()
        self.num_overlapped = self.num_forced = self.num_forced_accepted = 0
        self._forced: dict[tuple[Key, int], int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute_now(self, plan: StepPlan) -> StepResult:
        return self.took(plan, self._executor.execute_now(plan))

    def took(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The same with drafts."""
        return replace(result, rows=tuple(map(self._row, plan.rows, result.rows)))

    def _row(self, row: PlanRow, result: RowResult) -> RowResult:
        if row.intro is not None:
            intro = row.intro
            self._key_of[row.seq] = intro.seed, intro.choice, intro.prompt_tokens, intro.adapter
            self._num_output[row.seq] = len(intro.output_tokens)
        key, position = self._key_of[row.seq], self._num_output[row.seq]
        known, kind = self.known[key], kind_of(key)
        for place, draft in enumerate(row.drafts):
            if self._forced.get((key, position + place)) == draft:
                self.num_forced += 1
                self.num_forced_accepted += result.tokens[place : place + 1] == (draft,)
        if row.drafts:
            self.num_overlapped += row.from_step >= 0
            self.num_drafted[kind] += len(row.drafts)
            self.num_accepted[kind] += sum(map(eq, row.drafts, result.tokens))
        for token in result.tokens:
            assert known.setdefault(position, token) == token
            position += 1
        self._num_output[row.seq] = position
        if result.drafts is not None and result.drafts.source == grammars.SOURCE:
            self._forced |= {(key, place): token for place, token in enumerate(result.drafts.tokens, position)}
        proposed = self._propose(known, position, kind) if result.tokens else NOTHING
        return result._replace(drafts=proposed) if proposed.tokens else result

    def _propose(self, known: dict[int, int], position: int, kind: str) -> Drafts:
        tokens: list[int] = []
        for place in range(position, position + self._rng.randint(0, MOST)):
            if place not in known:
                break
            is_right = kind == RIGHT or (kind == MIXED and self._rng.random() < 0.8)
            tokens.append(
                known[place] if is_right else (known[place] + self._rng.randrange(1, VOCAB_SIZE)) % VOCAB_SIZE
            )
        return Drafts(tuple(tokens), "test", (0.5,) * len(tokens)) if tokens else NOTHING


def kind_of(key: Key) -> str:
    return KINDS[key[0] % 3]


def drafted_mix(rng: random.Random, adapters: tuple[str, ...] = ()) -> Mix:
    mix = random_mix(rng, vocab_size=VOCAB_SIZE, adapters=adapters, **CROWDED)
    return replace(mix, config=replace(mix.config, speculation=SpeculationConfig()))


def check_drafts(
    worker: Worker,
    seeds: Iterable[int] = SEEDS,
    *,
    exact: bool = True,
    plain: Worker | None = None,
    adapters: tuple[str, ...] = (),
    change: Callable[[Request, int], Request] = lambda request, number: request,
    takes_all: bool = True,
) -> None:
    """Mixes with a drafter of each kind equal runs without drafts, on `plain` where that is another worker; none that
    lies is accepted, and all that are right, unless some cannot be verified in time."""
    drafted, accepted, preemptions, hits = Counter[str](), Counter[str](), 0, 0
    for seed in seeds:
        rng = random.Random(seed)
        mix = drafted_mix(rng, adapters)
        mix = replace(mix, arrivals=[(at, change(each, seed * 100 + at)) for at, each in mix.arrivals])
        if plain is None:
            others = others_of(worker, rng.choice([12, NUM_STATES]), rng.choice([1, 2, 5]))
            groups = (*mix.config.groups, *others)
        else:
            groups = tuple(small_pool(rng, group, mix.config) for group in worker.config.groups)
        mix = replace(mix, config=replace(mix.config, groups=groups))
        teacher = Drafting((plain or worker).executor, seed)
        drafting = Drafting(worker.executor, seed, teacher.known)
        alone_on, drafts_on = replace(plain or worker, executor=teacher), replace(worker, executor=drafting)
        core = check_mix(drafts_on, mix, rng, exact=exact, where=f"seed {seed}", plain=alone_on)
        preemptions += core.stats().num_preemptions
        hits += core.stats().prefix_hits
        drafted += drafting.num_drafted
        accepted += drafting.num_accepted
        assert not teacher.num_drafted
    assert preemptions and hits, "mixes that never preempt nor share a prefix prove too little"
    assert accepted[RIGHT] > 20 and drafted[LYING] > 20 and 0 < accepted[MIXED] < drafted[MIXED]
    assert not accepted[LYING] and (drafted[RIGHT] == accepted[RIGHT] or not takes_all)


@pytest.fixture(autouse=True)
def all_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as there is room, and not as far as it pays. Drafters that compute draft as much as they may: what pays
    takes a clock."""

    def choose(self: Speculation, candidates: Sequence[Candidate], work: Work, costs: Costs, most: int) -> list[int]:
        chosen: list[int] = []
        for each in candidates:
            chosen.append(min(each.room, len(each.proposal.drafts.tokens), most))
            most -= chosen[-1]
        return chosen

    monkeypatch.setattr(Speculation, "choose", choose)
    monkeypatch.setattr(DraftLength, "is_worth_more", lambda self, costs, chances, most: True)
    monkeypatch.setattr(DraftLength, "pays", True)


@pytest.fixture
def make_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Worker]]:
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "tiny")
    made: list[Worker] = []

    def make(checkpoint: Any = None, make_ops: Callable[[], Any] = NativeOps, **how: Any) -> Worker:
        limits = {"max_model_len": 128, "max_num_batched_tokens": 128, "max_num_seqs": 8, "block_size": BLOCK_SIZE}
        how = {"groups": full_groups(NUM_BLOCKS), **limits, **how}
        made.append(build_worker(checkpoint or tiny_checkpoint(), make_ops(), **how))
        return made[-1]

    yield make
    for worker in made:
        worker.executor.close()


def test_on_numpy(make_worker: Callable[..., Worker]) -> None:
    """The engine's half and the worker's: drafts change no token."""
    check_drafts(make_worker(make_ops=ReferenceOps, kv_dtype="f32"), SEEDS[1:2], exact=False)


def check_next_turns(worker: Worker, num_seeds: int = 4) -> None:
    """Answers that were made with drafts, of which some are wrong, come back as prompts: what is computed from the KV
    that they left equals what is computed anew."""
    num_hits = 0
    for seed in range(num_seeds):
        rng = random.Random(seed)
        config = EngineConfig(
            groups=full_groups(NUM_BLOCKS),
            max_model_len=128,
            block_size=BLOCK_SIZE,
            max_num_seqs=8,
            max_num_batched_tokens=128,
            speculation=SpeculationConfig(),
        )
        first = [
            Request(
                id=f"r{number}",
                prompt_tokens=tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 40))),
                sampling=SamplingParams(logprobs=0),
                max_tokens=rng.randrange(10, 50),
                seed=3 * rng.randrange(2**32) + KINDS.index(MIXED),
                choice=0,
                eos_token_ids=(),
            )
            for number in range(12)
        ]
        teacher = Drafting(worker.executor, seed)
        expected = {each.id: alone(replace(worker, executor=teacher), each, 128) for each in first}
        then = [
            replace(
                each,
                id=f"{each.id} again",
                prompt_tokens=(*each.prompt_tokens, *expected[each.id].tokens, 1),
                max_tokens=10,
            )
            for each in first
        ]
        expected |= {each.id: alone(worker, each, 128) for each in then}
        drafting = Drafting(worker.executor, seed, teacher.known)
        arrivals = [(0, each) for each in first] + [(200, each) for each in then]
        streams, core = run(replace(worker, executor=drafting), Mix(config, arrivals, {}))
        assert streams == expected, f"seed {seed}"
        num_hits += core.stats().prefix_hits
    assert num_hits > 10 * num_seeds


@pytest.mark.exact
@needs_native
def test_next_turns_bit_for_bit(make_worker: Callable[..., Worker]) -> None:
    check_next_turns(make_worker(kv_dtype="int8"))


@pytest.mark.exact
@needs_native
def test_a_rejected_draft_in_a_published_block_is_noticed(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: a block is made matchable whose last position holds what was written for a draft that was wrong.
    Where its sequence ends there, nothing is written over it."""
    accept = commit._accept

    def publish(state: EngineState, seq: Any, result: RowResult) -> RowResult:
        accepted = accept(state, seq, result)
        num_full = len(seq.tokens) // BLOCK_SIZE
        if num_full > seq.tables[-1].num_published:
            state.publish(seq, num_full, None)
        return accepted

    monkeypatch.setattr(commit, "_accept", publish)
    with pytest.raises(AssertionError, match="seed "):
        check_next_turns(make_worker(kv_dtype="int8"))


@pytest.mark.exact
@needs_native
@pytest.mark.parametrize("kv_dtype", ["f16", "bf16", "int8"])
def test_bit_for_bit(make_worker: Callable[..., Worker], kv_dtype: str) -> None:
    """Tokens and logprobs, in every kind of KV."""
    check_drafts(make_worker(kv_dtype=kv_dtype))


@pytest.mark.exact
@needs_native
@pytest.mark.parametrize(("name", "kv_dtype"), [("V2", "bf16"), ("V3", "int8")])
def test_latents_and_experts_bit_for_bit(make_worker: Callable[..., Worker], name: str, kv_dtype: str) -> None:
    """One latent for keys and values, and experts that drafts go through beside other rows."""
    check_drafts(make_worker(latent_checkpoint(name), kv_dtype=kv_dtype))


def make_hybrid(make_worker: Callable[..., Worker], name: str, **how: Any) -> Worker:
    groups = (*full_groups(NUM_BLOCKS), state_group(NUM_STATES, 4))
    return make_worker(hybrid_checkpoint(name), groups=groups, speculation=LOOKS_FOR_NOTHING, **how)


def test_states_on_numpy(make_worker: Callable[..., Worker]) -> None:
    check_drafts(make_hybrid(make_worker, "Qwen3.5", make_ops=ReferenceOps, kv_dtype="f32"), SEEDS[1:2], exact=False)


@pytest.mark.exact
@needs_native
@pytest.mark.parametrize("name", MODELS)
def test_states_bit_for_bit(make_worker: Callable[..., Worker], name: str) -> None:
    """Where a draft is wrong, the next row goes on from the state behind the last that is right."""
    check_drafts(make_hybrid(make_worker, name, kv_dtype="bf16"))


@pytest.mark.exact
@needs_native
def test_states_behind_wrong_drafts_are_noticed(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "_restore_states", lambda self, step: None)
    with pytest.raises(AssertionError):
        check_drafts(make_hybrid(make_worker, "Qwen3.5", kv_dtype="bf16"))


@pytest.mark.exact
@needs_native
@pytest.mark.usefixtures("no_digest")
def test_windows_bit_for_bit() -> None:
    """What is accepted slides windows; what is rejected does not."""
    worker, plain = windowed_workers(NativeOps, (0, 5, 21), sum(CROWDED.values()))
    check_drafts(worker, plain=plain)
    worker.executor.close()
    plain.executor.close()


@pytest.mark.exact
@needs_native
def test_adapters_bit_for_bit(make_worker: Callable[..., Worker], tmp_path: Path) -> None:
    """Rows are sorted by adapter before they are computed; each draft stays with its row."""
    worker = make_worker(lora=LoraLimits(2, 8))
    folders = [write_adapter(tmp_path / str(seed), random_pairs(tiny_checkpoint(), seed=seed)) for seed in (1, 2)]
    adapters = tuple(asyncio.run(worker.executor.run(LoadAdapter(0, str(folder)))) for folder in folders)
    check_drafts(worker, adapters=adapters)


@pytest.mark.exact
@needs_native
@pytest.mark.parametrize("is_slow", [False, True], ids=["", "put-off"])
def test_grammars_bit_for_bit(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """Each draw behind a draft is by the mask that follows it, and the matcher goes on from what was accepted; what is
    drawn without its mask is not taken."""
    monkeypatch.setattr(grammars, "_SLOW_S", 0.0)
    monkeypatch.setattr(grammars, "STEP_S", 0.0 if is_slow else math.inf)
    worker = make_worker()
    worker.executor._grammars.load = vocabulary
    check_drafts(worker, (39, 46, 57), change=with_grammar, takes_all=not is_slow)


@pytest.mark.exact
@needs_native
def test_what_a_grammar_forces_bit_for_bit(make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is its own drafter, and always right. The other one looks for runs that no text here has."""
    monkeypatch.setattr(grammars, "STEP_S", math.inf)
    worker = make_worker(speculation=LOOKS_FOR_NOTHING)
    worker.executor._grammars.load = vocabulary
    num_drafted = num_accepted = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        mix = drafted_mix(rng)
        mix = replace(mix, arrivals=[(at, with_grammar(each, seed * 100 + at)) for at, each in mix.arrivals])
        watching = Drafting(worker.executor, seed)
        check_mix(replace(worker, executor=watching), mix, rng, exact=True, where=f"seed {seed}", plain=worker)
        num_drafted += watching.num_forced
        num_accepted += watching.num_forced_accepted
    assert num_drafted == num_accepted > 5


@pytest.mark.exact
@needs_native
def test_what_a_caller_expects_bit_for_bit(make_worker: Callable[..., Worker]) -> None:
    """Right, or wrong in places: what is drafted of it is counted, and changes nothing."""
    worker = make_worker(speculation=LOOKS_FOR_NOTHING)
    accepted = rejected = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        mix = drafted_mix(rng)
        plain = replace(mix, aborts={}, config=replace(mix.config, speculation=None))
        expected, _ = run(worker, plain)
        arrivals = [
            (at, replace(each, prediction=_changed(expected[each.id].tokens, rng))) for at, each in mix.arrivals
        ]
        core = EngineCore(mix.config)
        core.handle(Submit(tuple(request for _, request in arrivals)), 0.0)
        streams = {request.id: Stream() for _, request in arrivals}
        while (planned := core.plan(0.0)) is not None:
            for output in core.commit(worker.executor.execute_now(planned), 0.0).outputs:
                streams[output.request_id].take(output)
                accepted += output.predicted[0]
                rejected += output.predicted[1]
        assert streams == expected, f"seed {seed}"
    assert accepted > 40 and rejected > 5


def _changed(tokens: Iterable[int], rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB_SIZE) if rng.random() < 0.1 else token for token in tokens)


@pytest.mark.exact
@needs_native
def test_steps_that_overlap_bit_for_bit(make_worker: Callable[..., Worker]) -> None:
    """A row with drafts is prepared while the step computes that draws its first token, and the mask of its first draw
    is made while it computes itself."""
    worker, num_overlapped = make_worker(), 0
    worker.executor._grammars.load = vocabulary
    for seed in SEEDS:
        mix = drafted_mix(random.Random(seed))
        arrivals = [(at, with_grammar(each, seed * 100 + at)) for at, each in mix.arrivals]
        mix = replace(mix, arrivals=arrivals, aborts={}, config=replace(mix.config, steps_in_flight=2))
        teacher = Drafting(worker.executor, seed)
        expected, _ = run(replace(worker, executor=teacher), replace(mix, config=replace(mix.config, max_num_seqs=1)))
        drafting = Drafting(worker.executor, seed, teacher.known)
        got = asyncio.run(run_overlapped(drafting, mix))
        assert got == expected, f"seed {seed}"
        num_overlapped += drafting.num_overlapped
    assert num_overlapped > 20


async def run_overlapped(drafting: Drafting, mix: Mix) -> dict[str, Stream]:
    """All requests at once; steps are prepared and queued while those before them compute."""
    core, streams = EngineCore(mix.config), {request.id: Stream() for _, request in mix.arrivals}
    in_flight: deque[tuple[StepPlan, asyncio.Future[StepResult]]] = deque()
    effects = [core.handle(Submit(tuple(request for _, request in mix.arrivals)), 0.0)]
    effects += [core.handle(JobEnded(job, await drafting.run(job)), 0.0) for job in effects[0].jobs]
    while core.has_work or in_flight:
        while (plan := core.plan(0.0)) is not None:
            in_flight.append((plan, drafting.execute(plan)))
        planned, future = in_flight.popleft()
        effects.append(core.commit(drafting.took(planned, await future), 0.0))
    for output in (output for each in effects for output in each.outputs):
        streams[output.request_id].take(output)
    return streams

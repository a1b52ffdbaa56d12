"""What an engine tells of its prefix cache is what is in it, whatever runs, ends, fails or is evicted."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tokenmill.cluster.index import STRIDE, PrefixIndex
from tokenmill.cluster.keys import with_keys
from tokenmill.core.block import full_groups, split_keys, window_group
from tokenmill.core.config import EngineConfig
from tokenmill.core.effects import Effects, StepFailed
from tokenmill.core.events import Abort, Ready, Submit
from tokenmill.core.kv_events import CLEARED, REMOVED, KVEvents, WatchKV
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.step import RowResult, StepPlan, StepResult
from tokenmill.engine.core import EngineCore

CONFIG = EngineConfig(
    groups=full_groups(40), max_model_len=128, block_size=4, max_num_batched_tokens=48, steps_in_flight=2
)
READY = Ready("m", 128, 100, (), CONFIG.numerics_id, 4, 40)


class Listener:
    """Takes messages as a front end does: into an index, and key by key."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.index.join(0)
        self.held: dict[bytes, int] = {}
        self.num_messages = 0

    def hear(self, effects: Effects) -> None:
        for message in effects.answers:
            if isinstance(message, KVEvents):
                self.num_messages += 1
                assert self.index.apply(0, message)
                for event in message.events:
                    if event.kind == CLEARED:
                        self.held.clear()
                    elif event.kind == REMOVED:
                        for key in split_keys(event.keys):
                            del self.held[key]
                    else:
                        assert self.held.get(event.parent, -1) == event.depth - 1
                        for depth, key in enumerate(split_keys(event.keys), event.depth):
                            assert key not in self.held
                            self.held[key] = depth


def request(name: str, prompt: tuple[int, ...], **more: object) -> Request:
    return Request(name, prompt, SamplingParams(), 6, 0, **more)  # type: ignore[arg-type]


def run(core: EngineCore, plan: StepPlan) -> Effects:
    rows = tuple(RowResult(row.seq, (7,) if row.sample else ()) for row in plan.rows)
    return core.commit(StepResult(plan.step, rows), 0.0)


@pytest.mark.parametrize("seed", range(12))
def test_a_listener_knows_what_is_published(seed: int) -> None:
    """Random requests on a pool that runs over, with aborts, failed steps and a listener that asks again."""
    random = Random(seed)
    core, listener = EngineCore(CONFIG), Listener()
    listener.hear(core.handle(WatchKV(True), 0.0))
    in_flight: list[StepPlan] = []
    pool = core.state.blocks.full_pool
    assert pool is not None
    for number in range(120):
        if random.random() < 0.5:
            base = random.randrange(3) * 100
            prompt = tuple(range(base, base + random.randrange(1, 60)))
            made = [request(f"r{number}", prompt, cache_salt=random.choice(("", "s")))]
            listener.hear(core.handle(Submit(tuple(with_keys(made, READY) if number % 2 else made)), 0.0))
        elif random.random() < 0.1:
            listener.hear(core.handle(Abort(core.open_ids[:1]), 0.0))
        elif random.random() < 0.05:
            listener.hear(core.handle(WatchKV(True), 0.0))
        if (plan := core.plan(0.0)) is not None:
            in_flight.append(plan)
        if in_flight and (len(in_flight) == 2 or random.random() < 0.5):
            plan = in_flight.pop(0)
            is_lost = random.random() < 0.05
            listener.hear(core.handle(StepFailed(plan.step, "on fire"), 0.0) if is_lost else run(core, plan))
        core.check()
    while core.has_work or in_flight:
        if (plan := core.plan(0.0)) is not None:
            in_flight.append(plan)
        listener.hear(run(core, in_flight.pop(0)))
    assert listener.held == {node.key: node.depth for node in pool.nodes()} and listener.held
    listener.index.check()
    kept = {key for key, depth in listener.held.items() if depth % STRIDE == STRIDE - 1}
    assert len(listener.index) == len(kept)
    num_messages = listener.num_messages
    listener.hear(core.handle(WatchKV(False), 0.0))
    listener.hear(core.handle(Submit((request("last", tuple(range(900, 940))),)), 0.0))
    while core.has_work:
        plan = core.plan(0.0)
        assert plan is not None
        listener.hear(run(core, plan))
    assert listener.num_messages == num_messages, "nobody listens"


def test_an_engine_takes_the_keys_that_a_request_brings() -> None:
    """They are those that it would make itself; ones that do not fit the prompt are passed over."""
    prompt = tuple(range(30))
    (made,) = with_keys([request("a", prompt, cache_salt="s", adapter="")], READY)
    keys = []
    for each in (made, replace(made, keys=b""), replace(made, keys=made.keys[16:])):
        core = EngineCore(CONFIG)
        core.handle(Submit((each,)), 0.0)
        plan = core.plan(0.0)
        assert plan is not None
        run(core, plan)
        keys.append(core.state.by_id["a"].keys)
    assert keys[0] == keys[1] == keys[2] and b"".join(keys[0]).startswith(made.keys)


def test_a_model_without_layers_that_see_everything_tells_of_nothing() -> None:
    core = EngineCore(replace(CONFIG, groups=(window_group(40, 8),)))
    assert not core.handle(WatchKV(True), 0.0).answers

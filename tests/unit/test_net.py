"""The net room: messages survive the codec, the link is ordered and bounded, and each end notices the other's death."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.core.cost import Costs
from tokenmill.core.embeds import Embeds
from tokenmill.core.events import (
    Abort,
    AdapterLoaded,
    Beat,
    CacheShown,
    Drain,
    EngineStats,
    FilePart,
    ForgetTenants,
    LoadAdapter,
    Output,
    PoolChanged,
    Ready,
    SetPool,
    ShowCache,
    StepOutputs,
    Submit,
    Timing,
    UnloadAdapter,
    WantPart,
)
from tokenmill.core.experts import ExpertLoad, WeightReads
from tokenmill.core.kv_events import KeepKV, KVEvent, KVEvents, PoolCounts, PrefixRun, PrefixSummary, PromoteKV, WatchKV
from tokenmill.core.moves import Continue, KVSource, Moved, Offer, Prefetch, Prefetched, Release, Staged, Yield
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.speculation import DraftStats
from tokenmill.core.step import TokenLogprob
from tokenmill.core.tiers import TierEvent, TierEvents, WatchTiers
from tokenmill.net import codec
from tokenmill.net.child_process import open_lifeline
from tokenmill.net.system import MonotonicClock, new_id, new_seed, seeds_from

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=8).map(tuple)
TEXT = st.text(max_size=12)
KEYS = st.lists(st.binary(min_size=16, max_size=16), max_size=3).map(tuple)
SOURCE = st.builds(KVSource, TEXT, TEXT, TEXT, TEXT, TEXT)
FLOATS = st.floats(-50, 50)
COUNT = st.integers(0, 2**40)
KINDS: dict[Any, Any] = {
    Costs: st.builds(Costs, *[st.floats(0, 1)] * len(Costs._fields)),
    int: COUNT,
    float: FLOATS,
    tuple[str, ...]: st.lists(TEXT, max_size=3).map(tuple),
    tuple[int, ...]: st.lists(COUNT, max_size=4).map(tuple),
    DraftStats | None: st.none()
    | st.builds(
        DraftStats,
        FLOATS,
        st.lists(st.tuples(TEXT, FLOATS, COUNT), max_size=2).map(tuple),
        st.lists(FLOATS, max_size=3).map(tuple),
    ),
}
LOGPROBS = st.lists(
    st.builds(
        TokenLogprob,
        st.integers(0, 60000),
        FLOATS,
        st.integers(1, 60000),
        st.lists(st.tuples(st.integers(0, 9), FLOATS), max_size=3).map(tuple),
    ),
    max_size=3,
).map(tuple)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    stop_token_ids=TOKENS,
    logit_bias=st.lists(st.tuples(st.integers(0, 99), st.floats(-100, 100)), max_size=3).map(tuple),
    logprobs=st.none() | st.integers(0, 20),
)
REQUEST = st.builds(
    Request,
    id=TEXT,
    prompt_tokens=st.lists(st.integers(0, 60000), min_size=1, max_size=20).map(tuple),
    sampling=SAMPLING,
    max_tokens=st.integers(1, 8192),
    seed=st.integers(0, 2**64 - 1),
    priority=st.integers(-5, 5),
    cache_salt=TEXT,
    attempt=st.integers(0, 9),
    arrival_s=FLOATS,
    source=st.none() | SOURCE,
    yields=TEXT,
    bad_words=st.lists(TOKENS, max_size=3).map(tuple),
    embeds=st.sampled_from([(), (Embeds(0, 1, b"digest", ((0, 1, 2),)),)]),
)
OUTPUT = st.builds(
    Output,
    request_id=TEXT,
    tokens=TOKENS,
    logprobs=LOGPROBS,
    prompt_logprobs=LOGPROBS,
    finish_reason=st.sampled_from([None, "stop", "error"]),
    stop_token=st.none() | st.integers(0, 9),
    num_output=COUNT,
    num_cached=COUNT,
    attempt=COUNT,
    num_drafted=COUNT,
    error=TEXT,
    vector=st.binary(max_size=9),
    timing=st.none() | st.builds(Timing, FLOATS, FLOATS, FLOATS, FLOATS),
)
MESSAGE = st.one_of(
    st.builds(Submit, st.lists(REQUEST, max_size=3).map(tuple)),
    st.builds(Abort, st.lists(TEXT, max_size=3).map(tuple)),
    st.just(Drain()),
    st.builds(LoadAdapter, st.integers(0, 9), TEXT, TEXT),
    st.builds(UnloadAdapter, TEXT),
    st.builds(ShowCache, st.integers(0, 9), st.integers(0, 9)),
    st.builds(
        CacheShown, st.integers(0, 9), st.just(16),
        st.lists(st.builds(PoolCounts, *[st.integers(0, 9)] * 5), max_size=2).map(tuple),
        st.builds(
            PrefixSummary,
            st.lists(st.builds(PrefixRun, *[st.integers(-1, 9)] * 8), max_size=3).map(tuple),
            st.integers(0, 9),
            st.integers(0, 9),
        ),
    ),
    st.builds(WatchKV, st.booleans()),
    st.builds(WatchTiers, st.booleans()),
    st.builds(
        TierEvents, st.integers(0, 9),
        st.lists(st.builds(TierEvent, TEXT, TEXT, st.binary(), st.binary(), st.integers(0, 9)), max_size=3).map(tuple),
    ),
    st.builds(KeepKV, st.binary(), FLOATS, TEXT),
    st.builds(PromoteKV, st.binary()),
    st.builds(ForgetTenants, st.lists(TEXT, max_size=3).map(tuple)),
    st.builds(
        KVEvents, st.integers(0, 9),
        st.lists(st.builds(KVEvent, TEXT, st.binary(), st.binary(), st.integers(0, 9)), max_size=3).map(tuple),
    ),
    st.builds(
        ExpertLoad, st.just((1, 3)), st.tuples(*[st.tuples(COUNT, COUNT)] * 2), COUNT,
        st.one_of(st.none(), st.builds(WeightReads, COUNT, COUNT, COUNT, COUNT, COUNT, FLOATS)),
    ),
    st.builds(Beat, st.one_of(st.none(), st.integers(0, 9)), st.integers(0, 9), FLOATS, st.integers(0, 9)),
    st.builds(WantPart, st.integers(0, 9), TEXT, st.integers(0, 9)),
    st.builds(FilePart, st.integers(0, 9), st.integers(0, 9), st.binary(max_size=9), TEXT),
    st.builds(SetPool, TEXT, st.integers(0, 9)),
    st.builds(PoolChanged, TEXT, st.integers(0, 9)),
    st.builds(AdapterLoaded, st.integers(0, 9), TEXT, TEXT),
    st.builds(Offer, TEXT, TEXT, KEYS),
    st.builds(Yield, TEXT, TEXT, st.integers(0, 9)),
    st.builds(Continue, TEXT, st.integers(0, 9), TOKENS),
    st.builds(Release, TEXT),
    st.builds(Prefetch, st.integers(0, 9), KEYS, st.none() | SOURCE),
    st.builds(Staged, TEXT, st.integers(0, 9), COUNT),
    st.builds(Moved, TEXT, st.integers(0, 9), COUNT, TEXT),
    st.builds(Prefetched, st.integers(0, 9), COUNT, TEXT),
    st.builds(
        Ready, TEXT, st.integers(1, 9), st.integers(1, 9), TOKENS, TEXT, st.just(16), st.integers(1, 99),
        st.lists(st.tuples(TEXT, TEXT), max_size=3).map(tuple),
    ),
    st.builds(
        StepOutputs,
        st.lists(OUTPUT, max_size=3).map(tuple),
        st.builds(EngineStats, **{name: KINDS[kind] for name, kind in get_type_hints(EngineStats).items()}),
        FLOATS,
    ),
)  # fmt: skip


@given(MESSAGE)
@settings(max_examples=200)
def test_every_message_survives_the_codec(message: Any) -> None:
    assert codec.decode(codec.encode(message, 0.0), 0.0) == message


def test_times_are_those_of_the_receivers_clock_after_the_link() -> None:
    """The ends' clocks differ by 50 hours, and a tenth of a second passes on the way."""
    request = Request("r", (1,), SamplingParams(), 1, 0, arrival_s=1000.0)
    submit = codec.decode(codec.encode(Submit((request,)), 1000.25), 181_000.35)
    assert isinstance(submit, Submit)
    assert submit.requests[0].arrival_s == pytest.approx(181_000.1)
    outputs = (Output("r", timing=Timing(1000.0, 1001.0, -1.0, 1003.0)), Output("s"))
    step = codec.decode(codec.encode(StepOutputs(outputs, EngineStats(), 1003.5), 1004.0), 5.1)
    assert isinstance(step, StepOutputs) and step.now_s == pytest.approx(4.6)
    timing = step.outputs[0].timing
    assert timing is not None and timing.first_token_s == -1.0, "what never happened is no time of either clock"
    assert (timing.arrival_s, timing.scheduled_s, timing.finished_s) == pytest.approx((1.1, 2.1, 4.1))
    assert step.outputs[1] == outputs[1]


@pytest.mark.parametrize("data", [b"", b"Z", b"S", b"S\xc0", b"O\x93\x01\x02\x03", codec.encode(Drain(), 0.0) + b"x"])
def test_damaged_messages_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="link message"):
        codec.decode(data, 0.0)


def test_entropy_does_not_repeat_and_fits_a_signed_integer() -> None:
    seeds = {new_seed() for _ in range(1000)}
    assert len(seeds) == 1000 and all(0 <= seed < 2**63 for seed in seeds)
    assert len({new_id("a") for _ in range(1000)}) == 1000
    assert new_id("chatcmpl").startswith("chatcmpl-")


def test_seeds_of_one_seed_are_the_same_each_time_and_differ_among_themselves():
    one, again, other = seeds_from(3), seeds_from(3), seeds_from(4)
    seeds = [one() for _ in range(100)]
    assert seeds == [again() for _ in range(100)] and len(set(seeds)) == 100
    assert all(0 <= seed < 2**63 for seed in seeds) and other() != seeds[0]


def test_the_clock_does_not_go_back() -> None:
    times = [MonotonicClock().now() for _ in range(100)]
    assert times == sorted(times)


CHILD = """
import sys, time
from tokenmill.net.child_process import exit_when_parent_ends
exit_when_parent_ends(int(sys.argv[1]), grace_s=0.0)
print("up", flush=True)
time.sleep(60)
"""


def test_a_child_ends_when_the_parents_end_of_the_lifeline_closes() -> None:
    read_fd, write_fd = open_lifeline()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(read_fd)], pass_fds=(read_fd,), stdout=subprocess.PIPE, text=True
    )
    try:
        os.close(read_fd)
        assert child.stdout is not None and child.stdout.readline() == "up\n"
        time.sleep(0.05)
        assert child.poll() is None
        os.close(write_fd)
        assert child.wait(30) == 1
    finally:
        child.kill()
        child.wait()
        child.stdout and child.stdout.close()


def test_requests_without_embeds_are_sent_without_the_field() -> None:
    """The last field is left out where it is empty, so that peers understand each other that do not know it."""
    plain = Request("r", (1, 2), SamplingParams(), 1, 0)
    num_fields = [
        len(msgspec.msgpack.decode(codec.encode(Submit((request,)), 0.0)[1:])[-1][0])
        for request in (plain, replace(plain, embeds=(Embeds(1, 1, b"digest"),)))
    ]
    assert num_fields == [24, 25]

"""The resume file: what was under way comes back as it was; answers stay for a bounded time, each owner's own."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from clocks import ManualClock
from tokenmill.core.errors import ConfigError
from tokenmill.core.events import Output, Timing
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.step import TokenLogprob
from tokenmill.core.terms import Terms
from tokenmill.server.resume.layer import rest_of
from tokenmill.server.resume.store import KeptAnswer, KeptCall, ResumeStore

REQUEST = Request(
    "cmpl-1-0",
    (5, 6, 7),
    SamplingParams(seed=3, stop=("x",), logit_bias=((4, 1.5),), grammar='{"a": 1}', logprobs=2),
    max_tokens=9,
    seed=2**64 - 1,
    eos_token_ids=(2,),
    terms=Terms(tenant="t", ttft_s=0.5),
    bad_words=((1, 2), (3,)),
    dry_breakers=(8,),
    arrival_s=12.5,
)
CALL = KeptCall(
    "cmpl-1", 1700000000, "fp_1", REQUEST, True, "me", "client", "key", "given", "given", "/v1/completions", b"a=b",
    ((b"content-type", b"application/json"),), b'{"prompt": "\xc3\xa4"}',
)  # fmt: skip
OUTPUTS = [
    Output(
        "cmpl-1-0", (5,), (TokenLogprob(5, -0.5, 1, ((6, -1.0),)),), num_cached=2, timing=Timing(1.0, 2.0, 3.0, -1.0)
    ),
    Output("cmpl-1-0", (6,), num_output=2),
    Output("cmpl-1-0", (), finish_reason="stop", stop_token=2, num_output=3),
]
ANSWER = KeptAnswer(200, ((b"content-type", b"text/event-stream"),), b"id: 1\ndata: a\n\nid: 2\ndata: b\n\n")


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[ResumeStore]:
    opened = opened_store(tmp_path, clock)
    yield opened
    opened.close()


def opened_store(folder: Path, clock: ManualClock) -> ResumeStore:
    store = ResumeStore(str(folder / "private" / "resume.db"), max_bytes=1000, kept_s=60, wall_s=clock)
    store.open()
    return store


def test_what_was_under_way_comes_back_as_it_was(tmp_path: Path, clock: ManualClock) -> None:
    """The request and each output equal, field by field, calls in their order; and further outputs join them."""
    first = opened_store(tmp_path, clock)
    keys = [first.new_key(), first.new_key()]
    for key in keys:
        assert asyncio.run(first.begin(key, CALL))
    first.add([(keys[0], OUTPUTS[0]), (keys[1], OUTPUTS[0])])
    first.add([(keys[0], OUTPUTS[1])])
    first.close()
    second = opened_store(tmp_path, clock)
    assert [(each.key, each.call, each.outputs) for each in asyncio.run(second.unfinished())] == [
        (keys[0], CALL, OUTPUTS[:2]),
        (keys[1], CALL, OUTPUTS[:1]),
    ]
    second.add([(keys[0], OUTPUTS[2])])
    second.drop(keys[1])
    assert second.new_key() not in keys
    second.close()
    third = opened_store(tmp_path, clock)
    assert [each.outputs for each in asyncio.run(third.unfinished())] == [OUTPUTS]
    third.close()


def test_what_is_in_the_file_is_always_a_beginning(tmp_path: Path, clock: ManualClock) -> None:
    """Where outputs could not be written, those behind them are not either: a stream would go on with a hole."""
    opened_store(tmp_path, clock).close()
    database = sqlite3.connect(tmp_path / "private" / "resume.db")
    second = "NEW.kind = 'output' AND NEW.owner = '1' AND NEW.key = 2"
    full = f"WHEN {second} BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
    database.execute(f"CREATE TRIGGER full BEFORE INSERT ON kept {full}")
    database.close()
    store = opened_store(tmp_path, clock)
    keys = [store.new_key(), store.new_key()]
    for key in keys:
        asyncio.run(store.begin(key, CALL))
    store.add([(key, OUTPUTS[0]) for key in keys])
    store.add([(keys[0], OUTPUTS[1])])
    store.add([(key, OUTPUTS[2]) for key in keys])
    store.close()
    store = opened_store(tmp_path, clock)
    found = [each.outputs for each in asyncio.run(store.unfinished())]
    assert found == [OUTPUTS[:1], [OUTPUTS[0], OUTPUTS[2]]]
    store.close()


def test_an_answer_takes_the_place_of_its_call(store: ResumeStore) -> None:
    key = store.new_key()
    asyncio.run(store.begin(key, CALL))
    store.add([(key, OUTPUTS[0])])
    asyncio.run(store.end(key, CALL, ANSWER))
    store.add([(key, OUTPUTS[1])])  # of a step that was under way
    assert asyncio.run(store.unfinished()) == []
    for name in ("cmpl-1", "given"):
        assert asyncio.run(store.find("me", name)) == ANSWER
        assert asyncio.run(store.find("you", name)) is None
    assert asyncio.run(store.find("me", "other")) is None


def test_the_latest_of_a_name_is_found(store: ResumeStore) -> None:
    for number in range(3):
        asyncio.run(
            store.end(store.new_key(), CALL._replace(id=f"cmpl-{number}"), ANSWER._replace(body=b"%d" % number))
        )
    found = asyncio.run(store.find("me", "given"))
    assert found is not None and found.body == b"2"


def test_of_calls_with_a_name_the_one_begun_last_counts(store: ResumeStore, tmp_path: Path, clock: ManualClock) -> None:
    """Whichever ended first, before and after a restart; where it has gone, the one before it."""
    first, second = store.new_key(), store.new_key()

    async def end(key: int, size: int = 300, told_id: str = "given") -> None:
        clock.now_s += 1
        call = CALL._replace(id=f"cmpl-{key}", told_id=told_id)
        await store.end(key, call, ANSWER._replace(body=b"%d" % key * size))

    def found() -> bytes:
        answer = asyncio.run(store.find("me", "given"))
        assert answer is not None
        return answer.body[:1]

    for key in (second, first):
        asyncio.run(end(key))
    assert found() == b"%d" % second
    store.close()
    store.open()
    third = store.new_key()
    assert third > second and found() == b"%d" % second
    asyncio.run(end(third, 550, "other"))
    assert found() == b"%d" % first


@pytest.mark.parametrize(("kept_s", "is_there"), [(20, False), (60, True), (600, True)])
def test_what_is_there_ages_as_a_restart_tells(
    tmp_path: Path, clock: ManualClock, kept_s: float, is_there: bool
) -> None:
    store = opened_store(tmp_path, clock)
    ended, left = store.new_key(), store.new_key()
    asyncio.run(store.end(ended, CALL, ANSWER))
    asyncio.run(store.begin(left, CALL))
    store.close()
    clock.now_s += 30
    for wait_s in (0, kept_s - 31):
        clock.now_s += max(wait_s, 0)
        store = ResumeStore(str(tmp_path / "private" / "resume.db"), max_bytes=1000, kept_s=kept_s, wall_s=clock)
        store.open()
        for name in ("given", "cmpl-1"):
            assert (asyncio.run(store.find("me", name)) is not None) == is_there
        assert [each.key for each in asyncio.run(store.unfinished())] == [left] * is_there
        store.close()


def test_old_and_large_goes(store: ResumeStore, clock: ManualClock) -> None:
    for number in range(30):
        clock.now_s += 0.1
        call = CALL._replace(id=f"cmpl-{number}", told_id="")
        asyncio.run(store.end(store.new_key(), call, ANSWER._replace(body=b"x" * 100)))
    found = [asyncio.run(store.find("me", f"cmpl-{number}")) is not None for number in range(30)]
    assert found == sorted(found) and 5 < sum(found) < 9
    clock.now_s += 60
    assert asyncio.run(store.find("me", "cmpl-29")) is None
    asyncio.run(store.begin(store.new_key(), CALL))
    clock.now_s += 61
    assert asyncio.run(store.unfinished()) == []


def test_one_process_has_the_file_and_it_is_its_users_alone(
    store: ResumeStore, tmp_path: Path, clock: ManualClock
) -> None:
    path = tmp_path / "private" / "resume.db"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    asyncio.run(store.begin(store.new_key(), CALL))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError, match="file of its own"):
        patch.setattr("tokenmill.server.resume.store._BUSY_S", 0.05)
        opened_store(tmp_path, clock)


def test_a_call_that_cannot_be_read_is_dropped_and_others_are_not(tmp_path: Path, clock: ManualClock) -> None:
    store = opened_store(tmp_path, clock)
    for _ in range(2):
        asyncio.run(store.begin(store.new_key(), CALL))
    store.close()
    database = sqlite3.connect(tmp_path / "private" / "resume.db")
    database.execute("UPDATE kept SET body = x'00' WHERE kind = 'call' AND key = 1")
    database.commit()
    database.close()
    store = opened_store(tmp_path, clock)
    assert [each.key for each in asyncio.run(store.unfinished())] == [2]
    store.close()


@pytest.mark.parametrize(("after", "rest"), [(0, ANSWER.body), (1, b"id: 2\ndata: b\n\n"), (2, b""), (9, b"")])
def test_the_rest_of_a_kept_answer(after: int, rest: bytes) -> None:
    assert rest_of(ANSWER, after) == rest

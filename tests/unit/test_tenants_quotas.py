"""Limits of tenants: what a minute allows, who shares it, and that what is taken is given back."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tokenmill.cluster.events import Ended
from tokenmill.control.tenants.quota_file import LEASE_S, Bucket, QuotaFile, Verdict, duration_text, standing
from tokenmill.control.tenants.quotas import RESERVED_OUTPUT, Quotas
from tokenmill.core.errors import InvalidRequest, RateLimited, Unavailable
from tokenmill.core.events import Output
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.tenant import RateLimits, Tenant

NOW_S = 1_800_000_000.0


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], QuotaFile]]:
    made: list[QuotaFile] = []

    def make() -> QuotaFile:
        made.append(QuotaFile(str(tmp_path / "control.db")))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_what_is_let_in_is_what_the_limit_allows() -> None:
    """For seeds: who comes whenever the bucket says gets a full bucket and one limit a minute, and never more; each
    wait that is told is long enough, and a little less is not."""
    for seed in range(200):
        rng = random.Random(seed)
        limit, now_s = rng.choice([1, 7, 60, 10_000]), NOW_S
        bucket, taken = Bucket(float("inf"), 0.0), 0.0
        for _ in range(200):
            now_s += rng.expovariate(1.0)
            amount = rng.uniform(0, limit) if rng.random() < 0.9 else limit * 3.0
            bucket = bucket.at(now_s, limit)
            wait_s = bucket.wait_s(amount, limit)
            if wait_s:
                assert bucket.at(now_s + wait_s * 0.99 - 1e-4, limit).wait_s(amount, limit) > 0, seed
                now_s += wait_s
                bucket = bucket.at(now_s, limit)
                assert not bucket.wait_s(amount, limit), seed
            bucket, taken = bucket.less(amount), taken + amount
            assert taken <= limit * (1 + (now_s - NOW_S) / 60) + 3 * limit, seed
            assert bucket.at(now_s - 100, limit).level == bucket.level, "a clock that is set back refills nothing"


def test_headers_say_how_much_is_left_and_when_all_is() -> None:
    assert standing(Bucket(45.0, 0.0), 60) == (60, 45, 15.0)
    assert standing(Bucket(60.0, 0.0), 60) == (60, 60, 0.0)
    assert standing(Bucket(-30.0, 0.0), 60) == (60, 0, 90.0)
    assert [duration_text(each) for each in (0, 0.012, 1.5, 59.9996, 90, 360.25)] == [
        "0ms", "12ms", "1.5s", "1m0s", "1m30s", "6m0.25s",
    ]  # fmt: skip


def test_two_front_ends_share_a_minute_and_open_calls(opened: Callable[[], QuotaFile]) -> None:
    """Of requests, of tokens and of what is open; a refused call takes nothing."""
    files, limits = (opened(), opened()), RateLimits(4, 100, 3)
    takes = [files[number % 2].take("t", limits, 20, NOW_S) for number in range(4)]
    assert [each.refused_by for each in takes] == ["", "", "", "concurrent"]
    assert [takes[2].standings[kind].remaining for kind in ("requests", "tokens")] == [1, 40]
    files[0].give_back("t", limits, 20, NOW_S)
    assert files[1].take("t", limits, 61, NOW_S)[:2] == ("tokens", pytest.approx(0.6))
    assert not files[1].take("t", limits, 60, NOW_S).refused_by
    assert files[0].take("t", limits, 1, NOW_S)[:2] == ("requests", pytest.approx(15.0))
    assert not files[0].take("other", limits, 100, NOW_S).refused_by
    assert files[0].take("t", RateLimits(), 10**9, NOW_S) == ("", 0.0, {})


def test_what_a_dead_front_end_held_is_soon_free(opened: Callable[[], QuotaFile]) -> None:
    """One that lives keeps what it holds by renewing it, one that closes leaves nothing."""
    dead, alive, limits = opened(), opened(), RateLimits(0, 0, 2)
    assert not dead.take("t", limits, 0, NOW_S).refused_by
    assert not alive.take("t", limits, 0, NOW_S).refused_by
    assert alive.take("t", limits, 0, NOW_S + LEASE_S - 1).refused_by == "concurrent"
    alive.renew(NOW_S + LEASE_S - 1)
    other = opened()
    assert not other.take("t", limits, 0, NOW_S + LEASE_S + 1).refused_by, "the dead one's"
    assert other.take("t", limits, 0, NOW_S + LEASE_S + 1).refused_by == "concurrent"
    alive.close()
    assert not other.take("t", limits, 0, NOW_S + LEASE_S + 1).refused_by


def test_a_call_that_is_over_counts_with_what_it_was(opened: Callable[[], QuotaFile]) -> None:
    """Less gives back, more is owed; one that never began counts not at all."""
    file, limits = opened(), RateLimits(10, 1000, 0)

    def left(tokens: int = 0) -> tuple[int, int]:
        verdict: Verdict = file.take("t", RateLimits(10**6, 1000, 0), tokens, NOW_S)
        return verdict.standings["requests"].remaining, verdict.standings["tokens"].remaining

    file.take("t", limits, 600, NOW_S)
    file.give_back("t", limits, 500, NOW_S)
    assert left()[1] == 900
    file.give_back("t", limits, -1500, NOW_S)
    assert file.take("t", limits, 1, NOW_S)[:2] == ("tokens", pytest.approx(36.06))
    file.give_back("t", limits, 1600, NOW_S, num_requests=5)
    verdict = file.take("t", limits, 0, NOW_S)
    assert (verdict.standings["requests"].remaining, verdict.standings["tokens"].remaining) == (9, 1000)


# ---- as calls meet them ----


def request(name: str, prompt: tuple[int, ...] = (1,) * 50, max_tokens: int = 10) -> Request:
    return Request(name, prompt, SamplingParams(), max_tokens, 0)


def end(quotas: Quotas, requests: Sequence[Request], num_output: int | None) -> None:
    for each in requests:
        output = None if num_output is None else Output(each.id, finish_reason="stop", num_output=num_output)
        quotas.ended(Ended(each, output, "stop", 0.0, 0.0))


def quoted(tmp_path: Path, test: Callable[[Quotas, Callable[[], QuotaFile]], object]) -> None:
    """Run an async test with open quotas; what it is given too asks the file for what is left."""
    quotas = Quotas(str(tmp_path / "control.db"), lambda: NOW_S)
    quotas.open()
    try:
        asyncio.run(asyncio.wait_for(test(quotas), 20))  # type: ignore[arg-type, call-arg]
    finally:
        quotas.close()


def test_a_front_end_that_is_full_by_itself_asks_nobody(tmp_path: Path) -> None:
    """And tells when a call may end, from how long calls took."""
    tenant = Tenant("t", limits=RateLimits(0, 0, 2))

    async def test(quotas: Quotas) -> None:
        for name in "ab":
            quotas.check(tenant)
            await quotas.take(tenant, [request(name)])
        with pytest.raises(RateLimited, match="2 open requests") as refused:
            quotas.check(tenant)
        assert refused.value.limit == "concurrent" and refused.value.retry_after_s > 0
        end(quotas, [request("a")], 3)
        quotas.check(tenant)
        end(quotas, [request("b")], None)
        assert not quotas._num_open and not quotas._charges

    quoted(tmp_path, test)  # type: ignore[arg-type]


async def left(quotas: Quotas, tenant: Tenant) -> tuple[int, int]:
    """Requests and tokens, by a call that takes one request and gives it back."""
    probe = [request("probe", (1,))]
    headers = await quotas.take(tenant, probe)
    quotas.drop(probe)
    return int(headers["x-ratelimit-remaining-requests"]) + 1, int(headers["x-ratelimit-remaining-tokens"]) + 11


def test_counts_that_are_damaged_in_a_run_are_each_front_ends_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, with a word, and with the calls that are open, until the file is replaced; the damaged one stays, for
    keys are in it. Where nothing can be written it is said at once, too."""
    tenant, path = Tenant("t", limits=RateLimits(100, 0, 3)), tmp_path / "control.db"

    async def test(quotas: Quotas) -> None:
        for name in "ab":
            await quotas.take(tenant, [request(name)])

        def file() -> QuotaFile:
            assert quotas._file is not None
            return quotas._file

        def damage() -> None:
            database = file()._database
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            database.execute("PRAGMA shrink_memory")
            path.write_bytes(b"\xa5" * path.stat().st_size)

        await quotas._writer.do(damage)
        headers = await quotas.take(tenant, [request("c")])
        assert headers["x-ratelimit-remaining-requests"] == "99"
        assert [each.levelname for each in caplog.records] == ["ERROR"] and "by itself" in caplog.text
        assert path.read_bytes().startswith(b"\xa5")
        with pytest.raises(RateLimited, match="3 open requests"):
            quotas.check(tenant)
        end(quotas, [request("a")], 1)
        other = QuotaFile(str(tmp_path / "other.db"))
        other.take("t", tenant.limits, 0, NOW_S)
        other.close()
        os.replace(tmp_path / "other.db", path)
        headers = await quotas.take(tenant, [request("d")])
        assert headers["x-ratelimit-remaining-requests"] == "98", "what the new file says"
        for name in "bcd":
            end(quotas, [request(name)], 1)
        assert not await quotas._writer.do(lambda: file().held)
        caplog.clear()
        await quotas._writer.do(lambda: file()._database.execute("PRAGMA query_only=ON"))
        for _ in range(2):
            with pytest.raises(Unavailable, match="readonly"):
                await quotas.take(tenant, [request("e")])
        assert [each.levelname for each in caplog.records] == ["ERROR"] and str(path) in caplog.text

    quoted(tmp_path, test)  # type: ignore[arg-type]


def test_tokens_are_taken_at_the_start_and_put_right_at_the_end(tmp_path: Path) -> None:
    """A prompt once for all its answers; of an answer at most RESERVED_OUTPUT; vectors without any."""
    tenant = Tenant("t", limits=RateLimits(100, 10_000, 0))

    async def test(quotas: Quotas) -> None:
        prompt = (1,) * 50
        calls = [request("a", prompt), request("b", prompt, 100_000)]
        await quotas.take(tenant, calls)
        assert await left(quotas, tenant) == (99, 10_000 - 50 - 10 - RESERVED_OUTPUT)
        end(quotas, calls[:1], 7)
        assert await left(quotas, tenant) == (99, 10_000 - 50 - 10 - RESERVED_OUTPUT)
        end(quotas, calls[1:], 3000)
        assert await left(quotas, tenant) == (99, 10_000 - 50 - 3007)
        await quotas.take(tenant, calls)
        end(quotas, calls, None)
        assert await left(quotas, tenant) == (99, 10_000 - 50 - 3007), "no engine ever had it"
        await quotas.take(tenant, calls)
        quotas.settle(calls, 5)
        assert await left(quotas, tenant) == (98, 10_000 - 100 - 3012)

    quoted(tmp_path, test)  # type: ignore[arg-type]


def test_a_refusal_says_when_and_is_cheap_until_then(tmp_path: Path) -> None:
    """Nothing is asked of the file while no request can be let in; other limits hold at once."""
    tenant = Tenant("t", limits=RateLimits(1, 0, 0))

    async def test(quotas: Quotas) -> None:
        quotas.check(tenant)
        await quotas.take(tenant, [request("a")])
        with pytest.raises(RateLimited, match="1 requests a minute; retry in 60 s") as refused:
            await quotas.take(tenant, [request("b")])
        assert refused.value.retry_after_s == pytest.approx(60)
        assert refused.value.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(RateLimited, match="retry in 60 s"):
            quotas.check(tenant)
        quotas.check(Tenant("t", limits=RateLimits(2, 0, 0)))
        quotas.check(Tenant("other", limits=tenant.limits))
        small = Tenant("u", limits=RateLimits(0, 49, 0))
        with pytest.raises(InvalidRequest, match="50 tokens; the tenant may use 49 a minute"):
            await quotas.take(small, [request("c")])

    quoted(tmp_path, test)  # type: ignore[arg-type]


def test_who_leaves_while_being_let_in_holds_nothing(tmp_path: Path) -> None:
    """Whenever that is: nothing of it counts, also where the thread has not come to it yet."""
    tenant = Tenant("t", limits=RateLimits(100, 0, 1))

    async def test(quotas: Quotas) -> None:
        for delay_s in (0, 0, 0.0005, 0.002):
            task = asyncio.create_task(quotas.take(tenant, [request("a")]))
            await asyncio.sleep(delay_s)
            was_done = task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if was_done:
                quotas.drop([request("a")])
            for _ in range(3):
                await quotas.used()  # the thread has come so far
            held = await quotas.take(tenant, [request("b")])
            end(quotas, [request("b")], None)
            assert held["x-ratelimit-remaining-requests"] == "99"

    quoted(tmp_path, test)  # type: ignore[arg-type]


def test_when_keys_were_used_is_noted(tmp_path: Path) -> None:
    """At the latest when the server closes."""

    async def test(quotas: Quotas) -> None:
        quotas.note_used("key_a", NOW_S - 5)
        assert await quotas.used() == {"key_a": NOW_S - 5}

    quoted(tmp_path, test)  # type: ignore[arg-type]
    file = QuotaFile(str(tmp_path / "control.db"))
    file.note_used([("key_a", NOW_S - 9), ("key_b", NOW_S)])
    assert file.used() == {"key_a": NOW_S - 5, "key_b": NOW_S}
    file.close()


_FRONT_END = """
import os, signal, sys, time
from tokenmill.control.tenants.quota_file import QuotaFile
from tokenmill.core.tenant import RateLimits
file, num = QuotaFile(sys.argv[1]), 0
print("ready", flush=True)
sys.stdin.readline()
for _ in range(400):
    num += not file.take("t", RateLimits(1000, 0, 1000), 0, float(sys.argv[2])).refused_by
print(num, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_that_are_killed_leave_the_counts_right(tmp_path: Path, opened: Callable[[], QuotaFile]) -> None:
    """Four at once let in exactly what one could; then the file serves on, and what they held runs out."""
    path = str(tmp_path / "control.db")
    command = [sys.executable, "-c", _FRONT_END, path, str(NOW_S)]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for each in running:
        assert each.stdout is not None and each.stdout.readline() == "ready\n"
    for each in running:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    counts = [int(each.communicate(timeout=60)[0]) for each in running]
    assert sum(counts) == 1000 and {each.returncode for each in running} == {-signal.SIGKILL}
    file = opened()
    assert file.take("t", RateLimits(0, 0, 1000), 0, NOW_S).refused_by == "concurrent"
    assert file.take("t", RateLimits(1000, 0, 0), 0, NOW_S).refused_by == "requests"
    assert not file.take("t", RateLimits(0, 0, 1), 0, NOW_S + LEASE_S + 1).refused_by

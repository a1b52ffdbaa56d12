"""Remote tiers against real stores: what comes back is what was saved, and whatever goes wrong is a miss, soon."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from plugin_packages import forget, install_examples
from ports import free_port
from remote_stores import BLOCK_BYTES, KEY, Host, RedisServer, S3Server, block, look, sum_of, until
from tokenmill.core.errors import ConfigError
from tokenmill.core.tiers import NO_PLACE, DropFrom, TierKey
from tokenmill.kv.transfer.remote import RemoteTier
from tokenmill.kv.transfer.remote.backend import Backend, parse
from tokenmill.kv.transfer.remote.redis import RedisBackend
from tokenmill.kv.transfer.remote.sealed import Limits, SealedStore
from tokenmill.kv.transfer.remote.tier import Names, open_backend
from tokenmill.kv.transfer.seal import Seal

MODEL = "model A"
BLOCKS = [block(number) for number in range(20)]
QUICK = Limits(call_s=1.0, poll_s=0.05, retry_s=0.05)


@pytest.fixture(scope="module", params=["redis", "file", "s3", "plug-in"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a store of each kind, for tests that leave others' blocks alone."""
    if request.param in ("file", "s3"):
        pytest.importorskip("obstore", reason="obstore is not installed (pip install 'tokenmill[kv-s3]')")
    if request.param == "file":
        yield f"file://{tmp_path_factory.mktemp('shared')}"
        return
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "plug-in":
            folder = tmp_path_factory.mktemp("plugin")
            patch.syspath_prepend(install_examples(folder, "sqlite_kv"))
            forget()
            yield f"sqlite://{folder}/kv.db"
            forget()
            return
        patch.setenv("AWS_ACCESS_KEY_ID", "somebody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
        with RedisServer(tmp_path_factory.mktemp("redis")) if request.param == "redis" else S3Server() as store:
            yield store.url


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


@asynccontextmanager
async def tier_of(
    url: str, host: Host, model: str = MODEL, key: bytes = KEY, limits: Limits = QUICK
) -> AsyncIterator[RemoteTier]:
    tier = RemoteTier(url, model, BLOCK_BYTES, host.view, key, limits)
    assert list(await tier.open()) == []
    try:
        yield tier
    finally:
        await tier.close()


async def save(tier: RemoteTier, host: Host, blocks: list[TierKey]) -> None:
    assert list(await tier.save(host.saves(blocks))) == [0] * len(blocks)


async def load(tier: RemoteTier, host: Host, blocks: list[TierKey]) -> list[bool]:
    """Which came, each with its bytes and checksum."""
    sums = await tier.load(host.loads(blocks))
    for nth, (wanted, value) in enumerate(zip(blocks, sums, strict=True)):
        assert value == NO_PLACE or (value == sum_of(wanted) and host.has(nth, wanted)), (nth, wanted, value)
    return [value != NO_PLACE for value in sums]


def test_what_one_saves_another_finds_and_loads(url: str) -> None:
    """Blocks of two groups come back byte for byte, with the checksums of those who computed them; dropped, they are
    gone."""

    async def run() -> None:
        model = "round trip"
        ours, others = Host(), Host()
        async with tier_of(url, ours, model) as first, tier_of(url, others, model) as second:
            assert await look(second, BLOCKS) == [False] * 20
            await save(first, ours, BLOCKS)
            asked = [*BLOCKS, block(77), block(78)]
            there = [wanted in BLOCKS for wanted in asked]
            assert await look(second, asked) == there
            assert await load(second, others, asked) == there
            assert second.stat()["blocks_loaded"] == 20 and second.stat()["blocks_missing"] == 2
            assert second.facts.name == "remote" and second.facts.latency_s > 0
            for kept in (17, 5, 4, 1, 0):
                await first.drop(DropFrom(4, "remote", tuple((gone, 0) for gone in BLOCKS[kept:])))
                assert await look(second, BLOCKS) == [True] * kept + [False] * (20 - kept)

    asyncio.run(run())


def test_what_memory_has_spoilt_is_not_shared(redis: RedisServer) -> None:
    """A slot that is not as its checksum says is not written; those beside it are."""

    async def run() -> None:
        host = Host()
        async with tier_of(redis.url, host) as tier:
            job = host.saves(BLOCKS)
            host.slot(7, BLOCKS[7])[100] ^= 1
            there = [nth != 7 for nth in range(20)]
            assert [place != NO_PLACE for place in await tier.save(job)] == there
            assert await look(tier, BLOCKS) == there
            assert tier.stat()["saves_corrupt"] == 1 and tier.stat()["blocks_saved"] == 19

    asyncio.run(run())


def test_holes_are_misses(url: str) -> None:
    """A store that has lost something in the middle of a prefix gives the rest, whatever it says when it is asked."""

    async def run() -> None:
        model, host = "holes", Host()
        async with tier_of(url, host, model) as tier:
            await save(tier, host, BLOCKS)
            await tier.drop(DropFrom(4, "remote", ((BLOCKS[7], 0), (BLOCKS[8], 0))))
            assert await load(tier, host, BLOCKS) == [nth not in (7, 8) for nth in range(20)]

    asyncio.run(run())


def test_another_model_or_key_finds_nothing(url: str) -> None:
    """Whoever has another numerics id, or another key, neither finds our blocks nor spoils them."""

    async def run() -> None:
        model, host = "foreign", Host()
        async with (
            tier_of(url, host, model) as ours,
            tier_of(url, host, "foreign too") as other_model,
            tier_of(url, host, model, key=b"z" * 32) as other_key,
        ):
            await save(ours, host, BLOCKS)
            for tier in (other_model, other_key):
                assert await look(tier, BLOCKS) == [False] * 20
                assert await load(tier, host, BLOCKS) == [False] * 20
                await tier.drop(DropFrom(4, "remote", tuple((gone, 0) for gone in BLOCKS)))
            assert await load(ours, host, BLOCKS) == [True] * 20

    asyncio.run(run())


def raw_values(backend: Backend, names: Names) -> dict[TierKey, bytes]:
    values: dict[TierKey, bytes] = {}
    wanted = [names.of(at, 1) for at in BLOCKS]
    backend.get(wanted, 1 << 20, lambda nth, value: values.update({BLOCKS[nth]: bytes(value)}), 5.0)
    return values


def spoilt(draw: random.Random, values: dict[TierKey, bytes], at: TierKey) -> tuple[bytes, str]:
    """What accidents and intruders make of a block's value, and what it is to be counted as."""
    value = bytearray(values[at])
    donor = next(other for other in BLOCKS if other != at and other[0] == at[0])
    how = draw.choice(["flip", "flip", "cut", "longer", "empty", "zeros", "noise", "swap", "older", "forged", "alien"])
    if how == "flip":
        value[draw.randrange(12, len(value))] ^= 1 << draw.randrange(8)
        return value, "corrupt"
    if how in ("cut", "longer", "empty"):
        return {"cut": value[: draw.randrange(1, len(value))], "longer": value + b"\0", "empty": b""}[how], "short"
    if how in ("zeros", "noise"):
        return bytes(len(value)) if how == "zeros" else draw.randbytes(len(value)), "foreign"
    if how == "swap":
        return values[donor], "corrupt"
    key, epoch = (b"?" * 32 if how == "alien" else KEY), (0 if how == "older" else 1)
    seal, told = Seal(key, "kv remote", "spoilt", epoch), (donor if how == "forged" else at)
    seal.seal(told, sum_of(told), bytes(BLOCK_BYTES[at[0]]), value)
    return value, "stale" if how == "older" else "corrupt"


@pytest.mark.parametrize("kind", ["redis", "file"])
def test_a_thousand_bad_values_are_all_seen(kind: str, tmp_path: Path) -> None:
    """Flipped, cut, swapped, zeroed, stale, forged: none is served, each is counted as what it is and taken away, and
    the block can be saved anew."""

    async def run(url: str) -> None:
        host, draw, num_spoilt = Host(), random.Random(16), 0
        backend, _ = open_backend(url)
        names = Names(KEY, "spoilt")
        async with tier_of(url, host, "spoilt") as tier:
            await save(tier, host, BLOCKS)
            while num_spoilt < 500:
                before = tier.stat()
                bad = draw.sample(BLOCKS, draw.randrange(1, 10))
                values = raw_values(backend, names)
                worse = {at: spoilt(draw, values, at) for at in bad}
                backend.put([(names.of(at, 1), bytes(value)) for at, (value, _) in worse.items()], 5.0)
                assert await load(tier, host, BLOCKS) == [at not in bad for at in BLOCKS]
                for outcome in ("corrupt", "short", "foreign", "stale"):
                    counted = tier.stat().get(f"blocks_{outcome}", 0) - before.get(f"blocks_{outcome}", 0)
                    assert counted == sum(expected == outcome for _, expected in worse.values()), outcome
                assert await look(tier, bad) == [False] * len(bad)
                await save(tier, host, bad)
                num_spoilt += len(bad)
        backend.close()

    if kind == "file":
        pytest.importorskip("obstore", reason="obstore is not installed (pip install 'tokenmill[kv-s3]')")
        asyncio.run(run(f"file://{tmp_path}"))
    else:
        with RedisServer(tmp_path) as server:
            asyncio.run(run(server.url))


def test_a_store_that_dies_is_a_miss_and_comes_back(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """Killed in the middle of loads, it costs nothing soon after, and is used again once it answers, empty."""

    async def run() -> None:
        host = Host()
        async with tier_of(redis.url, host) as tier:
            await save(tier, host, BLOCKS)
            rounds = 0

            async def keep_loading() -> None:
                nonlocal rounds
                while not tier.stat()["is_down"]:
                    await load(tier, host, BLOCKS)
                    rounds += 1

            loading = asyncio.create_task(keep_loading())
            await until(lambda: rounds >= 3)
            redis.kill()
            await asyncio.wait_for(loading, 20)
            asked = tier.stat()["errors"]
            assert await look(tier, BLOCKS) == [False] * 20
            assert await load(tier, host, BLOCKS) == [False] * 20
            assert list(await tier.save(host.saves(BLOCKS))) == [NO_PLACE] * 20
            assert tier.stat()["errors"] == asked, "a store that was given up was asked"
            redis.start()
            await until(lambda: not tier.stat()["is_down"])
            assert await look(tier, BLOCKS) == [False] * 20
            await save(tier, host, BLOCKS)
            assert await load(tier, host, BLOCKS) == [True] * 20

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert [record.message.partition(" in ")[0] for record in caplog.records] == [
        "KV is not looked for",
        "KV is looked for",
    ]


def test_a_store_that_hangs_is_given_up_in_time(redis: RedisServer) -> None:
    """Each call ends at its limit, and no slot is written after that, whatever the store still sends."""

    async def run() -> None:
        host = Host()
        limits = Limits(call_s=0.2, poll_s=60.0, retry_s=0.05)
        async with tier_of(redis.url, host, limits=limits) as tier:
            await save(tier, host, BLOCKS)
            redis.stop()
            began_s = time.monotonic()
            assert await load(tier, host, BLOCKS) == [False] * 20
            marked = [host.slot(nth, wanted) for nth, wanted in enumerate(BLOCKS)]
            for slot in marked:
                slot[:] = b"\xee" * len(slot)
            while not tier.stat()["is_down"]:
                assert await look(tier, BLOCKS) == [False] * 20
            assert time.monotonic() - began_s < 20
            assert tier.stat()["timeouts"] >= 3
            redis.go_on()
            await until(lambda: not tier.stat()["is_down"])
            assert all(bytes(slot) == b"\xee" * len(slot) for slot in marked)
            assert await load(tier, host, BLOCKS) == [True] * 20

    try:
        asyncio.run(run())
    finally:
        redis.go_on()


def test_what_comes_late_is_not_written_to_slots(redis: RedisServer) -> None:
    """A client without limits of its own gives values when the call is long over: the slots are others' by then."""
    gate = threading.Event()

    class Late(RedisBackend):
        def get(
            self, names: Sequence[str], most_bytes: int, take: Callable[[int, memoryview], None], limit_s: float
        ) -> None:
            gate.wait(20)
            super().get(names, most_bytes, take, 20.0)

    async def nothing(limit_s: float) -> None:
        pass

    async def run() -> None:
        host, ended = Host(), threading.Event()
        async with tier_of(redis.url, host) as tier:
            await save(tier, host, BLOCKS)
        late = Late(parse(redis.url, ()))
        names, seal = Names(KEY, MODEL), Seal(KEY, "kv remote", MODEL, epoch=1)
        store = SealedStore(
            late, names.of, seal, BLOCK_BYTES, host.view, Limits(call_s=0.05), nothing, lambda: True
        )  # fmt: skip
        await store.open()
        job = host.loads(BLOCKS)
        assert await store.load([(wanted, offset) for wanted, _, offset in job.blocks]) == [NO_PLACE] * 20
        for nth, wanted in enumerate(BLOCKS):
            host.slot(nth, wanted)[:] = b"\xee" * len(host.slot(nth, wanted))
        gate.set()
        store.calls._pools["load"].submit(ended.set)
        store.calls._pools["load"].shutdown(wait=True)
        assert ended.is_set()
        for nth, wanted in enumerate(BLOCKS):
            assert bytes(host.slot(nth, wanted)) == b"\xee" * len(host.slot(nth, wanted))
        await store.close()

    asyncio.run(run())


def test_a_store_that_is_away_at_first_is_used_later(tmp_path: Path) -> None:
    """Nothing waits for it at the start."""

    async def run() -> None:
        host, server = Host(), RedisServer(tmp_path)
        async with tier_of(server.url, host) as tier:
            assert tier.stat()["is_down"] and await look(tier, BLOCKS) == [False] * 20
            with server:
                await until(lambda: not tier.stat()["is_down"])
                await save(tier, host, BLOCKS)

    asyncio.run(run())


def test_who_asks_before_it_is_open_waits_for_it(redis: RedisServer) -> None:
    """A store of many machines is asked by the first worker that joins, which is as soon as it is opened."""

    async def run() -> None:
        host = Host()
        async with tier_of(redis.url, host) as first:
            await save(first, host, BLOCKS)
        tier = RemoteTier(redis.url, MODEL, BLOCK_BYTES, host.view, KEY, QUICK)
        asked = [asyncio.create_task(look(tier, BLOCKS)) for _ in range(3)]
        await asyncio.sleep(0)
        await tier.open()
        try:
            assert await asyncio.gather(*asked) == [[True] * 20] * 3
        finally:
            await tier.close()

    asyncio.run(run())


def test_passwords_let_in_and_are_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the address or a file, over TCP too; a wrong one is reported without its letters, and nothing fails."""
    port = free_port()
    secret = tmp_path / "secret"
    secret.write_text("hush-hush\n")

    async def run(url: str) -> bool:
        host = Host()
        async with tier_of(url, host) as tier:
            if tier.stat()["is_down"]:
                assert await look(tier, BLOCKS) == [False] * 20
                return False
            await save(tier, host, BLOCKS)
            assert await load(tier, host, BLOCKS) == [True] * 20
            return True

    with RedisServer(tmp_path, "--requirepass", "hush-hush", port=port), caplog.at_level(logging.DEBUG):
        assert asyncio.run(run(f"redis://:hush-hush@127.0.0.1:{port}/1"))
        assert asyncio.run(run(f"redis://127.0.0.1:{port}?password_file={secret}"))
        assert not asyncio.run(run(f"redis://me:hush-wrong@127.0.0.1:{port}/1"))
        assert not asyncio.run(run(f"redis://127.0.0.1:{port}"))
    assert "WRONGPASS" in caplog.text and "NOAUTH" in caplog.text
    assert "hush" not in caplog.text


def test_tls_is_checked(tmp_path: Path) -> None:
    """rediss:// with the authority that the operator names; without it the server is not believed."""
    port = free_port()
    certificate, key = self_signed(tmp_path)
    tls = ["--tls-port", str(port), "--tls-cert-file", certificate, "--tls-key-file", key, "--tls-auth-clients", "no"]

    async def run(url: str) -> bool:
        host = Host()
        async with tier_of(url, host) as tier:
            if tier.stat()["is_down"]:
                return False
            await save(tier, host, BLOCKS)
            return all(await load(tier, host, BLOCKS))

    with RedisServer(tmp_path, *tls):
        assert asyncio.run(run(f"rediss://127.0.0.1:{port}?ca_file={certificate}"))
        assert not asyncio.run(run(f"rediss://127.0.0.1:{port}"))
        assert not asyncio.run(run(f"redis://127.0.0.1:{port}"))


def self_signed(folder: Path) -> tuple[str, str]:
    """The files of a certificate for 127.0.0.1 and of its key."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "tls.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "tls.key").write_bytes(private)
    return str(folder / "tls.pem"), str(folder / "tls.key")


def test_what_a_full_store_evicts_is_a_miss(tmp_path: Path) -> None:
    """Under maxmemory with an eviction policy some are gone, and those that came are right."""

    async def run(url: str) -> None:
        host = Host(200)
        blocks = [block(2 * number) for number in range(150)]
        async with tier_of(url, host) as tier:
            await save(tier, host, blocks)
            came = await load(tier, host, blocks)
            assert 0 < sum(came) < 150
            assert not any(there for there, was in zip(await look(tier, blocks), came, strict=True) if not was)
            assert not tier.stat()["is_down"]

    with RedisServer(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru") as server:
        asyncio.run(run(server.url))


def test_a_store_that_takes_no_more_is_no_failure(tmp_path: Path) -> None:
    """What Redis refuses for want of memory is not kept, and what is there goes on being found."""

    async def run(url: str) -> None:
        host = Host(200)
        blocks = [block(2 * number) for number in range(150)]
        async with tier_of(url, host) as tier:
            places = list(await tier.save(host.saves(blocks)))
            kept = [place != NO_PLACE for place in places]
            assert 0 < sum(kept) < 150
            assert tier.stat()["saves_refused"] == 150 - sum(kept) and not tier.stat()["is_down"]
            assert await load(tier, host, blocks) == kept

    with RedisServer(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        asyncio.run(run(server.url))


def test_values_lapse_where_the_operator_says_so(redis: RedisServer) -> None:
    """?ttl=1: after a second they are gone."""

    async def run() -> None:
        host = Host()
        async with tier_of(redis.url + "?ttl=1", host) as tier:
            await save(tier, host, BLOCKS)
            lapsed_s = time.monotonic() + 20
            while any(await look(tier, BLOCKS)):
                assert time.monotonic() < lapsed_s
                await asyncio.sleep(0.05)

    asyncio.run(run())


def test_who_was_fenced_off_writes_no_more(url: str) -> None:
    """Whoever raises the epoch goes on alone; what was there is not found any more; the others read, and write once
    they are started anew."""

    async def run() -> None:
        model = "fenced"
        ours, others = Host(), Host()
        async with tier_of(url, ours, model) as first:
            async with tier_of(url, others, model) as second:
                await save(second, others, BLOCKS)
                assert await look(first, BLOCKS) == [True] * 20
                assert await first.fence() == 2
                assert await look(first, BLOCKS) == [False] * 20
                await until(lambda: bool(second.stat()["is_fenced"]))
                assert list(await second.save(others.saves(BLOCKS))) == [NO_PLACE] * 20
                assert second.stat()["saves_skipped"] == 20
                await save(first, ours, BLOCKS[:5])
                assert await load(second, others, BLOCKS) == [True] * 5 + [False] * 15
                await second.drop(DropFrom(4, "remote", tuple((gone, 0) for gone in BLOCKS)))
                assert await look(first, BLOCKS[:5]) == [True] * 5
            async with tier_of(url, others, model) as third:
                assert third.stat()["epoch"] == 2
                await save(third, others, BLOCKS[5:])
                assert await load(first, ours, BLOCKS) == [True] * 20

    asyncio.run(run())


def test_what_a_suspended_process_writes_late_is_not_found(redis: RedisServer) -> None:
    """It does not know that it was fenced off: its blocks have names of the old epoch."""

    async def run() -> None:
        ours, others = Host(), Host()
        asleep = Limits(call_s=1.0, poll_s=3600.0)
        async with tier_of(redis.url, ours) as first, tier_of(redis.url, others, limits=asleep) as second:
            await first.fence()
            await save(second, others, BLOCKS)
            assert await look(first, BLOCKS) == [False] * 20
            assert await load(first, ours, BLOCKS) == [False] * 20

    asyncio.run(run())


def test_an_operator_names_the_epoch(redis: RedisServer) -> None:
    """A higher one holds for all, a lower one was fenced off; a record that was lost is written again."""

    async def run() -> None:
        host = Host()
        async with tier_of(redis.url + "?epoch=7", host) as first:
            assert first.stat()["epoch"] == 7
            async with tier_of(redis.url + "?epoch=6", host) as second:
                assert second.stat()["is_fenced"]
                assert list(await second.save(host.saves(BLOCKS))) == [NO_PLACE] * 20
            backend, _ = open_backend(redis.url)
            record = Names(KEY, MODEL).epoch_record
            await asyncio.to_thread(backend.delete, [record], 1.0)
            while not (await asyncio.to_thread(backend.has, [record], 1.0))[0]:
                await asyncio.sleep(0.01)
            backend.close()
            async with tier_of(redis.url, host) as third:
                assert third.stat()["epoch"] == 7 and not third.stat()["is_fenced"]

    asyncio.run(run())


def test_a_connection_that_was_closed_meanwhile_is_no_failure(tmp_path: Path) -> None:
    """Redis closes what is idle: the next call takes a fresh one."""

    async def run(server: RedisServer) -> None:
        host = Host()
        asleep = Limits(poll_s=3600.0)
        async with tier_of(server.url, host, limits=asleep) as tier:
            await save(tier, host, BLOCKS)
            server.kill()
            server.start()
            assert await look(tier, BLOCKS) == [False] * 20
            assert tier.stat().get("errors", 0) == 0

    with RedisServer(tmp_path) as server:
        asyncio.run(run(server))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://x", "redis://, rediss://, unix://, s3://, file://"),
        ("redis://me:hush@x:port", "cannot be read"),
        ("redis://me:hush@x/name", "number of a database"),
        ("redis://me:hush@x?tll=3", "unknown option tll"),
        ("redis://me:hush@x?ttl=soon", "no number"),
        (f"redis://me:hush@x?epoch={10**20}", "no number"),
        ("redis://x?password_file=/nowhere/hush", "cannot be read"),
        ("file://x/y", "file:///mnt/kv"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused(url: str, words: str) -> None:
    """In words that say what to do, and without the password."""
    with pytest.raises(ConfigError) as caught:
        RemoteTier(url, MODEL, BLOCK_BYTES, Host().view, KEY)
    assert words in caught.value.message and "me:hush" not in caught.value.message
    assert caught.value.param == "kv_remote"


def test_nothing_is_shared_without_a_key() -> None:
    """Who has none is told how to make one."""
    with pytest.raises(ConfigError, match="--kv-key-file"):
        RemoteTier("redis://127.0.0.1", MODEL, BLOCK_BYTES, Host().view, b"")

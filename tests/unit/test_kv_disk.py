"""The disk tier: what was saved is loaded, also by a later process; what fails is a miss, and room is used again."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import stat
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kv_disk import MODEL, SIZES, SLOT_BYTES, Host, blocks_bytes, data_of, opened, prefix
from tokenmill.core.tiers import DISK, NO_PLACE, BlockFacts, LookIn, SaveTo
from tokenmill.kv.transfer.checksum import block_sum
from tokenmill.kv.transfer.disk import tier as disk
from tokenmill.kv.transfer.disk.extent import PAGE_BYTES, EntryCodec, Extent, Head, padded
from tokenmill.kv.transfer.disk.io import DiskSlots
from tokenmill.kv.transfer.disk.space import DiskSpace
from tokenmill.kv.transfer.disk.tier import DiskReader, DiskTier
from tokenmill.kv.transfer.disk.write import DiskCounts, RateLimitedWarnings


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    """In any order, by the process that saved it and by a later one, which also learns all that is known of it."""

    async def scenario() -> None:
        facts = [*prefix(1, 9, 0, "a tenant"), *prefix(2, 5, 1), *prefix(3, 4, 2, "t" * 300)]
        wanted = [each.block for each in facts[::2] + facts[1::2][::-1]]
        async with opened(tmp_path / "kv") as (blocks, entries):
            assert entries == []
            assert NO_PLACE not in await blocks.save(facts)
            assert await blocks.load(wanted) == blocks.expected(wanted)
            assert await blocks.tier.look(LookIn(1, DISK, (facts[0].block,))) == [NO_PLACE]
            data, places = blocks.data, blocks.places
        async with opened(tmp_path / "kv") as (blocks, entries):
            assert [entry.facts.block for entry in entries] == [each.block for each in facts]
            assert [entry.facts for entry in entries[:14]] == facts[:14]
            assert len({entry.facts.owner for entry in entries[14:]}) == 1 and entries[14].facts.depth == 0
            assert blocks.places == places
            assert [entry.sum for entry in entries] == [block_sum(block, data[block]) for block in data]
            assert await blocks.load(wanted) == [data[block] for block in wanted]
            assert blocks.tier.counts.num_loaded == len(wanted)

    asyncio.run(scenario())


def test_only_the_owner_may_read_the_folder(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path / "kv") as (blocks, _):
            await blocks.save(prefix(1, 3))

    asyncio.run(scenario())
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "kv").iterdir()} == {0o600}


def test_a_second_process_is_told_who_has_the_folder(tmp_path: Path) -> None:
    """Also where both are this one; afterwards the folder is free."""

    async def scenario() -> None:
        async with opened(tmp_path):
            with pytest.raises(OSError, match=f"used by another KV store .process {os.getpid()}"):
                await DiskTier(tmp_path, MODEL, SIZES, 1 << 20, Host().view).open()
        async with opened(tmp_path):
            pass

    asyncio.run(scenario())


def test_a_folder_that_everyone_may_write_to_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o777)

    async def scenario() -> None:
        async with opened(tmp_path):
            pass

    asyncio.run(scenario())
    assert "Everyone on this machine may write" in caplog.text


def test_dropped_blocks_are_gone_for_later_processes_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        facts = prefix(1, 10)
        async with opened(tmp_path) as (blocks, _):
            await blocks.save(facts)
            old = dict(blocks.places)
            await blocks.drop([each.block for each in facts[3:7]])
            blocks.places = old
            assert [data is None for data in await blocks.load([each.block for each in facts])] == [
                3 <= nth < 7 for nth in range(10)
            ]
            assert blocks.tier.counts.num_missed == 4
        async with opened(tmp_path) as (_, entries):
            assert [entry.facts for entry in entries] == facts[:3] + facts[7:]

    asyncio.run(scenario())


def test_a_place_that_was_used_again_is_a_miss(tmp_path: Path) -> None:
    """Whoever still has the place of a block that was dropped does not get the bytes of its successor."""

    async def scenario() -> None:
        async with opened(tmp_path, 1 << 20) as (blocks, _):
            first = prefix(1, 4, 1)
            await blocks.save(first)
            old = dict(blocks.places)
            await blocks.drop(list(old))
            await blocks.save(prefix(2, 4, 1))
            assert sorted(old.values()) == sorted(blocks.places.values())
            blocks.places |= old
            assert await blocks.load(list(old)) == [None] * 4

    asyncio.run(scenario())


def test_saving_a_block_again_keeps_the_newer_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        facts = prefix(1, 3)
        async with opened(tmp_path) as (blocks, _):
            await blocks.save(facts)
            await blocks.save(facts, seed=1)
            newer = blocks.data
        async with opened(tmp_path) as (blocks, entries):
            assert len(entries) == 3
            blocks.data = newer
            assert await blocks.load([each.block for each in facts]) == blocks.expected([each.block for each in facts])

    asyncio.run(scenario())


def test_blocks_that_are_none_are_not_kept(tmp_path: Path) -> None:
    """Of a group that there is not, or with a key of another length: the others of the job are kept."""

    async def scenario() -> None:
        (good,) = prefix(1, 1)
        odd = [BlockFacts((0, b"short")), BlockFacts((7, b"k" * 16)), BlockFacts((0, b"k" * 16), b"parent")]
        async with opened(tmp_path) as (blocks, _):
            moves = tuple((facts, 0, 1) for facts in [*odd, good])
            places = await blocks.tier.save(SaveTo(1, DISK, moves))
            assert places[:3] == [NO_PLACE] * 3 and places[3] != NO_PLACE

    asyncio.run(scenario())


def test_blocks_of_a_prefix_lie_side_by_side_and_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where several prefixes grow in turns: each goes on where it ended."""
    calls: list[int] = []
    preadv = os.preadv

    def counting(file: int, views: list[memoryview], offset: int) -> int:
        calls.append(sum(map(len, views)))
        return preadv(file, views, offset)

    async def scenario() -> None:
        prefixes = [prefix(seed, 64, 1) for seed in range(3)]
        async with opened(tmp_path, 64 << 20) as (blocks, _):
            for at in range(0, 64, 4):
                for facts in prefixes:
                    await blocks.save(facts[at : at + 4])
            for facts in prefixes:
                places = [blocks.places[each.block] for each in facts]
                assert places == list(range(places[0], places[0] + 64))
            monkeypatch.setattr(os, "preadv", counting)
            wanted = [each.block for each in prefixes[1]]
            random.Random(0).shuffle(wanted)
            assert await blocks.load(wanted) == blocks.expected(wanted)
            assert calls == [64 * SLOT_BYTES]

    asyncio.run(scenario())


def test_loads_are_cut_into_large_pieces() -> None:
    """Of four MiB each, where so many blocks lie side by side."""
    space = DiskSpace(Path("nowhere"), MODEL, (64 << 10,), 1 << 30, EntryCodec())
    head = Head(MODEL, (64 << 10,), 64 << 10, 1024, 0, "00" * 16)
    space.extents[0] = Extent(Path("nowhere"), head, -1, True)
    reader = DiskReader(space, DiskCounts(), RateLimitedWarnings("nowhere"), DiskSlots((64 << 10,), memoryview, None))
    for num_blocks, sizes in ((8, [8]), (64, [64]), (160, [64, 64, 32]), (600, [64] * 9 + [24])):
        found = [(place, place) for place in range(num_blocks)]
        assert [len(piece.nths) for piece in reader.pieces(found)] == sizes
    gaps = [(place, place) for place in range(0, 40, 2)]
    assert [piece.first for piece in reader.pieces(gaps)] == list(range(0, 40, 2))


@pytest.mark.parametrize("seed", range(6))
def test_the_disk_takes_no_more_than_it_may(tmp_path: Path, seed: int) -> None:
    """Blocks of three sizes come and go at random, and what the file system counts stays within the bound. Room that
    one size has left is used by another, as long as all blocks together are within the capacity."""
    num_bytes = 2 << 20
    capacity = DiskTier(tmp_path, MODEL, SIZES, num_bytes, Host().view).capacity_bytes

    async def scenario() -> None:
        rng = random.Random(seed)
        async with opened(tmp_path, num_bytes) as (blocks, _):
            assert capacity == blocks.tier.capacity_bytes
            assert capacity > 0.5 * num_bytes  # the smallest block fills 5000 of 8192 bytes
            held: list[BlockFacts] = []
            for turn in range(60):
                group = rng.choice([turn // 20, rng.randrange(3)])
                new = prefix(1000 * seed + turn, rng.randrange(1, 24), group)
                while held and sum(SIZES[each.block[0]] for each in held + new) > capacity:
                    at = rng.randrange(len(held))
                    await blocks.drop([each.block for each in held[at : at + 8]])
                    del held[at : at + 8]
                assert NO_PLACE not in await blocks.save(new), turn
                held += new
                assert blocks_bytes(tmp_path) <= num_bytes
                assert blocks_bytes(tmp_path) <= blocks.tier.stat()["taken_bytes"]
            for at in range(0, len(held), 32):
                wanted = [each.block for each in held[at : at + 32]]
                assert await blocks.load(wanted) == blocks.expected(wanted)
            places, data = blocks.places, blocks.data
        async with opened(tmp_path, num_bytes) as (blocks, entries):
            assert {entry.facts.block: entry.place for entry in entries} == places
            assert blocks_bytes(tmp_path) <= blocks.tier.stat()["taken_bytes"] <= num_bytes
            wanted = [entry.facts.block for entry in entries[-32:]]
            assert await blocks.load(wanted) == [data[block] for block in wanted]
            left = capacity - sum(SIZES[entry.facts.block[0]] for entry in entries)
            for turn in range(left // SIZES[1] // 8):
                assert NO_PLACE not in await blocks.save(prefix(turn + 10**6, 8, 1))
            assert blocks_bytes(tmp_path) <= num_bytes

    asyncio.run(scenario())


def test_what_is_beyond_the_room_is_refused_and_kept_blocks_stay(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, 1 << 20) as (blocks, _):
            runs = [prefix(seed, 40, 1) for seed in range(5)]
            places = [await blocks.save(run) for run in runs]
            assert NO_PLACE not in places[0] and set(places[4]) == {NO_PLACE}
            assert blocks_bytes(tmp_path) <= 1 << 20
            assert blocks.tier.counts.num_refused == sum(run.count(NO_PLACE) for run in places)
            wanted = [each.block for each in runs[0]]
            assert await blocks.load(wanted) == [data_of(block) for block in wanted]

    asyncio.run(scenario())


def test_a_smaller_bound_is_kept_from_the_start(tmp_path: Path) -> None:
    """The oldest extents go; what stays is right."""

    async def scenario() -> None:
        async with opened(tmp_path, 16 << 20) as (blocks, _):
            for seed in range(12):
                await blocks.save(prefix(seed, 80, 1))
            data = blocks.data
            newest = [each.block for each in prefix(11, 80, 1)]
        async with opened(tmp_path, 4 << 20) as (blocks, entries):
            assert blocks_bytes(tmp_path) <= 4 << 20
            assert 100 < len(entries) < 330
            kept = {entry.facts.block for entry in entries}
            assert set(newest) <= kept
            assert await blocks.load(newest) == [data[block] for block in newest]
            assert NO_PLACE in await blocks.save(prefix(99, 90, 1)) or blocks_bytes(tmp_path) <= 4 << 20

    asyncio.run(scenario())


def test_room_that_was_reserved_and_never_written_is_given_back(tmp_path: Path) -> None:
    """As a process leaves it that was killed in between. What was written, and is free, is used again."""

    async def scenario() -> None:
        async with opened(tmp_path) as (blocks, _):
            await blocks.save(prefix(1, 9, 1))
            await blocks.drop([each.block for each in prefix(1, 9, 1)[3:6]])
        (path,) = tmp_path.glob("*.blocks")
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), path.stat().st_size - 20 * SLOT_BYTES, 20 * SLOT_BYTES)
        before = blocks_bytes(tmp_path)
        async with opened(tmp_path) as (blocks, entries):
            assert len(entries) == 6
            assert blocks_bytes(tmp_path) <= before - 19 * SLOT_BYTES
            (extent,) = blocks.tier._space.extents.values()
            assert blocks.tier.stat()["taken_bytes"] == extent.head.data_offset + 9 * SLOT_BYTES

    asyncio.run(scenario())


def test_the_file_system_keeps_what_it_is_to_have_free(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is written then; it is told of once, and reading goes on."""

    async def scenario() -> None:
        async with opened(tmp_path) as (blocks, _):
            await blocks.save(prefix(1, 4))
        async with opened(tmp_path, spare_bytes=1 << 62) as (blocks, _):
            for seed in (2, 3):
                assert await blocks.save(prefix(seed, 4)) == [NO_PLACE] * 4
            assert None not in await blocks.load([each.block for each in prefix(1, 4)])
            assert blocks.tier.counts.num_refused == 8
        assert caplog.text.count("nothing more is written (No space left on device)") == 1

    asyncio.run(scenario())


def test_a_full_file_system_takes_blocks_where_others_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have filled it: free slots that have their room are used before new ones are asked for in vain."""

    class Full:
        f_bavail, f_frsize = 0, 4096

    async def scenario() -> None:
        async with opened(tmp_path, spare_bytes=1) as (blocks, _):
            old = prefix(1, 12)
            assert NO_PLACE not in await blocks.save(old)
            monkeypatch.setattr(os, "statvfs", lambda path: Full)
            assert await blocks.save(prefix(2, 3)) == [NO_PLACE] * 3
            await blocks.drop([each.block for each in old[4:9]])
            new = prefix(3, 5)
            assert NO_PLACE not in await blocks.save(new)
            assert await blocks.save(prefix(4, 1)) == [NO_PLACE]
            assert None not in await blocks.load([each.block for each in [*old[:4], *new, *old[9:]]])

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_is_a_block_that_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Later ones are, once the disk does its work again; a slot that was bad is left alone."""

    def failing(file: int, views: list[memoryview], offset: int) -> int:
        raise OSError(number, os.strerror(number))

    async def scenario() -> None:
        async with opened(tmp_path) as (blocks, _):
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwritev", failing)
                for seed in range(3):
                    assert await blocks.save(prefix(seed, 2)) == [NO_PLACE] * 2
            assert blocks.tier.counts.num_failed == 6
            places = await blocks.save(prefix(4, 2))
            assert NO_PLACE not in places
            assert (places[0] == 0) == (number == errno.ENOSPC)
            assert None not in await blocks.load([each.block for each in prefix(4, 2)])
        async with opened(tmp_path) as (_, entries):
            assert [entry.facts for entry in entries] == prefix(4, 2)
        assert caplog.text.count(os.strerror(number)) == 1

    asyncio.run(scenario())


def test_what_cannot_be_read_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing else is: other blocks of the same job are loaded."""

    async def scenario() -> None:
        async with opened(tmp_path, 64 << 20) as (blocks, _):
            good, bad = prefix(1, 4, 1), prefix(2, 4, 2)
            await blocks.save(good + bad)
            preadv = os.preadv

            def failing(file: int, views: list[memoryview], offset: int) -> int:
                if len(views[0]) == padded(SIZES[2]):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return preadv(file, views, offset)

            monkeypatch.setattr(os, "preadv", failing)
            found = await blocks.load([each.block for each in good + bad])
            assert found == [*blocks.expected([each.block for each in good]), *[None] * 4]
            assert (blocks.tier.counts.num_failed, blocks.num_caught) == (4, 0)
        assert caplog.text.count("Input/output error") == 1

    asyncio.run(scenario())


def test_reads_that_give_less_than_was_asked_for_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, pwritev = os.preadv, os.pwritev

    def short(call: Callable[[int, list[memoryview], int], int]) -> Callable[[int, list[memoryview], int], int]:
        return lambda file, views, offset: call(file, [views[0][:PAGE_BYTES]], offset)

    async def scenario() -> None:
        monkeypatch.setattr(os, "preadv", short(preadv))
        monkeypatch.setattr(os, "pwritev", short(pwritev))
        wanted = [each.block for each in prefix(1, 5, 1)]
        async with opened(tmp_path) as (blocks, _):
            await blocks.save(prefix(1, 5, 1))
            assert await blocks.load(wanted) == blocks.expected(wanted)

    asyncio.run(scenario())


def test_a_disk_that_hangs_is_asked_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for it waits on, for their memory may still be written to; all others get misses at once."""
    going_on, has_begun = threading.Event(), threading.Event()
    preadv = os.preadv

    def hanging(file: int, views: list[memoryview], offset: int) -> int:
        has_begun.set()
        going_on.wait()
        return preadv(file, views, offset)

    async def scenario() -> None:
        wanted = [each.block for each in prefix(1, 3)]
        async with opened(tmp_path) as (blocks, _):
            await blocks.save(prefix(1, 3))
            monkeypatch.setattr(os, "preadv", hanging)
            first = asyncio.create_task(blocks.load(wanted))
            await asyncio.to_thread(has_begun.wait)
            monkeypatch.setattr(disk, "_STUCK_S", -1.0)
            assert await blocks.load(wanted) == [None] * 3
            assert await blocks.save(prefix(2, 2)) == [NO_PLACE] * 2
            first.cancel()
            await asyncio.sleep(0)
            assert not first.done()
            going_on.set()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert await blocks.load(wanted) == blocks.expected(wanted)

    asyncio.run(scenario())


def test_a_slot_that_is_used_anew_while_it_is_read_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the same block is saved there again: what was read may be torn."""
    going_on, has_begun = threading.Event(), threading.Event()
    preadv = os.preadv

    def late(file: int, views: list[memoryview], offset: int) -> int:
        has_begun.set()
        going_on.wait()
        return preadv(file, views, offset)

    async def scenario() -> None:
        facts = prefix(1, 3)
        wanted = [each.block for each in facts]
        async with opened(tmp_path) as (blocks, _):
            places = await blocks.save(facts)
            monkeypatch.setattr(os, "preadv", late)
            loading = asyncio.create_task(blocks.load(wanted))
            await asyncio.to_thread(has_begun.wait)
            await blocks.drop(wanted)
            assert await blocks.save(facts) == places
            going_on.set()
            assert await loading == [None] * 3 and blocks.num_caught == 0
            assert await blocks.load(wanted) == blocks.expected(wanted)

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["refused", "unaligned", "memory"])
def test_file_systems_that_only_know_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It refuses O_DIRECT, or memory at this place, or is memory itself: slower, and as right."""
    open_ = os.open

    def refusing(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_(path, flags, *args, **kwargs)

    async def scenario(folder: Path) -> None:
        wanted = [each.block for each in prefix(1, 5)]
        async with opened(folder) as (blocks, _):
            if how == "unaligned":
                blocks.host.view = lambda offset, size: memoryview(blocks.host.memory)[offset + 1 : offset + 1 + size]  # type: ignore[method-assign]
                blocks.tier._slots._view = blocks.host.view
                blocks.host.fill = lambda nth, data: Host.fill(blocks.host, nth, b"x" + data)  # type: ignore[method-assign]
                blocks.host.read = lambda nth, size: Host.read(blocks.host, nth, size + 1)[1:]  # type: ignore[method-assign]
            await blocks.save(prefix(1, 5))
            assert await blocks.load(wanted) == blocks.expected(wanted)
        assert caplog.text.count("cannot be read and written past the page cache") == (how == "unaligned")

    if how == "refused":
        monkeypatch.setattr(os, "open", refusing)
    if how != "memory":
        return asyncio.run(scenario(tmp_path))
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm to write to")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        asyncio.run(scenario(Path(folder)))


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of another model gives way once its room is needed; one that is nobody's extent, also by name, never does."""
    notes, link = tmp_path / "notes.txt", tmp_path / "link.blocks"

    async def scenario() -> None:
        async with opened(tmp_path, 2 << 20, "another" * 5) as (blocks, _):
            await blocks.save(prefix(1, 90, 1))
        notes.write_text("mine")
        link.symlink_to(notes)
        (tmp_path / f"{MODEL[:16]}-00000000.blocks.partial").write_bytes(b"cut short")
        before = {path.name for path in tmp_path.glob("*.blocks")}
        async with opened(tmp_path, 2 << 20) as (blocks, entries):
            assert entries == [] and blocks.tier.counts.num_unusable == len(before)
            assert {path.name for path in tmp_path.glob("*.blocks*")} == before
            assert blocks.tier.stat()["other_bytes"] > 1 << 20
            await blocks.save(prefix(2, 8, 1))
            assert before <= {path.name for path in tmp_path.glob("*.blocks")}
            assert NO_PLACE not in await blocks.save(prefix(3, 80, 1)[:80])
            assert blocks_bytes(tmp_path) <= 2 << 20
            assert notes.read_text() == "mine"
        async with opened(tmp_path, 2 << 20, "another" * 5) as (_, entries):
            assert len(entries) < 90
        assert "of another model" in caplog.text

    asyncio.run(scenario())


def test_verify_finds_and_forgets_what_has_changed(tmp_path: Path) -> None:
    async def scenario() -> None:
        facts = prefix(1, 9, 2)
        async with opened(tmp_path) as (blocks, _):
            await blocks.save(facts)
            assert await blocks.tier.verify() == []
            (path,) = tmp_path.glob("*.blocks")
            data = path.read_bytes()
            at = data.index(blocks.data[facts[4].block])
            with path.open("r+b") as file:
                file.seek(at + 77)
                file.write(bytes([data[at + 77] ^ 4]))
            assert await blocks.tier.verify(1e12) == [facts[4].block]
            assert blocks.tier.counts.num_verified == 18
            found = await blocks.load([each.block for each in facts])
            assert [nth for nth, each in enumerate(found) if each is None] == [4]
            assert (blocks.num_caught, blocks.tier.counts.num_damaged) == (0, 1)
        async with opened(tmp_path) as (_, entries):
            assert len(entries) == 8

    asyncio.run(scenario())


def test_the_scrubber_finds_what_nobody_asks_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as (blocks, _):
            await blocks.save(prefix(1, 9, 2))
            data = blocks.data[prefix(1, 9, 2)[8].block]
        (path,) = tmp_path.glob("*.blocks")
        path.write_bytes(path.read_bytes().replace(data, bytes(len(data))))
        async with opened(tmp_path, scrub_bytes_s=1e12) as (blocks, entries), asyncio.timeout(60):
            assert len(entries) == 9
            while not blocks.tier.counts.num_damaged:
                await asyncio.sleep(0.001)
            assert (await blocks.load([entries[8].facts.block])) == [None] and blocks.num_caught == 0

    asyncio.run(scenario())


def test_index_and_tables_take_a_thousandth(tmp_path: Path) -> None:
    """Of blocks as the default model has them: tables on disk, and what is held in memory of each slot."""
    block_bytes = 368_640
    space = DiskSpace(tmp_path, MODEL, (block_bytes,), 10 << 30, EntryCodec())
    ((extent, _, count),) = [run for run, _ in space.take(prefix(1, 4))]
    head, num_slots = extent.head, extent.head.num_slots
    held = (extent.used, extent.backed, extent.keys, extent.groups, extent.sums, extent.seqs)
    assert count == 4 and num_slots > 200
    assert head.data_offset / (num_slots * block_bytes) < 0.0005
    assert sum(map(sys.getsizeof, held)) / (num_slots * block_bytes) < 0.0002
    space.close()

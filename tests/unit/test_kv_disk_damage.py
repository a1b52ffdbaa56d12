"""Whatever becomes of the disk tier's files, a block that is loaded from it is the one that was saved."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kv_disk import MODEL, SIZES, blocks_bytes, data_of, opened, prefix
from tokenmill.core.mac import derive
from tokenmill.core.tiers import NO_PLACE, TierEntry, TierKey
from tokenmill.kv.transfer.checksum import block_sum
from tokenmill.kv.transfer.disk.extent import ENTRY_BYTES, PAGE_BYTES, EntryCodec, Head, padded, read_front

KEY = bytes(range(32))
OTHER_KEY = bytes(range(1, 33))

FIRST = [*prefix(1, 6, 0, "one"), *prefix(2, 5, 1), *prefix(3, 5, 2, "two")]
SECOND = [*prefix(4, 6, 0), *prefix(5, 5, 1, "one"), *prefix(6, 5, 2)]


class Files:
    """The extents of a folder, as bytes; what is `changed` is written back. older: the same folder at an earlier
    time."""

    def __init__(self, folder: Path, older: Path, codec: EntryCodec) -> None:
        self.folder, self.older, self.codec = folder, older, codec
        self.paths = sorted(folder.glob("*.blocks"))
        self.data = {path: bytearray(path.read_bytes()) for path in self.paths}
        self.heads: dict[Path, Head] = {}
        for path in self.paths:
            with path.open("rb") as file:
                self.heads[path] = read_front(file.fileno(), codec)[0]

    def write(self) -> None:
        for path, data in self.data.items():
            path.write_bytes(data)

    def slots(self) -> list[tuple[Path, int]]:
        """Those that hold blocks."""
        return [
            (path, slot)
            for path, head in self.heads.items()
            for slot, _ in self.codec.table(head, bytes(self.data[path][PAGE_BYTES : head.data_offset]))
        ]

    def changed(self) -> list[Path]:
        """Files that were otherwise at the earlier time."""
        pairs = [(path, self.older / path.name) for path in self.paths]
        return [path for path, older in pairs if older.exists() and older.read_bytes() != self.data[path]]

    def entry(self, path: Path, slot: int) -> slice:
        at = PAGE_BYTES + slot * ENTRY_BYTES
        return slice(at, at + ENTRY_BYTES)

    def bytes_of(self, path: Path, slot: int) -> slice:
        """Of a slot, as many as every block there has."""
        head = self.heads[path]
        at = head.data_offset + slot * head.slot_bytes
        return slice(at, at + min(size for size in SIZES if padded(size + head.overhead) == head.slot_bytes))


def flip_head(files: Files, rng: random.Random) -> None:
    files.data[rng.choice(files.paths)][rng.randrange(200)] ^= 1 << rng.randrange(8)


def flip_entry(files: Files, rng: random.Random) -> None:
    path, slot = rng.choice(files.slots())
    files.data[path][files.entry(path, slot).start + rng.randrange(ENTRY_BYTES)] ^= 1 << rng.randrange(8)


def flip_data(files: Files, rng: random.Random) -> None:
    for path, slot in rng.sample(files.slots(), rng.randrange(1, 8)):
        span = files.bytes_of(path, slot)
        files.data[path][rng.randrange(span.start, span.stop)] ^= 1 << rng.randrange(8)


def truncate(files: Files, rng: random.Random) -> None:
    data = files.data[rng.choice(files.paths)]
    del data[rng.randrange(len(data)) :]


def lengthen(files: Files, rng: random.Random) -> None:
    files.data[rng.choice(files.paths)] += rng.randbytes(rng.randrange(1, 9000))


def zero(files: Files, rng: random.Random) -> None:
    """A page or more, as a file system leaves them after a power cut."""
    data = files.data[rng.choice(files.paths)]
    at = rng.randrange(len(data)) // PAGE_BYTES * PAGE_BYTES
    size = min(rng.choice([1, 1, 3, 1000]) * PAGE_BYTES, len(data) - at)
    data[at : at + size] = bytes(size)


def zero_data(files: Files, rng: random.Random) -> None:
    for path, slot in rng.sample(files.slots(), rng.randrange(1, 8)):
        span = files.bytes_of(path, slot)
        files.data[path][span] = bytes(span.stop - span.start)


def scramble(files: Files, rng: random.Random) -> None:
    data = files.data[rng.choice(files.paths)]
    at = rng.randrange(len(data))
    size = min(rng.randrange(1, 20000), len(data) - at)
    data[at : at + size] = rng.randbytes(size)


def swap_data(files: Files, rng: random.Random) -> None:
    """Of two slots, of one file or two."""
    (path, slot), (other, other_slot) = rng.sample(files.slots(), 2)
    ours, theirs = files.bytes_of(path, slot), files.bytes_of(other, other_slot)
    size = min(ours.stop - ours.start, theirs.stop - theirs.start)
    ours, theirs = slice(ours.start, ours.start + size), slice(theirs.start, theirs.start + size)
    files.data[path][ours], files.data[other][theirs] = files.data[other][theirs], files.data[path][ours]


def swap_entries(files: Files, rng: random.Random) -> None:
    (path, slot), (other, other_slot) = rng.sample(files.slots(), 2)
    ours, theirs = files.entry(path, slot), files.entry(other, other_slot)
    files.data[path][ours], files.data[other][theirs] = files.data[other][theirs], files.data[path][ours]


def copy_entry(files: Files, rng: random.Random) -> None:
    (path, slot), (other, other_slot) = rng.sample(files.slots(), 2)
    files.data[path][files.entry(path, slot)] = files.data[other][files.entry(other, other_slot)]


def swap_files(files: Files, rng: random.Random) -> None:
    path, other = rng.sample(files.paths, 2)
    files.data[path], files.data[other] = files.data[other], files.data[path]


def swap_tables(files: Files, rng: random.Random) -> None:
    path, other = rng.sample(files.paths, 2)
    size = min(files.heads[path].data_offset, files.heads[other].data_offset)
    table = slice(PAGE_BYTES, size)
    files.data[path][table], files.data[other][table] = files.data[other][table], files.data[path][table]


def stale_file(files: Files, rng: random.Random) -> None:
    path = rng.choice(files.changed())
    files.data[path] = bytearray((files.older / path.name).read_bytes())


def stale_table(files: Files, rng: random.Random) -> None:
    """Entries of before, with the bytes that are in their slots now."""
    path = rng.choice(files.changed())
    table = slice(PAGE_BYTES, files.heads[path].data_offset)
    files.data[path][table] = (files.older / path.name).read_bytes()[table]


def stale_data(files: Files, rng: random.Random) -> None:
    path = rng.choice(files.changed())
    at = files.heads[path].data_offset
    files.data[path][at:] = (files.older / path.name).read_bytes()[at:]


DAMAGES: list[Callable[[Files, random.Random], None]] = [
    flip_head,
    flip_entry,
    flip_data,
    truncate,
    lengthen,
    zero,
    zero_data,
    scramble,
    swap_data,
    swap_entries,
    copy_entry,
    swap_files,
    swap_tables,
    stale_file,
    stale_table,
    stale_data,
]
NUM_CASES = 63
"""Of each: 1,008 together."""


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder in memory, where there is one: a thousand cases of many small files."""
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def sound(memory: Path) -> Path:
    """Folders of some extents, plain and sealed, and as they were when half of the blocks were other ones."""
    root = memory / "sound"
    root.mkdir()

    async def scenario(folder: Path, key: bytes | None) -> None:
        async with opened(folder, 4 << 20, key=key) as (blocks, _):
            await blocks.save(FIRST)
            await blocks.save(prefix(9, 16, 1))
        shutil.copytree(folder, folder.with_name(f"{folder.name}-older"))
        async with opened(folder, 4 << 20, key=key) as (blocks, entries):
            await blocks.drop([entry.facts.block for entry in entries[16:]])
            await blocks.save(SECOND)

    for name, key in (("plain", None), ("sealed", KEY)):
        asyncio.run(scenario(root / name, key))
    return root


@pytest.mark.sampled(1 / 4)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_no_damage_is_ever_served(sound: Path, memory: Path, damage: Callable[[Files, random.Random], None]) -> None:
    """Blocks whose files were cut short, changed, swapped or put back to an earlier state are missing, or known to be
    wrong by their checksums. The tier opens all the same, keeps the rest, and saves what was lost anew."""
    all_facts = {facts.block: facts for facts in [*FIRST, *SECOND, *prefix(9, 16, 1)]}
    num_served = num_detected = 0

    async def scenario(folder: Path, key: bytes | None) -> None:
        nonlocal num_served, num_detected
        async with opened(folder, 4 << 20, key=key) as (blocks, entries):
            for entry in entries:
                assert entry.facts == all_facts[entry.facts.block]
            wanted = [entry.facts.block for entry in entries]
            found = dict(zip(wanted, await blocks.load(wanted), strict=True))
            for block, data in found.items():
                assert data in (None, data_of(block)), damage
                assert data is None or entry_sum(entries, block) == block_sum(block, data)
            ours = {facts.block for facts in FIRST + SECOND}
            num_detected += any(found.get(block) is None for block in ours) or blocks.tier.counts.num_damaged > 0
            num_served += sum(data is not None for data in found.values())
            lost = [all_facts[block] for block in sorted(ours) if found.get(block) is None]
            await blocks.drop([facts.block for facts in lost if facts.block in found])
            assert NO_PLACE not in await blocks.save(lost) if lost else True
            again = [facts.block for facts in FIRST + SECOND]
            assert await blocks.load(again) == [data_of(block) for block in again]
            assert blocks_bytes(folder) <= 4 << 20

    for case in range(NUM_CASES):
        rng = random.Random(f"{damage.__name__} {case}")
        name, key = rng.choice([("plain", None), ("sealed", KEY)])
        folder = memory / str(case)
        shutil.copytree(sound / name, folder)
        codec = codec_of(key)
        files = Files(folder, sound / f"{name}-older", codec)
        damage(files, rng)
        files.write()
        asyncio.run(scenario(folder, key))
        shutil.rmtree(folder)
    assert num_served > 0
    if damage not in (zero, scramble):  # which may hit what holds nothing
        assert num_detected == NUM_CASES


def test_a_folder_with_a_key_tells_nothing(tmp_path: Path) -> None:
    """Neither the bytes of blocks nor their keys or owners are in its files; without one they are."""

    async def scenario(folder: Path, key: bytes | None) -> bytes:
        facts = prefix(1, 4, 2, "a tenant's name")
        async with opened(folder, key=key) as (blocks, _):
            await blocks.save(facts)
            wanted = [each.block for each in facts]
            assert await blocks.load(wanted) == blocks.expected(wanted)
        async with opened(folder, key=key) as (blocks, entries):
            assert [entry.facts for entry in entries] == facts
            assert await blocks.load(wanted) == [data_of(block) for block in wanted]
            assert await blocks.tier.verify() == []
        return b"".join(path.read_bytes() for path in folder.glob("*.blocks"))

    known = [b"a tenant's name", prefix(1, 4, 2)[1].block[1], data_of(prefix(1, 4, 2)[1].block)[100:116]]
    plain = asyncio.run(scenario(tmp_path / "plain", None))
    sealed = asyncio.run(scenario(tmp_path / "sealed", KEY))
    assert all(each in plain for each in known)
    assert not any(each in sealed for each in known)


@pytest.mark.parametrize(
    ("written", "opened_with"), [(KEY, OTHER_KEY), (KEY, None), (None, KEY)], ids=["other", "none", "first"]
)
def test_what_another_key_has_sealed_is_not_taken(
    tmp_path: Path, written: bytes | None, opened_with: bytes | None
) -> None:
    """Nor does anything that is not sealed pass where there is a key. The files wait for their key."""

    async def scenario() -> None:
        async with opened(tmp_path, key=written) as (blocks, _):
            await blocks.save(FIRST)
        async with opened(tmp_path, key=opened_with) as (blocks, entries):
            assert entries == [] and blocks.tier.counts.num_unusable == 3
            await blocks.save(SECOND)
        async with opened(tmp_path, key=written) as (_, entries):
            assert [entry.facts for entry in entries] == sorted(FIRST, key=FIRST.index)

    asyncio.run(scenario())


def test_sealed_bytes_that_were_changed_are_a_miss_of_the_tier(sound: Path, tmp_path: Path) -> None:
    """The tag tells, before any checksum."""

    async def scenario() -> None:
        async with opened(tmp_path / "kv", 4 << 20, key=KEY) as (blocks, entries):
            wanted = [entry.facts.block for entry in entries]
            assert None in await blocks.load(wanted)
            assert blocks.num_caught == 0

    shutil.copytree(sound / "sealed", tmp_path / "kv")
    files = Files(tmp_path / "kv", tmp_path, codec_of(KEY))
    flip_data(files, random.Random(0))
    files.write()
    asyncio.run(scenario())


def codec_of(key: bytes | None) -> EntryCodec:
    return EntryCodec(b"" if key is None else derive(key, b"disk entries", MODEL.encode()))


def entry_sum(entries: Sequence[TierEntry], block: TierKey) -> int:
    (found,) = [entry.sum for entry in entries if entry.facts.block == block]
    return found

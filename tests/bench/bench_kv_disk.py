"""How fast KV blocks come from the disk tier, beside what the disk gives to anybody; and how long opening it takes.

    python tests/bench/bench_kv_disk.py [--folder DIR] [--gib 2] [--rounds 8] [--tokens 1008] [--open-gib 10] [--sealed]

Prefixes of so many tokens in blocks as the default model has them (16 tokens, 368,640 bytes) are written through the
tier until there are so many GiB, then loaded in a random order, one at a time, in jobs of 8 MiB that overlap, as a KV
store gives them. In turns with that, fio (or, without it, the like of it here) reads a file of the same size beside
it past the page cache: 1 MiB at random places, four at a time. For opening, extents are made whose entries are whole
and whose slots were never written, and the page cache is told to forget them first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tokenmill.core.tiers import DISK, NO_PLACE, BlockFacts, LoadFrom, SaveTo, TierKey
from tokenmill.kv.transfer.checksum import block_sum
from tokenmill.kv.transfer.disk.extent import ENTRY_BYTES, PAGE_BYTES, Entry
from tokenmill.kv.transfer.disk.io import write_entries
from tokenmill.kv.transfer.disk.space import DiskSpace
from tokenmill.kv.transfer.disk.tier import DiskTier

MODEL = "0123456789abcdef0123456789abcdef"
BLOCK_BYTES, BLOCK_TOKENS = 368_640, 16
JOB_BLOCKS = (8 << 20) // BLOCK_BYTES
READ_BYTES, READERS = 1 << 20, 4


def prefix(rng: random.Random, num_blocks: int) -> list[BlockFacts]:
    keys = [rng.randbytes(16) for _ in range(num_blocks)]
    return [BlockFacts((0, key), keys[depth - 1] if depth else b"", depth) for depth, key in enumerate(keys)]


class Probe:
    """The disk without us: a file of its own."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path, self.num_bytes = path, num_bytes // READ_BYTES * READ_BYTES
        data = random.Random(0).randbytes(READ_BYTES)
        with path.open("wb") as file:
            for _ in range(self.num_bytes // READ_BYTES):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.name = "fio" if shutil.which("fio") else "threads of this program"

    def bytes_s(self, seconds: float) -> float:
        return self._fio(seconds) if self.name == "fio" else self._threads(seconds)

    def _fio(self, seconds: float) -> float:
        args = [
            "fio", "--name=probe", f"--filename={self.path}", f"--size={self.num_bytes}", "--rw=randread", "--direct=1",
            f"--bs={READ_BYTES}", f"--numjobs={READERS}", "--ioengine=psync", "--group_reporting", "--time_based",
            f"--runtime={seconds}", "--output-format=json", "--norandommap", "--thread",
        ]  # fmt: skip
        done = subprocess.run(args, capture_output=True, text=True, check=True)
        told = json.loads(done.stdout[done.stdout.index("{") :])
        return float(told["jobs"][0]["read"]["bw_bytes"])

    def _threads(self, seconds: float) -> float:
        until_s = time.perf_counter() + seconds
        read_bytes = [0] * READERS

        def work(nth: int) -> None:
            rng, memory = random.Random(nth), mmap.mmap(-1, READ_BYTES)
            file = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
            while time.perf_counter() < until_s:
                at = rng.randrange(self.num_bytes // READ_BYTES) * READ_BYTES
                read_bytes[nth] += os.preadv(file, [memory], at)
            os.close(file)

        began_s = time.perf_counter()
        threads = [threading.Thread(target=work, args=(nth,)) for nth in range(READERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(read_bytes) / (time.perf_counter() - began_s)


async def load(tier: DiskTier, blocks: list[tuple[TierKey, int]]) -> list[int]:
    """As a KV store does; the checksums."""
    moves = [(block, place, nth * BLOCK_BYTES) for nth, (block, place) in enumerate(blocks)]
    jobs = [LoadFrom(0, DISK, tuple(moves[at : at + JOB_BLOCKS])) for at in range(0, len(moves), JOB_BLOCKS)]
    return [each for sums in await asyncio.gather(*map(tier.load, jobs)) for each in sums]


async def measure(folder: Path, num_bytes: int, rounds: int, num_blocks: int, key: bytes | None) -> None:
    memory = mmap.mmap(-1, num_blocks * BLOCK_BYTES)
    whole = memoryview(memory)
    rng = random.Random(0)
    whole[:] = rng.randbytes(len(whole))
    tier = DiskTier(
        folder / "kv", MODEL, (BLOCK_BYTES,), num_bytes + (256 << 20), lambda at, size: whole[at : at + size], key
    )
    await tier.open()
    prefixes: list[list[tuple[TierKey, int]]] = []
    began_s = time.perf_counter()
    for _ in range(num_bytes // (num_blocks * BLOCK_BYTES)):
        facts = prefix(rng, num_blocks)
        moves = []
        for nth, each in enumerate(facts):
            at = nth * BLOCK_BYTES
            whole[at : at + 16] = each.block[1]
            moves.append((each, at, block_sum(each.block, whole[at : at + BLOCK_BYTES])))
        places = await tier.save(SaveTo(0, DISK, tuple(moves)))
        assert NO_PLACE not in places
        prefixes.append([(each.block, place) for each, place in zip(facts, places, strict=True)])
    took_s = time.perf_counter() - began_s
    print(f"written {tier.counts.saved_bytes / 1e9:.2f} GB at {tier.counts.saved_bytes / took_s / 1e9:.2f} GB/s")
    probe = Probe(folder / "probe", num_bytes)
    of_disk, of_tier, ratios, times_s = [], [], [], []
    for _ in range(rounds):
        of_disk.append(probe.bytes_s(2))
        rng.shuffle(prefixes)
        num_read, began_s = 0, time.perf_counter()
        for blocks in prefixes:
            one_s = time.perf_counter()
            sums = await load(tier, blocks)
            times_s.append(time.perf_counter() - one_s)
            num_read += len(blocks) * BLOCK_BYTES
            assert NO_PLACE not in sums
        of_tier.append(num_read / (time.perf_counter() - began_s))
        ratios.append(of_tier[-1] / of_disk[-1])
    for (block, _), sum_, nth in zip(blocks, sums, range(num_blocks), strict=True):
        assert block_sum(block, whole[nth * BLOCK_BYTES : (nth + 1) * BLOCK_BYTES]) == sum_, "wrong bytes were loaded"
    stat = tier.stat()
    await tier.close()
    percentiles = statistics.quantiles(times_s, n=100)
    print(
        f"loads of {num_blocks * BLOCK_TOKENS} tokens ({num_blocks * BLOCK_BYTES / 1e6:.1f} MB): median"
        f" {statistics.median(of_tier) / 1e9:.2f} GB/s ({min(of_tier) / 1e9:.2f} to {max(of_tier) / 1e9:.2f});"
        f" {percentiles[49] * 1e3:.1f} ms p50, {percentiles[98] * 1e3:.1f} ms p99\n"
        f"the disk by {probe.name}: {statistics.median(of_disk) / 1e9:.2f} GB/s ({min(of_disk) / 1e9:.2f} to"
        f" {max(of_disk) / 1e9:.2f})\n"
        f"of the disk's speed: {statistics.median(ratios):.0%} ({min(ratios):.0%} to {max(ratios):.0%}),"
        f" {rounds} rounds in turns\n"
        f"tables: {stat['taken_bytes'] / (stat['num_blocks'] * BLOCK_BYTES) - 1:.3%} more than the blocks"
    )


async def measure_opening(folder: Path, num_bytes: int, rounds: int, key: bytes | None) -> None:
    probe = DiskTier(folder / "kv", MODEL, (BLOCK_BYTES,), num_bytes, lambda at, size: memoryview(b""), key)
    space: DiskSpace = probe._space
    (folder / "kv").mkdir(mode=0o700)
    rng, seq = random.Random(0), 0
    while space.taken_bytes + 64 * BLOCK_BYTES < num_bytes:
        facts = prefix(rng, 64)
        for (extent, first, count), part in space.take(facts):
            packed = b""
            for slot, each in enumerate(part, first):
                seq += 1
                packed += space.codec.pack(extent.head.uid, slot, Entry(each, seq, seq))
            write_entries(extent, PAGE_BYTES + first * ENTRY_BYTES, packed)
            assert count == len(part)
    for extent in space.extents.values():
        os.fsync(extent.fd)
    paths = [extent.path for extent in space.extents.values()]
    space.close()
    times_s = []
    for _ in range(rounds):
        for path in paths:
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
        tier = DiskTier(folder / "kv", MODEL, (BLOCK_BYTES,), num_bytes, lambda at, size: memoryview(b""), key)
        began_s = time.perf_counter()
        entries = await tier.open()
        times_s.append(time.perf_counter() - began_s)
        assert len(entries) == seq
        await tier.close()
    print(
        f"opening {seq} blocks ({seq * BLOCK_BYTES / (1 << 30):.1f} GiB, {len(paths)} extents): median"
        f" {statistics.median(times_s):.3f} s ({min(times_s):.3f} to {max(times_s):.3f})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the file system to be measured")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1008)
    parser.add_argument("--open-gib", type=float, default=10.0)
    parser.add_argument("--sealed", action="store_true")
    args = parser.parse_args()
    key = bytes(range(32)) if args.sealed else None
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        num_bytes = int(args.gib * (1 << 30))
        asyncio.run(measure(Path(folder), num_bytes, args.rounds, args.tokens // BLOCK_TOKENS, key))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        asyncio.run(measure_opening(Path(folder), int(args.open_gib * (1 << 30)), args.rounds, key))
    return 0


if __name__ == "__main__":
    sys.exit(main())

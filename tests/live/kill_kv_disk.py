"""kill -9 of a process that saves and drops KV blocks on disk, again and again: the next one starts clean.

    python tests/live/kill_kv_disk.py [--kills 100] [--seed 0]

A child works on a folder and says what it is about to do and what has ended. After each kill the folder is opened: each
block whose saving had ended is there with the right bytes, none whose dropping had ended is, nothing else is served,
and the files take no more than they may. Every other folder is sealed with a key.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kv_disk import blocks_bytes, data_of, opened, prefix
from tokenmill.core.tiers import NO_PLACE, TierKey

NUM_BYTES = 6 << 20
LONGEST_S = 0.4
KEYS = (None, bytes(range(32)))


async def work(folder: Path, seed: int, key: bytes | None) -> None:
    """The child: until it is killed."""
    rng = random.Random(seed)
    async with opened(folder, NUM_BYTES, key=key) as (blocks, entries):
        held = [entry.facts.block for entry in entries]
        say("open", held)
        for turn in range(1 << 30):
            if len(held) > 300 or rng.random() < 0.2:
                rng.shuffle(held)
                gone = [held.pop() for _ in range(min(len(held), rng.randrange(1, 150)))]
                say("dropping", gone)
                await blocks.drop(gone)
                say("dropped", gone)
            facts = prefix(rng.getrandbits(64) + turn, rng.randrange(1, 90), rng.randrange(3))
            say("saving", [each.block for each in facts])
            places = await blocks.save(facts)
            saved = [each.block for each, place in zip(facts, places, strict=True) if place != NO_PLACE]
            say("saved", saved)
            held += saved


def say(what: str, blocks: list[TierKey]) -> None:
    """In one write, for what was said before a kill is whole."""
    words = [what, *(f"{group}:{key.hex()}" for group, key in blocks)]
    os.write(1, f"{' '.join(words)}\n".encode())


def heard(said: bytes, must: set[TierKey], may: set[TierKey]) -> tuple[set[TierKey], set[TierKey]]:
    """What must be there and what may be, after what a child has said."""
    for line in said.decode().splitlines():
        what, *words = line.split(" ")
        blocks = {(int(word.partition(":")[0]), bytes.fromhex(word.partition(":")[2])) for word in words}
        if what == "saving":
            may |= blocks
        elif what == "saved":
            must |= blocks
        elif what == "dropping":
            must -= blocks
        elif what == "dropped":
            may -= blocks
    return must, may


async def check(
    folder: Path, key: bytes | None, must: set[TierKey], may: set[TierKey]
) -> tuple[set[TierKey], str, float]:
    """What is there, what is wrong, and how long opening took."""
    began_s = time.perf_counter()
    async with opened(folder, NUM_BYTES, key=key) as (blocks, entries):
        took_s = time.perf_counter() - began_s
        there = {entry.facts.block for entry in entries}
        if must - there:
            return there, f"{len(must - there)} blocks are lost whose saving had ended", took_s
        if there - may:
            return there, f"{len(there - may)} blocks are there that were dropped, or never saved", took_s
        if blocks.tier.counts.num_unusable:
            return there, "an extent cannot be used", took_s
        wanted = sorted(there)
        for at in range(0, len(wanted), 90):
            part = wanted[at : at + 90]
            for block, data in zip(part, await blocks.load(part), strict=True):
                if data is None and block in must:
                    return there, "a block is lost whose saving had ended", took_s
                if data not in (None, data_of(block)):
                    return there, "a block is served that is not what was saved", took_s
        if blocks_bytes(folder) > NUM_BYTES:
            return there, f"{blocks_bytes(folder)} bytes are taken", took_s
        return there, "", took_s


def run(root: Path, num_kills: int, seed: int) -> list[str]:
    """What is wrong."""
    rng = random.Random(seed)
    wrong: list[str] = []
    states: dict[bytes | None, tuple[set[TierKey], set[TierKey]]] = {key: (set(), set()) for key in KEYS}
    longest_s, num_saved = 0.0, 0
    for kill in range(num_kills):
        key = KEYS[kill % 2]
        folder = root / ("plain" if key is None else "sealed")
        command = [sys.executable, __file__, "--child", str(folder), "--seed", str(rng.getrandbits(32))]
        child = subprocess.Popen([*command, *(["--sealed"] if key else [])], stdout=subprocess.PIPE)
        assert child.stdout is not None
        first = child.stdout.readline()
        time.sleep(rng.random() * LONGEST_S)
        child.kill()
        said = first + child.stdout.read()
        child.stdout.close()
        if child.wait() != -9 or not first.startswith(b"open"):
            return [*wrong, f"kill {kill}: the child ended by itself"]
        must, may = heard(said, *states[key])
        num_saved += said.count(b"saved")
        there, error, took_s = asyncio.run(check(folder, key, must, may))
        longest_s = max(longest_s, took_s)
        states[key] = (must & there, set(there))
        if error:
            wrong.append(f"kill {kill}: {error}")
    print(f"{num_kills} kills, {num_saved} saves that had ended, opened in {longest_s:.3f} s at most")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sealed", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        asyncio.run(work(args.child, args.seed, KEYS[args.sealed]))
    with tempfile.TemporaryDirectory() as folder:
        wrong = run(Path(folder), args.kills, args.seed)
    print("\n".join(wrong) or "nothing is wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

"""A remote tier against a Mooncake Store: what is saved comes back, what is spoilt does not; a dead master is a miss.

    unshare -n python tests/live/mooncake_kv.py

To be run in a network namespace of its own: Mooncake listens on all addresses of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mooncake

from remote_stores import BLOCK_BYTES, KEY, Host, block, look, sum_of
from tokenmill.core.tiers import NO_PLACE, DropFrom, TierKey
from tokenmill.kv.transfer.remote import RemoteTier
from tokenmill.kv.transfer.remote.sealed import Limits
from tokenmill.kv.transfer.remote.tier import Names, open_backend

MODEL = "model A"
BLOCKS = [block(number) for number in range(20)]
URL = "mooncake://127.0.0.1:50051"
LENDER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", "127.0.0.1:50051") == 0
print("lends", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def cluster() -> Iterator[subprocess.Popen[bytes]]:
    """A master, and a process that lends memory."""
    program = Path(mooncake.__file__).with_name("mooncake_master")
    quiet = {**os.environ, "GLOG_minloglevel": "2"}
    with contextlib.ExitStack() as stack:
        command = [str(program), "--rpc_port=50051", "--default_kv_lease_ttl=100"]
        master = subprocess.Popen(command, env=quiet, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(master.wait)
        stack.callback(master.kill)
        time.sleep(1.0)
        command = [sys.executable, "-c", LENDER]
        lender = subprocess.Popen(
            command, env=quiet, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        stack.callback(lender.wait)
        stack.callback(lender.kill)
        assert lender.stdout is not None
        while b"lends" not in (line := lender.stdout.readline()):
            assert line, "nobody lends memory"
        yield master


async def tier_of(host: Host, model: str = MODEL) -> RemoteTier:
    tier = RemoteTier(URL, model, BLOCK_BYTES, host.view, KEY, Limits(retry_s=0.1))
    await tier.open()
    return tier


async def load(tier: RemoteTier, host: Host, blocks: list[TierKey]) -> list[bool]:
    sums = await tier.load(host.loads(blocks))
    for nth, (wanted, value) in enumerate(zip(blocks, sums, strict=True)):
        assert value == NO_PLACE or (value == sum_of(wanted) and host.has(nth, wanted)), (nth, value)
    return [value != NO_PLACE for value in sums]


async def run(master: subprocess.Popen[bytes]) -> None:
    ours, others = Host(), Host()
    first, second, foreign = await tier_of(ours), await tier_of(others), await tier_of(others, "model B")
    assert not first.stat()["is_down"]
    assert await look(second, BLOCKS) == [False] * 20
    assert list(await first.save(ours.saves(BLOCKS))) == [0] * 20
    assert await look(second, [*BLOCKS, block(99)]) == [True] * 20 + [False]
    assert await load(second, others, [*BLOCKS, block(99)]) == [True] * 20 + [False]
    assert await look(foreign, BLOCKS) == [False] * 20
    print("saved, found and loaded")

    backend, _ = open_backend(URL)
    await asyncio.to_thread(backend.check, 5.0)
    names, value = Names(KEY, MODEL), bytearray(BLOCK_BYTES[0] + 64)
    spoilt = [(names.of(BLOCKS[0], 1), bytes(value)), (names.of(BLOCKS[2], 1), bytes(value[:100]))]
    assert await asyncio.to_thread(backend.put, spoilt, 5.0) == [True, True]
    assert await load(second, others, BLOCKS) == [nth not in (0, 2) for nth in range(20)]
    assert second.stat()["blocks_foreign"] == 1 and second.stat()["blocks_short"] == 1
    assert await look(first, BLOCKS[:4]) == [False, True, False, True]
    assert list(await first.save(ours.saves(BLOCKS))) == [0] * 20
    assert await load(second, others, BLOCKS) == [True] * 20
    await first.drop(DropFrom(1, "remote", ((BLOCKS[5], 0),)))
    assert await look(second, BLOCKS[4:7]) == [True, False, True]
    print("what was spoilt is missed and replaced")

    assert await first.fence() == 2
    assert await look(first, BLOCKS) == [False] * 20
    print("fenced")

    many = [block(2 * number) for number in range(60)]
    roomy, kept = Host(), 0
    full = await tier_of(roomy, "many")
    for _ in range(200):
        places = await full.save(roomy.saves(many[:40]))
        kept = sum(place != NO_PLACE for place in places)
    assert not full.stat()["is_down"] and kept
    print("full")

    master.kill()
    while not second.stat()["is_down"]:
        assert await look(second, BLOCKS) == [False] * 20
    assert await load(second, others, BLOCKS) == [False] * 20
    print("a dead master is a miss")
    for tier in (first, second, foreign, full):
        await tier.close()


def main() -> int:
    with cluster() as master:
        asyncio.run(run(master))
    print("done", flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())

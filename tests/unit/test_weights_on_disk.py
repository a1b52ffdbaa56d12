"""Layers' weights that are kept on disk: the same logits at any budget, and files that are not what they should be."""

from __future__ import annotations

import itertools
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tiny import tiny_checkpoint
from tiny_moe import moe_checkpoint, moe_config, read_tiny_moe
from tokenmill.core.errors import ConfigError
from tokenmill.core.experts import WeightReads
from tokenmill.models.loader import load_model
from tokenmill.ops.api import Program, Routing, StepBatch, StepLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.library import TILE_ISAS
from tokenmill.ops.native.offload import lay_out, least_bytes
from tokenmill.ops.native.packed_file import _VERSION, PAGE, NotUsable, read_index
from tokenmill.ops.reference import ReferenceOps
from tokenmill.ops.weights import DiskWeights

pytestmark = pytest.mark.skipif(available() is not None, reason=f"no native kernels: {available()}")

KEY = "k" * 64
TOKENS = np.arange(3, 8, dtype=np.int32)


class Running(NamedTuple):
    ops: NativeOps
    program: Program


@contextmanager
def running(
    path: Path | None, weight_bytes: int = 0, key: str = KEY, quantization: str | None = None
) -> Iterator[Running]:
    """A tiny model's program, with the weights of its layers on disk where there is a path."""
    ops = NativeOps(2)
    checkpoint = tiny_checkpoint(num_layers=5)
    if path is None:
        model = load_model(checkpoint, ops, quantization=quantization)
    else:
        with ops.on_disk(DiskWeights(path, key, weight_bytes=weight_bytes)):
            model = load_model(checkpoint, ops, quantization=quantization)
    pool = ops.new_pool(model.kv_group, 4)
    try:
        limits = StepLimits(8, 1, 4, 1)
        yield Running(ops, ops.compile(lambda recorder, batch: model.forward(recorder, pool.kv, batch), limits))
    finally:
        ops.close()


def logits(running: Running, num_steps: int = 3) -> np.ndarray:
    """Of the last of several steps."""
    count = len(TOKENS)
    where = np.arange(count, dtype=np.int32)
    ends, table = np.array([0, count], np.int32), np.zeros((1, 1), np.int32)
    batch = StepBatch(TOKENS, where, ends, ends[1:], table, np.array([count - 1], np.int32))
    return [running.program(batch).copy() for _ in range(num_steps)][-1]


@pytest.fixture(scope="module")
def expected() -> dict[str | None, np.ndarray]:
    found = {}
    for quantization in (None, "q8_0"):
        with running(None, quantization=quantization) as program:
            found[quantization] = logits(program)
    return found


def sizes_in(path: Path) -> list[int]:
    return [weight.extents[0].num_bytes for weight in read_index(path, KEY, _sum)]


def _sum(data: np.ndarray) -> int:
    return int(NativeOps(1)._library.tm_range_sum(data.ctypes.data, data.size))


@pytest.mark.parametrize("quantization", [None, "q8_0"])
def test_the_same_logits_at_any_budget(
    tmp_path: Path, expected: dict[str | None, np.ndarray], quantization: str | None
) -> None:
    """From the smallest ring to all of them in memory; the file is made once."""
    path = tmp_path / "weights"
    with running(path, 2**30, quantization=quantization) as program:
        assert np.array_equal(logits(program), expected[quantization])
    made, sizes = path.stat(), sizes_in(path)
    assert len(sizes) == 5 * 4
    least = least_bytes(sizes)
    for budget in (least, least + sizes[0], (least + sum(sizes)) // 2, sum(sizes)):
        with running(path, budget, quantization=quantization) as program:
            assert np.array_equal(logits(program), expected[quantization]), budget
    assert path.stat() == made or path.stat().st_mtime_ns == made.st_mtime_ns
    with pytest.raises(ConfigError, match="--weight-memory must be at least"), running(path, least - 1):
        pass


def test_only_what_leaves_memory_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with running(path, 2**30) as whole:
        logits(whole, 6)
        total = sum(sizes_in(path))
        assert reads_of(whole) == total
        assert whole.ops.disk_memory_bytes == (0, total)
    least = least_bytes(sizes_in(path))
    with running(path, least) as parted:
        logits(parted, 6)
        assert 3 * total < reads_of(parted) <= 7 * total
        assert parted.ops.disk_memory_bytes == (0, least)


def reads_of(running: Running) -> int:
    reads = running.ops.weight_reads()
    assert reads is not None
    return reads.bytes_read


@pytest.mark.parametrize(
    "damage",
    ["cut", "longer", "index", "head", "empty", "key"],
)
def test_a_file_that_is_not_whole_is_packed_anew(
    tmp_path: Path, expected: dict[str | None, np.ndarray], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "weights"
    with running(path, 2**30):
        pass
    whole = path.read_bytes()
    bad = {
        "cut": whole[: len(whole) // 2],
        "longer": whole + b"\0" * 8,
        "index": whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:],
        "head": b"?" + whole[1:],
        "empty": b"",
        "key": whole[:20] + b"z" + whole[21:],
    }[damage]
    path.write_bytes(bad)
    with running(path, 2**30) as program:
        assert np.array_equal(logits(program), expected[None])
    assert path.read_bytes() == whole
    assert "packing weights anew" in caplog.text


def test_a_damaged_weight_fails_the_step_and_the_next_start_packs_anew(
    tmp_path: Path, expected: dict[str | None, np.ndarray]
) -> None:
    path = tmp_path / "weights"
    with running(path, 2**30):
        pass
    with open(path, "r+b") as file:
        file.seek(PAGE + 100)
        byte = file.read(1)[0]
        file.seek(PAGE + 100)
        file.write(bytes([byte ^ 16]))
    with running(path, 2**30) as program:
        with pytest.raises(AssertionError, match="damaged weights at byte 4096"):
            logits(program)
        with pytest.raises(AssertionError, match="damaged"):
            logits(program)
    assert not path.exists()
    with running(path, 2**30) as program:
        assert np.array_equal(logits(program), expected[None])


HOSTILE = [
    b"[[64,[[",
    b"{}",
    b'[[64,[["f32",16,0,4096]],[[4096,-4096,1]]]]',
    b'[[64,[["f32",16,0,4096]],[[4096,1099511627776,1]]]]',
    b'[[64,[["f32",16,0,4096]],[[1000,4096,1]]]]',
    b'[[64,[["f32",16,0,8192]],[[4096,4096,1]]]]',
    b'[[64,[["f99",16,0,4096]],[[4096,4096,1]]]]',
    b'[[64,[["f32",true,0,4096]],[[4096,4096,1]]]]',
    b'[[64,[["f32",16,0,4096]],[[4096,4096,1],[8192,8192,1]]]]',
    b"[" * 100_000,
]


@pytest.mark.parametrize("index", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_index_is_refused(tmp_path: Path, index: bytes) -> None:
    """Its checksums are right."""
    index += b" " * (-len(index) % 8)
    at = 3 * PAGE
    head = struct.pack(
        "<16sI64sQQQQ",
        b"tokenmill packed",
        _VERSION,
        KEY.encode(),
        at,
        len(index),
        _sum(np.frombuffer(index, np.uint8)),
        at + len(index),
    )
    path = tmp_path / "weights"
    path.write_bytes(head.ljust(at, b"\0") + index)
    with pytest.raises(NotUsable, match="malformed"):
        read_index(path, KEY, _sum)


def test_whoever_is_killed_while_packing_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    program = (
        "import sys, os, signal\n"
        "sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path\n"
        "from test_weights_on_disk import running\n"
        "from tokenmill.ops.native.packed_file import Writer\n"
        "Writer.finish = lambda self: os.kill(os.getpid(), signal.SIGKILL)\n"
        "with running(Path(sys.argv[1]), 2**30): pass\n"
    )
    here = Path(__file__).parent
    child = subprocess.run([sys.executable, "-c", program, str(path), str(here), str(here.parent)], timeout=60)
    assert child.returncode < 0
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(".part") and left.stat().st_size > PAGE
    os.utime(left, (0, 0))
    with running(path, 2**30):
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["weights"]


def test_a_layout_keeps_what_fits_and_shares_the_rest() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        sizes = [PAGE * int(rng.integers(1, 40)) for _ in range(int(rng.integers(1, 30)))]
        budget = int(rng.integers(least_bytes(sizes), sum(sizes) + 2 * PAGE))
        places = lay_out(sizes, budget)
        assert all(
            place.offset >= 0 and place.offset + size <= budget for place, size in zip(places, sizes, strict=True)
        )
        kept = sorted((place.offset, size) for place, size in zip(places, sizes, strict=True) if place.stays)
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(kept))
        ring = max(
            (place.offset + size for place, size in zip(places, sizes, strict=True) if not place.stays), default=0
        )
        assert all(offset >= ring for offset, _ in kept)
        assert len(kept) == len(sizes) or sum(sizes) > budget


def test_the_reference_has_no_disk(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--weight-memory needs the native backend"):
        ReferenceOps().on_disk(DiskWeights(tmp_path / "weights", KEY, weight_bytes=1))


@pytest.mark.parametrize(("isa", "quantization"), [(None, "q4_0"), (None, "bf16"), (TILE_ISAS[-1], "q8_0")])
def test_the_same_logits_with_any_room_for_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str | None, quantization: str
) -> None:
    """From one expert at a time, in waves, to all; rows that share experts; with other weights on disk, too."""
    read_tiny_moe(monkeypatch)
    checkpoint = moe_checkpoint(moe_config(Routing(16, 4), shared_width=32))

    def logits_with(expert_bytes: int | None, weight_bytes: int | None = None) -> tuple[np.ndarray, WeightReads | None]:
        ops = NativeOps(2, isa)
        path = tmp_path / f"weights-{weight_bytes is None}"
        kept = DiskWeights(path, KEY, expert_bytes, weight_bytes)
        with ops.on_disk(kept) if expert_bytes is not None else nullcontext():
            model = load_model(checkpoint, ops, quantization=quantization)
        pool, limits = ops.new_pool(model.kv_group, 4), StepLimits(8, 1, 4, 1)
        running = Running(ops, ops.compile(lambda recorder, batch: model.forward(recorder, pool.kv, batch), limits))
        try:
            return logits(running, 4), ops.weight_reads()
        finally:
            ops.close()

    expected, _ = logits_with(None)
    with pytest.raises(ConfigError, match="--expert-memory must be at least"):
        logits_with(1)
    index = read_index(tmp_path / "weights-True", KEY, _sum)
    expert = index[0].extents[0].num_bytes + index[1].extents[0].num_bytes
    for count in (1, 4, 7, 32):
        found, reads = logits_with(count * expert)
        assert np.array_equal(found, expected), count
        assert reads is not None and (reads.hits > 0 or count < 32) and (reads.hits == 0 or count > 1), reads
    found, _ = logits_with(5 * expert, 2**20)
    assert np.array_equal(found, expected)

"""The store of experts by itself: what it gives is what the file has, at any number of slots; whom it lets go; and how
many more it finds in memory than one that lets anybody go."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenmill.core.memory import map_private
from tokenmill.ops.native import available
from tokenmill.ops.native.library import ExtentStruct, StoreFactsStruct, load_library

pytestmark = pytest.mark.skipif(available() is not None, reason=f"no native kernels: {available()}")

PAGE = 4096
NUM_LAYERS, NUM_EXPERTS, TOP_K = 4, 12, 3
GATE_UP, DOWN = 3 * PAGE, 2 * PAGE


class Rig:
    """A file of random experts and a store of some slots."""

    def __init__(self, folder: Path, num_slots: int, num_threads: int = 3) -> None:
        self.library = load_library()
        rng = np.random.default_rng(5)
        self.data = rng.integers(0, 256, (NUM_LAYERS, NUM_EXPERTS, GATE_UP + DOWN), np.uint8)
        self.path = folder / "experts"
        whole = np.concatenate([self.data[..., :GATE_UP].reshape(-1), self.data[..., GATE_UP:].reshape(-1)])
        whole.tofile(self.path)
        downs = NUM_LAYERS * NUM_EXPERTS * GATE_UP
        self.extents = [
            (
                self._extents(layer, 0, GATE_UP, slice(None, GATE_UP)),
                self._extents(layer, downs, DOWN, slice(GATE_UP, None)),
            )
            for layer in range(NUM_LAYERS)
        ]
        self.file = os.open(self.path, os.O_RDONLY)
        size = num_slots * (GATE_UP + DOWN)
        self.memory = map_private(size)
        at = np.frombuffer(self.memory, np.uint8).ctypes.data
        self.store = self.library.tm_store_new(self.file, num_threads, at, size)
        for layer in range(NUM_LAYERS):  # the store is to know all before it makes its slots
            self._call(layer, [], [], 1)

    def _extents(self, layer: int, base: int, size: int, columns: slice) -> Any:
        made = (ExtentStruct * NUM_EXPERTS)()
        for expert in range(NUM_EXPERTS):
            data = np.ascontiguousarray(self.data[layer, expert, columns])
            checksum = self.library.tm_range_sum(data.ctypes.data, size)
            made[expert] = ExtentStruct(base + (layer * NUM_EXPERTS + expert) * size, size, checksum)
        return made

    def _call(self, layer: int, experts: list[int], rows: list[int], total: int) -> tuple[int, np.ndarray]:
        out = np.zeros((len(experts), GATE_UP + DOWN), np.uint8)
        ids, counts = np.array(experts, np.int32), np.array(rows, np.int32)
        gate_up, down = self.extents[layer]
        arguments = (
            gate_up,
            down,
            NUM_EXPERTS,
            ids.ctypes.data,
            counts.ctypes.data,
            len(experts),
            total,
            out.ctypes.data,
        )
        return self.library.tm_store_fetch(self.store, *arguments), out

    def fetch(self, layer: int, experts: list[int], rows: list[int] | None = None, total: int = 1) -> None:
        """And compare."""
        failed, out = self._call(layer, experts, rows or [1] * len(experts), total)
        assert not failed, self.library.tm_last_error()
        assert np.array_equal(out, self.data[layer, experts])

    @property
    def facts(self) -> StoreFactsStruct:
        facts = StoreFactsStruct()
        self.library.tm_store_facts_of(self.store, ctypes.byref(facts))
        return facts

    def close(self) -> None:
        self.library.tm_store_free(self.store)
        os.close(self.file)


@pytest.fixture
def rigs(tmp_path: Path) -> Iterator[Any]:
    made: list[Rig] = []

    def make(num_slots: int) -> Rig:
        made.append(Rig(tmp_path, num_slots))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.mark.parametrize("num_slots", [1, 2, TOP_K, 7, NUM_EXPERTS, 30, NUM_LAYERS * NUM_EXPERTS, 99])
def test_gives_what_the_file_has(rigs: Any, num_slots: int) -> None:
    """Single tokens, batches, and long prompts that need every expert, with fewer slots than experts of a step, too."""
    rig, rng = rigs(num_slots), np.random.default_rng(num_slots)
    asked = 0
    for step in range(60):
        count = NUM_EXPERTS if step % 10 == 3 else int(rng.integers(1, 6))
        for layer in range(NUM_LAYERS):
            experts = sorted(rng.choice(NUM_EXPERTS, count, replace=False).tolist())
            rows = rng.integers(1, 9, count).tolist()
            rig.fetch(layer, experts, rows, 8 * (20 if count == NUM_EXPERTS else 1))
            asked += count
    facts = rig.facts
    assert facts.num_slots == min(num_slots, NUM_LAYERS * NUM_EXPERTS)
    assert facts.hits + facts.misses == asked and not facts.damaged
    if num_slots >= NUM_LAYERS * NUM_EXPERTS:
        assert facts.misses <= NUM_LAYERS * NUM_EXPERTS
        assert facts.bytes_read == NUM_LAYERS * NUM_EXPERTS * (GATE_UP + DOWN)


def test_a_wrong_byte_is_found(rigs: Any) -> None:
    rig = rigs(8)
    with open(rig.path, "r+b") as file:
        file.seek(5 * GATE_UP + 17)
        file.write(bytes([rig.data[0, 5, 17] ^ 1]))
    rig.fetch(0, [1, 2, 4])
    failed, _ = rig._call(0, [4, 5], [1, 1], 1)
    assert failed and b"damaged weights" in rig.library.tm_last_error() and rig.facts.damaged


def test_a_file_that_shrinks_is_found(rigs: Any) -> None:
    rig = rigs(8)
    os.truncate(rig.path, GATE_UP)
    failed, _ = rig._call(2, [3], [1], 1)
    assert failed and b"no weights" in rig.library.tm_last_error()


def test_reads_ahead_only_what_it_has_learnt_to_guess(rigs: Any) -> None:
    """Where a layer asks for what follows from the layer before, it is read before it is asked for; where all is
    random, nothing is."""
    for is_random in (False, True):
        rig, rng = rigs(10), np.random.default_rng(1)
        for _ in range(500):
            base = int(rng.integers(NUM_EXPERTS))
            for layer in range(NUM_LAYERS):
                shift = int(rng.integers(NUM_EXPERTS)) if is_random else base + 5 * layer
                rig.fetch(layer, sorted((shift + each) % NUM_EXPERTS for each in range(TOP_K)))
        facts = rig.facts
        if is_random:
            assert facts.guesses_read < 0.02 * facts.misses
        else:
            assert facts.guess_hits > 0.8 * facts.guesses_read > 200


def trace(rng: np.random.Generator, num_steps: int, num_layers: int, zipf: float, share: float) -> np.ndarray:
    """Of 64 experts 8 for each token and layer, by Zipf's cost model of that exponent, of which a share is as
    before."""
    num_experts, top_k = 64, 8
    ids = np.empty((num_steps, num_layers, top_k), np.int32)
    for layer in range(num_layers):
        chance = np.arange(1, num_experts + 1.0) ** -zipf
        rng.shuffle(chance)
        now = rng.choice(num_experts, top_k, replace=False, p=chance / chance.sum())
        for step in range(num_steps):
            kept = rng.choice(now, int(top_k * share), replace=False)
            left = chance.copy()
            left[kept] = 0
            new = rng.choice(num_experts, top_k - len(kept), replace=False, p=left / left.sum())
            now = np.concatenate([kept, new])
            ids[step, layer] = np.sort(now)
    return ids


def random_hits(rng: np.random.Generator, ids: np.ndarray, num_slots: int) -> int:
    """Of one that lets anybody go but those it is asked for."""
    num_steps, num_layers, _ = ids.shape
    is_here, hits, count = np.zeros(num_layers * 64, bool), 0, 0
    for step in range(num_steps):
        for layer in range(num_layers):
            asked = layer * 64 + ids[step, layer]
            hits += int(is_here[asked].sum())
            count += int((~is_here[asked]).sum())
            is_here[asked] = True
            if count > num_slots:
                others = np.setdiff1d(np.flatnonzero(is_here), asked)
                is_here[rng.choice(others, count - num_slots, replace=False)] = False
                count = num_slots
    return hits


@pytest.mark.parametrize(
    ("zipf", "share", "part", "least"),
    [(1.0, 0.5, 3, 1.19), (1.0, 0.5, 4, 1.28), (0.0, 0.5, 3, 1.12), (0.0, 0.0, 3, 1.1)],
)
def test_finds_more_in_memory_than_one_that_lets_anybody_go(zipf: float, share: float, part: int, least: float) -> None:
    """One of `part` experts is in memory. Loads by Zipf's cost model where tokens share half of their experts with the
    one before; the same of even loads; and even loads that share nothing, where only the order of layers is known."""
    rng, num_layers = np.random.default_rng(3), 8
    ids = np.ascontiguousarray(trace(rng, 700, num_layers, zipf, share))
    num_slots = num_layers * 64 // part
    hits = load_library().tm_replay_experts(ids.ctypes.data, *ids.shape, 64, num_slots)
    ratio = hits / random_hits(rng, ids, num_slots)
    assert ratio >= least, ratio


def test_a_long_prompt_drives_nobody_out_by_itself(rigs: Any) -> None:
    """What single tokens have used for long is still there after every expert was asked for once."""
    rig, often = rigs(NUM_LAYERS * 4), [2, 5, 9]
    for _ in range(40):
        for layer in range(NUM_LAYERS):
            rig.fetch(layer, often)
    for layer in range(NUM_LAYERS):
        rig.fetch(layer, list(range(NUM_EXPERTS)), [30] * NUM_EXPERTS, 120)
    before = rig.facts.misses
    for layer in range(NUM_LAYERS):
        rig.fetch(layer, often)
    assert rig.facts.misses - before <= NUM_LAYERS * len(often) // 2

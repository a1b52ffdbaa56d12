"""Packed weights that are offloaded to disk, of which a bounded part is in memory: experts in slots, and the weights of
layers in a ring, both read from a file that is made once.

While the model is loaded it is asked for weight after weight. Where the file is there, it answers from its index, and
nothing of the checkpoint is read; else it packs one matrix at a time into a new file. Threads and memory come with the
first program, so a process that has loaded may be forked before.

A step takes the weights of layers in one order; where they do not all fit into memory, some stay and the others share a
ring (`lay_out`).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...core.errors import ConfigError
from ...core.experts import WeightReads
from ...core.memory import give_back, map_private
from ...core.units import format_bytes
from ..api import RawTensor
from ..weights import DiskWeights
from .library import KINDS, ExtentStruct, PartStruct, RingItemStruct, StackStruct, StoreFactsStruct, check
from .operation import NativeStack, NativeWeight
from .packed_file import PAGE, Extent, NotUsable, StoredPart, StoredWeight, Writer, open_for_reading, read_index

_RING_BYTES = 12 * 2**20
"""What a disk needs to have under way and ahead to be busy, where there is as much."""
_LEAST_ITEMS = 3
"""Of the largest weights, that the ring holds at least: one in use, one that is complete, one on its way."""


class Place(NamedTuple):
    """Offset in the memory for weights; `stays`: the bytes are its own, else others' too."""

    offset: int
    stays: bool


def least_bytes(sizes: Sequence[int]) -> int:
    """The smallest budget there is a layout for."""
    return min(sum(sizes), _LEAST_ITEMS * max(sizes))


def lay_out(sizes: Sequence[int], num_bytes: int) -> list[Place]:
    """Places for weights of `sizes` bytes (multiples of the page size), in the order of their use, in `num_bytes`.

    Those that stay are spread evenly among the others, so that there is time to read while they are computed with."""
    assert num_bytes >= least_bytes(sizes), (num_bytes, least_bytes(sizes))
    total = sum(sizes)
    if total <= num_bytes:
        return _one_after_the_other(sizes)
    ring = max(_LEAST_ITEMS * max(sizes), min(_RING_BYTES, num_bytes // 4))
    room = num_bytes - ring
    places: list[Place] = []
    kept = at = passed = 0
    for size in sizes:
        passed += size
        if kept + size <= min(room, room * passed // total + size // 2):
            places.append(Place(ring + kept, True))
            kept += size
            continue
        at = 0 if at + size > ring else at
        places.append(Place(at, False))
        at += size
    return places


def _one_after_the_other(sizes: Sequence[int]) -> list[Place]:
    places, at = [], 0
    for size in sizes:
        places.append(Place(at, True))
        at += size
    return places


if TYPE_CHECKING:
    from .pack import Packer

_log = logging.getLogger(__name__)

_READERS = 8
_ALIGNMENT = 64


def open_offloaded(library: ctypes.CDLL, where: DiskWeights) -> OffloadedWeights:
    """Raises ConfigError where there can be none."""
    with told_as_config(where):
        return OffloadedWeights(library, where)


@contextlib.contextmanager
def told_as_config(where: DiskWeights) -> Iterator[None]:
    """What the disk says is a matter of settings."""
    try:
        yield
    except OSError as error:
        param = "expert_memory" if where.expert_bytes is not None else "weight_memory"
        flag = param.replace("_", "-")
        message = f"--{flag} keeps packed weights in {where.path}, which cannot be written or read: {error.strerror}."
        raise ConfigError(message, param=param) from error


class OffloadedWeights:
    """Opens the file of `where`, or begins to make it. Raises OSError where neither can be."""

    def __init__(self, library: ctypes.CDLL, where: DiskWeights) -> None:
        self._library = library
        self._where = where
        self._writer: Writer | None = None
        self._found: list[StoredWeight] = []
        self._next = 0
        self._file = -1
        self._weights: dict[int, tuple[NativeWeight, Extent]] = {}  # by their own id
        self._in_ring: dict[int, int] = {}  # places by the same
        self._stacks: list[tuple[NativeStack, int]] = []  # with the bytes of a matrix
        self._memory: list[Any] = []  # mappings for experts and for the ring
        self._store: Any = None
        try:
            self._found = read_index(where.path, where.key, self._sum)
        except FileNotFoundError:
            _log.info("packing weights into %s, once", where.path)
            self._writer = Writer(where.path, where.key, self._sum)
        except NotUsable as reason:
            _log.warning("%s is not used: %s; packing weights anew", where.path, reason)
            self._writer = Writer(where.path, where.key, self._sum)

    @property
    def keeps_experts(self) -> bool:
        return self._where.expert_bytes is not None

    @property
    def keeps_weights(self) -> bool:
        return self._where.weight_bytes is not None

    # ---- while the model is loaded

    def weight(self, packer: Packer, make: Callable[[], Sequence[RawTensor]]) -> NativeWeight:
        """The next weight of a layer: of the file, or made and put there; in memory where its columns have an order of
        their own."""
        if self._writer is None:
            stored = self._take()
            if not stored.extents:
                return packer.pack(make())
        else:
            parts = make()
            if parts[0].order is not None:
                self._writer.add(StoredWeight(0, (), ()))
                return packer.pack(parts)
            kinds = packer.pack_apart(parts)
            offset, stored_parts = 0, []
            for kind, num_rows, data in kinds:
                stored_parts.append(StoredPart(kind, num_rows, offset, data.size))
                offset += -(-data.size // _ALIGNMENT) * _ALIGNMENT
            whole = np.zeros(-(-offset // PAGE) * PAGE, np.uint8)
            for (_, _, data), part in zip(kinds, stored_parts, strict=True):
                whole[part.offset : part.offset + data.size] = data
            extent = self._writer.write(whole)
            stored = StoredWeight(parts[0].num_cols, tuple(stored_parts), (extent,))
            self._writer.add(stored)
        weight = self._weight(packer, stored)
        self._weights[id(weight)] = weight, stored.extents[0]
        return weight

    def stack(self, packer: Packer, make: Callable[[], Sequence[Sequence[RawTensor]]]) -> NativeStack:
        """The next stack of experts."""
        if self._writer is None:
            stored = self._take()
            if len(stored.parts) != 1 or not stored.extents or not self._is_enough(stored.parts[0], stored.num_cols):
                raise self._foreign()
        else:
            matrices = make()
            stored = packer.pack_each(matrices, self._writer.write)
            self._writer.add(stored)
        part, extents = stored.parts[0], stored.extents
        structs = (ExtentStruct * len(extents))(*(ExtentStruct(*astuple(each)) for each in extents))
        kind, size = KINDS[part.kind], extents[0].num_bytes
        struct = StackStruct(kind, len(extents), part.num_rows, stored.num_cols, None, size, None, structs)
        stack = packer.stack_of(struct, np.empty(0, np.uint8))
        self._stacks.append((stack, size))
        return stack

    def finish(self) -> None:
        """All weights were asked for. Raises ConfigError where the memory given cannot do."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.finish()
            size = format_bytes(os.path.getsize(self._where.path))
            _log.info("packed %s into %s", size, self._where.path)
        elif self._next != len(self._found):
            raise self._foreign()
        self._file = open_for_reading(self._where.path)
        self._check_room()

    def give_up(self) -> None:
        """The model could not be loaded."""
        if self._writer is not None:
            self._writer.give_up()
            self._writer = None

    def _take(self) -> StoredWeight:
        if self._next == len(self._found):
            raise self._foreign()
        self._next += 1
        return self._found[self._next - 1]

    def _foreign(self) -> ConfigError:
        path = self._where.path
        return ConfigError(f"{path} holds other weights than this model has; remove it, and it is made anew.")

    def _weight(self, packer: Packer, stored: StoredWeight) -> NativeWeight:
        """Its addresses come with the store."""
        parts, column = [], 0
        for part in stored.parts:
            if not self._is_enough(part, stored.num_cols):
                raise self._foreign()
            parts.append(PartStruct(KINDS[part.kind], column, part.num_rows, stored.num_cols, None, part.num_bytes))
            column += part.num_rows
        return packer.weight_of(parts, stored.num_cols, 0, (), None)

    def _is_enough(self, part: StoredPart, num_cols: int) -> bool:
        need = self._library.tm_packed_bytes(KINDS[part.kind], part.num_rows, num_cols)
        return bool(0 < need <= part.num_bytes)

    # ---- memory

    def _check_room(self) -> None:
        where = self._where
        if where.weight_bytes is not None and self._weights:
            least = least_bytes(self._weight_sizes())
            if where.weight_bytes < least:
                raise ConfigError(
                    f"--weight-memory must be at least {format_bytes(least)} for this model.", param="weight_memory"
                )
        if where.expert_bytes is not None and self._stacks:
            least = max(self._expert_sizes())
            if where.expert_bytes < least:
                raise ConfigError(
                    f"--expert-memory must be at least {format_bytes(least)}, an expert of this model.",
                    param="expert_memory",
                )

    def _expert_sizes(self) -> list[int]:
        """Bytes of an expert of each layer: the stacks come in pairs."""
        sizes = [size for _, size in self._stacks]
        return [first + second for first, second in zip(sizes[::2], sizes[1::2], strict=True)]

    def _weight_sizes(self) -> list[int]:
        return [extent.num_bytes for _, extent in self._weights.values()]

    @property
    def expert_bytes(self) -> int:
        """Memory for experts: what was given, or what all take."""
        stacks, most = self._stacks, self._where.expert_bytes or 0
        return min(most, sum(size * stack.num_matrices for stack, size in stacks)) // PAGE * PAGE

    @property
    def weight_bytes(self) -> int:
        return min(self._where.weight_bytes or 0, sum(self._weight_sizes())) // PAGE * PAGE

    @property
    def file_bytes(self) -> int:
        return os.fstat(self._file).st_size if self._file >= 0 else 0

    def open(self, weights: Iterable[NativeWeight]) -> None:
        """Threads that read, slots and ring, in this process; for programs that use these weights, in this order."""
        if self._file < 0 or not (self._stacks or self._weights):
            return
        if self._store is None:
            self._open_store()
        ours = list(dict.fromkeys(id(weight) for weight in weights if id(weight) in self._weights))
        if ours and not self._in_ring:
            self._set_ring(ours)
        assert all(each in self._in_ring for each in ours), "the first program uses all that are on disk"

    def _open_store(self) -> None:
        self._memory = [map_private(size) if size else None for size in (self.expert_bytes, self.weight_bytes)]
        self._store = self._library.tm_store_new(self._file, _READERS, _address(self._memory[0]), self.expert_bytes)
        check(self._library, self._store)
        for stack, _ in self._stacks:
            stack.struct.store = self._store

    def _set_ring(self, ours: Sequence[int]) -> None:
        base = _address(self._memory[1])
        places = lay_out([self._weights[each][1].num_bytes for each in ours], self.weight_bytes)
        items = (RingItemStruct * len(ours))()
        for index, (each, place) in enumerate(zip(ours, places, strict=True)):
            weight, extent = self._weights[each]
            at = base + place.offset
            items[index] = RingItemStruct(ExtentStruct(*astuple(extent)), at, place.stays)
            weight.struct.store, weight.struct.place = self._store, index
            for number in range(weight.struct.num_parts):
                part = weight.part(number)
                part.data = at
                at += -(-part.num_bytes // _ALIGNMENT) * _ALIGNMENT
            self._in_ring[each] = index
        check(self._library, self._library.tm_store_set_ring(self._store, items, len(items)) == 0)

    def reads(self) -> WeightReads | None:
        """From any thread, until `close`."""
        if (facts := self._facts()) is None:
            return None
        return WeightReads(
            facts.hits, facts.misses, facts.guesses_read, facts.guess_hits, facts.bytes_read, facts.waited_ns / 1e9
        )

    def look(self) -> None:
        """A step has failed: where that is because the file is damaged, whoever comes next packs anew."""
        facts = self._facts()
        if facts is not None and facts.damaged:
            _log.error("%s is damaged and is removed: the next start packs weights anew", self._where.path)
            self._where.path.unlink(missing_ok=True)

    def _facts(self) -> StoreFactsStruct | None:
        if self._store is None:
            return None
        facts = StoreFactsStruct()
        self._library.tm_store_facts_of(self._store, ctypes.byref(facts))
        return facts

    def close(self) -> None:
        """After the programs."""
        if self._store is not None:
            self._library.tm_store_free(self._store)
            self._store = None
        for mapping in self._memory:
            if mapping is not None:
                give_back(mapping)
        self._memory.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _sum(self, data: np.ndarray) -> int:
        return int(self._library.tm_range_sum(data.ctypes.data, data.size))


def _address(mapping: Any) -> int:
    return 0 if mapping is None else int(np.frombuffer(mapping, np.uint8).ctypes.data)

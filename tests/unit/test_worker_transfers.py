"""What a worker's transfers write to the folder, and what they find there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenmill.core.effects import FindBlocks, SaveBlocks
from tokenmill.kv.connector.worker.transfers import Transfers
from tokenmill.kv.transfer.disk.folder import SharedFolder

SIZE = 32


def folder_at(path: Path) -> SharedFolder:
    folder = SharedFolder(path, "a" * 32, (SIZE,), 1 << 20)
    folder.open()
    return folder


def transfers(folder: SharedFolder) -> Transfers:
    """Of a pool whose block n holds bytes n."""
    pool: Any = SimpleNamespace(
        group=SimpleNamespace(bytes_per_block=SIZE), copy_out=lambda blocks: bytes(blocks) * SIZE
    )
    return Transfers([pool], folder)


def between_steps(work: Callable[[], Any]) -> Awaitable[Any]:
    return asyncio.sleep(0, work())


def test_what_the_folder_gave_up_is_saved_again(tmp_path: Path) -> None:
    """Of blocks that the engine takes for stored, those alone that are gone; nothing is written where none is."""
    folder = folder_at(tmp_path)
    worker = transfers(folder)
    moves = tuple((0, bytes([n + 1]) * 16, n) for n in range(4))
    asyncio.run(worker.save(SaveBlocks(0, moves[:2]), between_steps))
    (path,) = tmp_path.glob("*.blocks")
    asyncio.run(worker.save(SaveBlocks(1, moves[2:], moves[:2]), between_steps))
    assert len(list(tmp_path.glob("*.blocks"))) == 2 and folder.num_saved == 4
    asyncio.run(worker.save(SaveBlocks(2, (), moves), between_steps))
    assert len(list(tmp_path.glob("*.blocks"))) == 2
    path.unlink()
    asyncio.run(worker.save(SaveBlocks(3, (), moves), between_steps))
    assert folder.num_saved == 6
    assert folder.read([(0, key) for _, key, _ in moves]) == [bytes([n]) * SIZE for n in range(4)]


def test_a_look_finds_what_another_process_wrote(tmp_path: Path) -> None:
    first, second = folder_at(tmp_path), folder_at(tmp_path)
    asyncio.run(transfers(first).save(SaveBlocks(0, ((0, b"k" * 16, 1),)), between_steps))
    found = asyncio.run(transfers(second).find(FindBlocks(0, ((0, b"k" * 16), (0, b"m" * 16)))))
    assert found == "10"

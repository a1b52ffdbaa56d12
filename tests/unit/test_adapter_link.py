"""Adapters over a worker's link: what arrives is what lies at the front end, and what is not is refused."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters import write_adapter
from links import linked, run
from tokenmill.cli.adapter_link import STALE_S, AdapterCache, AdapterLink
from tokenmill.core.events import PART_BYTES, AdapterLoaded, FilePart, LoadAdapter, ShowCache, UnloadAdapter, WantPart
from tokenmill.formats.adapter import open_adapter
from tokenmill.server.adapters import AdapterRegistry, NoPart, ServedAdapter, read_part


def make_adapter(folder: Path, seed: int = 1, width: int = 1500) -> Path:
    rng = np.random.default_rng(seed)
    pairs = {
        f"model.layers.{layer}.self_attn.q_proj": (
            rng.standard_normal((8, width)).astype(np.float32), rng.standard_normal((width, 8)).astype(np.float32),
        )
        for layer in range(4)
    }  # fmt: skip
    return write_adapter(folder, pairs, rank=8, alpha=8)


class Front:
    """A front end's book behind one link, whose answers to WantPart pass through `change`."""

    def __init__(self, link: Any, change: Callable[[FilePart], FilePart]) -> None:
        self.book = AdapterRegistry(self._send, lambda digest: False)
        self.wanted: list[WantPart] = []
        self._link = link
        self._change = change
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    def _send(self, message: Any, link: int) -> None:
        self._queue.put_nowait(message)

    async def _write(self) -> None:
        while True:
            await self._link.send(await self._queue.get())

    async def _read(self) -> None:
        while True:
            message = await self._link.receive()
            if isinstance(message, WantPart):
                self.wanted.append(message)
                self._send(self._change(await self.book.read_part(0, message)), 0)
            else:
                self.book.answer(message)


def meet(
    cache: AdapterCache,
    main: Callable[[Front, AdapterLink], Awaitable[None]],
    change: Callable[[FilePart], FilePart] = lambda part: part,
) -> None:
    async def both() -> None:
        async with linked("tcp") as (front_link, engine_link):
            front, worker = Front(front_link, change), AdapterLink(engine_link, cache)
            front.book.join(0)
            await main(front, worker)
            worker.close()
            for task in front._tasks:
                task.cancel()

    run(both())


def test_files_come_whole_in_parts_and_other_messages_pass_between(tmp_path: Path) -> None:
    """And the next load of the same content asks for nothing, whatever it is called."""
    folder, cache = make_adapter(tmp_path / "there"), AdapterCache(tmp_path / "cache")
    size = (folder / "adapter_model.safetensors").stat().st_size
    assert size > PART_BYTES

    async def main(front: Front, worker: AdapterLink) -> None:
        for name in ("a", "b"):
            digest = open_adapter(folder).digest if name == "b" else ""
            loading = asyncio.create_task(front.book._ask(ServedAdapter(name, str(folder), digest=digest), 0))
            await asyncio.sleep(0)
            front._send(ShowCache(7, 7), 0)
            heard = [await worker.receive(), await worker.receive()]
            load = next(each for each in heard if isinstance(each, LoadAdapter))
            assert ShowCache(7, 7) in heard and load.inside == "" and Path(load.path).parent == tmp_path / "cache"
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                assert (Path(load.path) / file).read_bytes() == (folder / file).read_bytes()
            await worker.send(AdapterLoaded(load.number, open_adapter(load.path).digest))
            assert await loading == open_adapter(folder).digest == Path(load.path).name
        assert len(front.wanted) == 1 + -(-size // PART_BYTES), "the second load took what was there"
        assert os.stat(tmp_path / "cache").st_mode & 0o777 == 0o700
        assert [each.name[0] for each in (tmp_path / "cache").iterdir()] != ["."]

    meet(cache, main)


def bad_size(part: FilePart) -> FilePart:
    return FilePart(part.number, 1 << 40, part.data)


def too_much(part: FilePart) -> FilePart:
    return FilePart(part.number, part.size, part.data + b"x" * (PART_BYTES + 1))


def nothing(part: FilePart) -> FilePart:
    return FilePart(part.number, part.size)


def garbage(part: FilePart) -> FilePart:
    return FilePart(part.number, part.size, bytes(len(part.data)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (bad_size, "a worker takes at most"),
        (too_much, "changed while"),
        (nothing, "changed while"),
        (garbage, "adapter_config.json"),
    ],
)
def test_what_no_honest_front_end_sends_is_refused_and_leaves_nothing(
    tmp_path: Path, change: Callable[[FilePart], FilePart], said: str
) -> None:
    folder = make_adapter(tmp_path / "there")

    async def main(front: Front, worker: AdapterLink) -> None:
        with pytest.raises(Exception, match=said):
            await front.book._ask(ServedAdapter("a", str(folder)), 0)
        front._send(UnloadAdapter("d"), 0)
        assert await worker.receive() == UnloadAdapter("d"), "the link lives on"
        assert not list((tmp_path / "cache").iterdir())

    meet(AdapterCache(tmp_path / "cache"), main, change)


def test_an_adapter_whose_files_have_changed_is_not_the_one_that_was_loaded(tmp_path: Path) -> None:
    folder, digest = make_adapter(tmp_path / "there"), open_adapter(make_adapter(tmp_path / "other", 2)).digest

    async def main(front: Front, worker: AdapterLink) -> None:
        with pytest.raises(Exception, match="have changed since"):
            await front.book._ask(ServedAdapter("a", str(folder), digest=digest), 0)

    meet(AdapterCache(tmp_path / "cache"), main)


def test_what_is_missing_is_told_as_the_engine_of_this_machine_tells_it(tmp_path: Path) -> None:
    async def main(front: Front, worker: AdapterLink) -> None:
        with pytest.raises(Exception, match=r"has no adapter_config.json .* no LoRA adapter"):
            await front.book._ask(ServedAdapter("a", str(tmp_path)), 0)

    meet(AdapterCache(tmp_path / "cache"), main)


def test_a_damaged_adapter_of_the_cache_is_not_used(tmp_path: Path) -> None:
    folder, cache = make_adapter(tmp_path / "there"), AdapterCache(tmp_path / "cache")
    digest = open_adapter(folder).digest
    part = cache.begin()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (part / name).write_bytes((folder / name).read_bytes())
    place = cache.keep(part, digest)
    assert cache.find(digest) == place
    data = bytearray((place / "adapter_model.safetensors").read_bytes())
    data[-1] ^= 1
    (place / "adapter_model.safetensors").write_bytes(data)
    assert cache.find(digest) is None and not place.exists()
    assert cache.find("../there") is None and cache.find("") is None and folder.exists()


def test_the_cache_keeps_what_was_used_last(tmp_path: Path) -> None:
    cache = AdapterCache(tmp_path / "cache", most_bytes=250)
    for age, name in enumerate(("young", "middle", "old")):
        (tmp_path / "cache" / name).mkdir(parents=True)
        (tmp_path / "cache" / name / "file").write_bytes(bytes(100))
        os.utime(tmp_path / "cache" / name, (0, 1000 - age))
    stale = cache.begin()
    os.utime(stale, (0, os.stat(stale).st_mtime - 2 * STALE_S))
    cache.begin()
    assert {each.name for each in (tmp_path / "cache").iterdir()} >= {"young", "middle"}
    assert not (tmp_path / "cache" / "old").exists() and not stale.exists()


@pytest.mark.parametrize("name", ["secret", "../secret", "/etc/passwd", "adapter_model.bin", ""])
def test_a_worker_gets_no_other_file(tmp_path: Path, name: str) -> None:
    make_adapter(tmp_path / "there")
    (tmp_path / "there" / "secret").write_text("x")
    with pytest.raises(NoPart, match="has no file"):
        read_part(str(tmp_path / "there"), "", name, 0)


def test_what_does_not_lie_inside_is_not_read(tmp_path: Path) -> None:
    """Symbolic links are followed first; a pipe is no file, and does not hold the reader up."""
    outside, inside = make_adapter(tmp_path / "outside"), tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(outside)
    (inside / "files").mkdir()
    (inside / "files" / "adapter_config.json").symlink_to(outside / "adapter_config.json")
    for name in ("link", "files"):
        with pytest.raises(NoPart, match="does not lie inside"):
            read_part(str(inside / name), str(inside), "adapter_config.json", 0)
    os.mkfifo(inside / "files" / "adapter_model.safetensors")
    with pytest.raises(NoPart, match="not a file"):
        read_part(str(inside / "files"), str(inside), "adapter_model.safetensors", 0)
    with pytest.raises(NoPart):
        read_part(str(outside), "", "adapter_config.json", -1)


def test_parts_go_only_to_who_was_asked_to_load(tmp_path: Path) -> None:
    async def main() -> None:
        sent: list[Any] = []
        book = AdapterRegistry(lambda message, link: sent.append(message), lambda digest: False)
        book.join(0), book.join(1)
        loading = asyncio.create_task(book._ask(ServedAdapter("a", str(make_adapter(tmp_path / "there"))), 0))
        await asyncio.sleep(0)
        number = sent[0].number
        assert (await book.read_part(0, WantPart(number, "adapter_config.json", 0))).data
        for link, other in ((1, number), (0, number + 1)):
            assert (await book.read_part(link, WantPart(other, "adapter_config.json", 0))).error
        book.answer(AdapterLoaded(number, "d"))
        await loading
        assert (await book.read_part(0, WantPart(number, "adapter_config.json", 0))).error

    asyncio.run(main())

"""What runs batches, where it is interrupted: nothing is lost, overwritten or held for ever."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tokenmill.api.common_fields import FLEX
from tokenmill.core.errors import ConfigError, InvalidRequest, NotFound, Unavailable
from tokenmill.core.request import IDLE_PRIORITY
from tokenmill.core.tenant import ANYONE
from tokenmill.net.system import new_id
from tokenmill.server.files.answers import Answers
from tokenmill.server.files.batch import Batch, Wanted
from tokenmill.server.files.lines import idle
from tokenmill.server.files.runner import Batches
from tokenmill.server.files.store import FileRecord, FileStore

WANTED = Wanted("file-in", "/v1/completions", "24h", None, 3600)
LINE = b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{}}\n'


def record(name: str = "file-in", expires_at: int = 2**40) -> FileRecord:
    return FileRecord(
        id=name, owner="", filename="x", purpose="batch", size_bytes=1, created_at=1, expires_at=expires_at
    )


def batch(name: str = "b", status: str = "in_progress") -> Batch:
    return Batch("batch_" + name, "", "/v1/completions", "file-in", "24h", 1, 2**40, "out", "err", status=status)


async def never(*_: Any) -> None:
    await asyncio.Event().wait()


def run(folder: Path, test: Callable[[Batches], Awaitable[None]]) -> None:
    """`test` on batches of an engine with two rows, whose calls never end; the folder has one file of two lines."""
    request_queue = SimpleNamespace(num_open_of=lambda client: 0)
    client: Any = SimpleNamespace(ready=SimpleNamespace(max_num_seqs=2), num_open=0, request_queue=request_queue)

    async def main() -> None:
        batches = Batches(FileStore(str(folder), new_id), never, client, lambda name: True, 1000, lambda owner: ANYONE)
        batches.open()
        batches.store.content("file-in").write_bytes(LINE % 1 + LINE % 2)
        await batches.store.add(record())
        try:
            await test(batches)
        finally:
            await batches.close()

    asyncio.run(main())


def test_a_line_that_ends_before_its_first_step_gives_its_row_back(tmp_path: Path) -> None:
    async def test(batches: Batches) -> None:
        turn = batches._turn

        async def turn_and_cancel(owner: str) -> None:
            await turn(owner)
            task.cancel()  # comes where the lines' tasks are there and have not begun

        batches._turn = turn_and_cancel  # type: ignore[method-assign]
        answers = Answers(batches.store, "out", "err")
        await answers.open()
        task = asyncio.create_task(batches._answer_all(batch(), answers))
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert batches._num_running == 0
        await answers.close()

    run(tmp_path, test)


def test_of_two_states_the_later_stays(tmp_path: Path) -> None:
    """However long the disk takes for the first: what is asked for while a batch ends does not bring it back."""

    async def test(batches: Batches) -> None:
        write, slow = batches.store.write_batch, asyncio.Event()

        async def write_slowly(record: Batch) -> None:
            if record.status == "cancelling":
                await slow.wait()
            await write(record)

        batches.store.write_batch = write_slowly  # type: ignore[method-assign, assignment]
        first = asyncio.create_task(batches._save(batch(status="cancelling")))
        await asyncio.sleep(0)
        second = asyncio.create_task(batches._save(batch(status="completed")))
        await asyncio.sleep(0.01)
        slow.set()
        await asyncio.gather(first, second)
        assert batches._batches["batch_b"].status == "completed"
        assert [each.status for each in batches.store.batches()] == ["completed"]

    run(tmp_path, test)


def test_the_input_of_a_batch_that_begins_is_in_use(tmp_path: Path) -> None:
    """Also while the batch is written; one that cannot be is none, and its caller is told."""

    async def test(batches: Batches) -> None:
        full = asyncio.Event()

        async def fail(record: Batch) -> None:
            await full.wait()
            raise OSError(28, "No space left on device")

        batches.store.write_batch = fail  # type: ignore[method-assign, assignment]
        creating = asyncio.create_task(batches.create("", WANTED))
        await asyncio.sleep(0)
        assert batches.uses("file-in") is not None
        full.set()
        with pytest.raises(Unavailable, match="No space left"):
            await creating
        assert batches.uses("file-in") is None and batches.of("") == []

    run(tmp_path, test)


def test_a_batch_whose_end_cannot_be_written_has_ended_here(tmp_path: Path) -> None:
    """Whoever waits for it hears so, and the next server goes on with it."""

    async def test(batches: Batches) -> None:
        created = await batches.create("", WANTED)

        async def fail(record: Batch) -> None:
            raise OSError(28, "No space left on device")

        batches.store.write_batch = fail  # type: ignore[method-assign, assignment]
        await batches._tasks[created.id]
        ended = batches.get("", created.id)
        assert (ended.status, ended.faults[0].code) == ("failed", "storage_failed")
        assert "No space left" in ended.faults[0].message and str(tmp_path) not in ended.faults[0].message
        assert [each.status for each in batches.store.batches()] == ["validating"]

    run(tmp_path, test)


def test_files_expire_but_for_those_in_use(tmp_path: Path) -> None:
    """On the disk too, without anybody asking for them."""

    async def test(batches: Batches) -> None:
        store = batches.store
        await store.add(record("file-old", expires_at=5), part(store, "file-old"))
        await store.add(record("file-used", expires_at=5), part(store, "file-used"))
        with pytest.raises(NotFound):
            store.file("", "file-old")
        assert [each.id for each in store.files("")] == ["file-in"]
        await store.drop_expired({"file-used"})
        assert {path.name for path in (tmp_path / "contents").iterdir()} == {"file-in", "file-used"}
        assert {row.key for row in store._rows()} == {"file-in", "file-used"}
        assert store.num_bytes == 2

    def part(store: FileStore, name: str) -> Path:
        store.part(name).write_bytes(b"x")
        return store.part(name)

    run(tmp_path, test)


def test_an_opened_folder_loses_what_has_expired(tmp_path: Path) -> None:
    async def leave(batches: Batches) -> None:
        os.link(batches.store.content("file-in"), batches.store.content("file-old"))
        await batches.store.add(record("file-old", expires_at=5))

    async def look(batches: Batches) -> None:
        for _ in range(3000):
            if not batches.store.content("file-old").exists():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the file is still there")

    run(tmp_path, leave)
    run(tmp_path, look)


@pytest.mark.parametrize("kind", ["files", "batches"])
def test_a_record_that_cannot_be_read_is_told_with_its_remedy(tmp_path: Path, kind: str) -> None:
    """A server does not start on it; who takes the folder over later tells it to those who want files."""
    (tmp_path / kind).mkdir()
    (tmp_path / kind / "x.json").write_bytes(b"{")

    async def main() -> None:
        batches = Batches(
            FileStore(str(tmp_path), new_id), never, SimpleNamespace(), lambda name: True, 1000, lambda owner: ANYONE
        )  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="tokenmill state repair --files-dir"):
            batches.open()
        with pytest.raises(Unavailable, match="cannot be read"):
            batches.of("")
        await batches.close()

    asyncio.run(main())


@pytest.mark.parametrize("body", [b"{}", b"{ }", b'{"priority":-5,"a":1}', b'{"a":{"priority":1}}', b'{"a":1 }'])
def test_a_call_of_a_batch_is_idle_whatever_it_says(body: bytes) -> None:
    said = msgspec.json.decode(body)
    assert msgspec.json.decode(idle(body)) == said | {"priority": IDLE_PRIORITY, "priority_class": FLEX}


def test_one_owners_batches_leave_places_for_anothers(tmp_path: Path) -> None:
    async def test(batches: Batches) -> None:
        for owner in ("a", "b"):
            batches.store.content(owner).write_bytes(LINE % 1)
            await batches.store.add(msgspec.structs.replace(record(owner), owner=owner))
        for owner, most in (("a", 32), ("b", 16)):
            wanted = Wanted(owner, "/v1/completions", "24h", None, 3600)
            for _ in range(most):
                await batches.create(owner, wanted)
            with pytest.raises(InvalidRequest, match=f"{most} of your batches have not ended"):
                await batches.create(owner, wanted)

    run(tmp_path, test)


def test_an_owner_with_many_batches_has_no_more_turns_than_one_with_one(tmp_path: Path) -> None:
    """Lines of 32 batches and of another owner's one begin in turns, and no batch has a second before all had one."""
    begun: list[tuple[str, str]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append((scope["state"]["owner"], scope["state"]["once"].split()[0]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def test(batches: Batches) -> None:
        turn, asked = batches._turn, asyncio.Semaphore(0)
        client: Any = batches._client
        rows, client.ready = client.ready, None  # no line begins before all wait

        async def counted_turn(*whose: Any) -> None:
            asked.release()
            await turn(*whose)

        batches._app, batches._turn = app, counted_turn  # type: ignore[method-assign]
        for owner, num_lines, num_batches in (("many", 2, 32), ("one", 6, 1)):
            batches.store.content(owner).write_bytes(b"".join(LINE % number for number in range(num_lines)))
            await batches.store.add(msgspec.structs.replace(record(owner), owner=owner))
            for _ in range(num_batches):
                await batches.create(owner, Wanted(owner, "/v1/completions", "24h", None, 3600))
        for _ in range(33):
            await asked.acquire()
        client.ready = rows
        await asyncio.gather(*batches._tasks.values())
        owners = [owner for owner, _ in begun]
        assert owners[:11] in (["many", "one"] * 5 + ["many"], ["one", "many"] * 5 + ["one"])
        assert len(set([name for owner, name in begun if owner == "many"][:32])) == 32

    run(tmp_path, test)

"""Runs batches: their lines become calls of the same application that clients call, in the time that nobody else wants.

As many lines are under way as the engine has rows, and beside others only a few begin. Their requests have the lowest
priority, at which the engine computes them in what others leave (`core.request.IDLE_PRIORITY`). Owners take turns.

Batches of a folder that another server has are opened once that server has gone, as in an upgrade where the new one
starts before the old one ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from starlette.types import ASGIApp

from ...core.errors import ConfigError, InvalidRequest, NotFound, Unavailable
from ...core.tenant import Tenant
from ..client import EngineClient
from .answers import Answers
from .batch import WINDOWS, Batch, Wanted
from .calls import Turns, call, first_failure
from .lines import MESSAGES, Fault, Line, Place, answered, idle, read_lines, survey, unanswered
from .store import HIDDEN, KEPT_S, MAX_BATCHES, FileRecord, FileStore, has_place

CLIENT = "batches"
"""In whose name lines are called."""

_MOST_OPEN = 64
_ROWS = 8  # where the engine does not say how many it has, and while others have something open
_POLL_S = 0.02
_SWEEP_S = 60.0
_RETRIED = (429, 503)
_RETRY_S, _MOST_RETRY_S = 0.5, 30.0
_log = logging.getLogger(__name__)


class _OwnerGone(Exception):
    """The tenant of a batch has been deleted, or the key of --api-key is no more."""


class Batches:
    """All batches of a folder. `open` it inside the loop, `close` it when the server ends.

    app        what lines are called on
    serves     whether a model's name is one that is served
    tenant_of  who the owner of a batch is; None: nobody any more
    """

    def __init__(
        self,
        store: FileStore,
        app: ASGIApp,
        client: EngineClient,
        serves: Callable[[str], bool],
        max_line_bytes: int,
        tenant_of: Callable[[str], Tenant | None],
    ) -> None:
        self.store = store
        self._app = app
        self._client = client
        self._serves = serves
        self._max_line_bytes = max_line_bytes
        self._tenant_of = tenant_of
        self._batches: dict[str, Batch] = {}
        self._answers: dict[str, Answers] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: dict[str, asyncio.Event] = {}
        self._turns = Turns()
        self._freed = asyncio.Event()
        self._num_running = 0
        self._writing = asyncio.Lock()
        self._sweeper: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Take the folder, and go on with what has not ended. Raises ConfigError for a folder that is damaged."""
        try:
            if not self.store.open():
                _log.warning("/v1/files and /v1/batches refuse: %s", self.store.why_not)
                return
            batches = sorted(self.store.batches(), key=lambda each: (each.created_at, each.id))
            open_ = [batch for batch in batches if not batch.has_ended]
            self.store.clean({name for batch in open_ for name in (batch.output_id, batch.error_id)})
        except ConfigError as error:
            self.store.close(error.message)
            raise
        except OSError as error:
            _log.error("Files are not kept: %s", error)
            self.store.close(f"{error.strerror}.")
            return
        self._batches = {batch.id: batch for batch in batches}
        for batch in open_:
            self._start(batch)
        self._sweeper = asyncio.create_task(self._sweep(), name="expired-files")

    def stop(self) -> None:
        """Begin nothing more, and leave what is under way; the next server goes on."""
        for task in self._tasks.values():
            task.cancel()

    async def close(self) -> None:
        self.stop()
        tasks = [*self._tasks.values()]
        if self._sweeper is not None:
            self._sweeper.cancel()
            tasks.append(self._sweeper)
        await asyncio.gather(*tasks, return_exceptions=True)
        self.store.close()

    # ---- for clients ----

    async def create(self, owner: str, wanted: Wanted) -> Batch:
        """Raises InvalidRequest, NotFound and Unavailable."""
        store, now = self.store, int(self.store.wall_s())
        store.require_open()
        if store.file(owner, wanted.input_id).purpose != "batch":
            raise InvalidRequest("input_file_id must be a file of the purpose 'batch'.", param="input_file_id")
        self.require_place(owner)
        self._drop_old(now, owner)
        batch = Batch(
            id=store.new_id("batch").replace("-", "_", 1),
            owner=owner,
            endpoint=wanted.endpoint,
            input_id=wanted.input_id,
            window=wanted.window,
            created_at=now,
            expires_at=now + WINDOWS[wanted.window],
            output_id=store.new_id("file"),
            error_id=store.new_id("file"),
            kept_s=wanted.kept_s,
            metadata=wanted.metadata,
        )
        return await self._begin(batch)

    async def create_of_messages(self, owner: str, input_id: str, num_lines: int) -> Batch:
        """The same of a message batch; its input has been looked at. Raises Unavailable."""
        store, now = self.store, int(self.store.wall_s())
        self._drop_old(now, owner)
        batch = Batch(
            id=store.new_id("msgbatch").replace("-", "_", 1),
            owner=owner,
            endpoint=MESSAGES,
            input_id=input_id,
            window="24h",
            created_at=now,
            expires_at=now + WINDOWS["24h"],
            output_id=store.new_id("file"),
            error_id=store.new_id("file"),
            num_lines=num_lines,
        )
        return await self._begin(batch)

    def require_place(self, owner: str) -> None:
        """Raises InvalidRequest where the owner has as many open batches as may be, and Unavailable."""
        self.store.require_open()
        open_ = [batch.owner for batch in self._batches.values() if not batch.has_ended]
        if not has_place(owner, num_own := open_.count(owner), len(open_), _MOST_OPEN):
            raise InvalidRequest(f"{num_own} of your batches have not ended yet, as many as may be now; wait for one.")

    async def _begin(self, batch: Batch) -> Batch:
        try:
            await self._save(batch)
        except OSError as error:
            del self._batches[batch.id]
            raise Unavailable(f"The batch cannot be kept: {error.strerror}.") from error
        self._start(batch)
        return batch

    def of(self, owner: str, *, messages: bool = False) -> list[Batch]:
        """The owner's, the oldest first. messages: message batches, else the others."""
        self.store.require_open()
        return [each for each in self._batches.values() if each.owner == owner and each.is_of_messages == messages]

    def get(self, owner: str, identifier: str, *, messages: bool = False) -> Batch:
        """Raises NotFound, for batches of others too."""
        self.store.require_open()
        batch = self._batches.get(identifier)
        if batch is None or batch.owner != owner or batch.is_of_messages != messages:
            raise NotFound(f"There is no batch {identifier[:100]!r}.", param="batch_id")
        return batch

    def counts(self, batch: Batch) -> tuple[int, int]:
        """(lines completed, lines failed) so far."""
        answers = self._answers.get(batch.id)
        if answers is None:
            return batch.num_completed, batch.num_failed
        return answers.num_completed, answers.num_failed

    async def cancel(self, owner: str, identifier: str, *, messages: bool = False) -> Batch:
        batch = self.get(owner, identifier, messages=messages)
        if batch.has_ended or batch.status == "finalizing":
            raise InvalidRequest(f"The batch is {batch.status}; it cannot be cancelled any more.", param="batch_id")
        if batch.status != "cancelling":
            self._cancelled[identifier].set()
            batch = await self._save(batch.moved("cancelling", self.store.wall_s()))
        return batch

    async def delete(self, batch: Batch) -> None:
        """Forget a batch that has ended, and its files. Raises InvalidRequest for one that has not."""
        if not batch.has_ended:
            raise InvalidRequest("The batch has not ended; cancel it first.", param="batch_id")
        del self._batches[batch.id]
        self.store.remove_batch(batch)
        for name in (batch.input_id, batch.output_id, batch.error_id):
            with contextlib.suppress(NotFound):
                await self.store.delete(self.store.file(batch.owner, name))

    def uses(self, file_id: str) -> Batch | None:
        """A batch that has not ended and reads this file."""
        return next((each for each in self._batches.values() if each.input_id == file_id and not each.has_ended), None)

    # ---- a batch's life ----

    def _start(self, batch: Batch) -> None:
        self._cancelled[batch.id] = asyncio.Event()
        if batch.status == "cancelling":
            self._cancelled[batch.id].set()
        task = asyncio.create_task(self._live(batch.id), name="batch")
        self._tasks[batch.id] = task

        def forget(_: asyncio.Task[None]) -> None:
            del self._tasks[batch.id], self._cancelled[batch.id]

        task.add_done_callback(forget)

    async def _live(self, identifier: str) -> None:
        """From the state that the batch is in to its end. Each step may be taken again after a crash."""
        try:
            if self._batches[identifier].status == "validating":
                await self._validate(self._batches[identifier])
            if not self._batches[identifier].has_ended:
                await self._work(identifier)
        except _OwnerGone:
            told = "Whoever made the batch may not call this server any more."
            await self._fail(identifier, (Fault("owner_gone", told),))
        except (InvalidRequest, OSError) as error:
            message = error.message if isinstance(error, InvalidRequest) else f"{error.strerror}."
            await self._fail(identifier, (Fault("storage_failed", f"The batch cannot go on: {message}"),))
        except Exception:
            _log.exception("A batch failed.")
            await self._fail(identifier, (Fault("internal_error", "Internal error; see the server's log."),))

    async def _validate(self, batch: Batch) -> None:
        path = self.store.content(batch.input_id)
        found = await asyncio.to_thread(survey, path, batch.endpoint, self._max_line_bytes)
        faults, models = list(found.faults), {} if batch.is_of_messages else found.models
        faults += [
            Fault("model_not_found", f"The model {name[:200]!r} does not exist here.", line, "body.model")
            for name, line in models.items()
            if not self._serves(name)
        ]
        batch = self._batches[batch.id]
        if batch.status != "validating":  # cancelled meanwhile
            return
        if faults:
            await self._fail(batch.id, tuple(faults))
            return
        named = tuple(sorted(models))
        await self._save(batch.moved("in_progress", self.store.wall_s(), num_lines=found.num_lines, models=named))

    async def _work(self, identifier: str) -> None:
        batch = self._batches[identifier]
        answers = self._answers[identifier] = Answers(self.store, batch.output_id, batch.error_id)
        try:
            await answers.open()
            try:
                end = await self._until_end(batch, answers)
                if end == "expired" and not batch.is_of_messages:
                    await self._expire(batch, answers)
            finally:
                await answers.close()
            await self._finish(identifier, end, answers)
        finally:
            del self._answers[identifier]

    async def _until_end(self, batch: Batch, answers: Answers) -> str:
        """Answer lines until all are answered, the batch is cancelled or its time is over; how it ended."""
        if batch.status == "finalizing":
            return "completed"
        cancelled = asyncio.ensure_future(self._cancelled[batch.id].wait())
        lines = asyncio.ensure_future(self._answer_all(batch, answers))
        left_s = max(0.0, batch.expires_at - self.store.wall_s())
        try:
            done, _ = await asyncio.wait((cancelled, lines), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if cancelled in done:
                return "cancelled"
            if lines in done:
                lines.result()
                return "completed"
            return "expired"
        finally:
            cancelled.cancel()
            lines.cancel()
            await asyncio.gather(cancelled, lines, return_exceptions=True)

    async def _answer_all(self, batch: Batch, answers: Answers) -> None:
        while not all(map(self._serves, batch.models)):  # another model is served since
            await asyncio.sleep(1.0)
        async with first_failure() as group:
            async for line in self._undone(batch, answers):
                await self._turn(batch.owner)
                group.create_task(self._answer(batch, line, answers)).add_done_callback(self._free)

    async def _undone(self, batch: Batch, answers: Answers) -> AsyncIterator[Line]:
        """The lines that have no answer yet."""
        path, place = self.store.content(batch.input_id), Place()
        while True:
            lines, place = await asyncio.to_thread(read_lines, path, place, self._max_line_bytes)
            for line in lines:
                if line.custom_id not in answers.done:
                    yield line
            if not lines:
                return

    async def _turn(self, owner: str) -> None:
        """Wait until a line of one of the owner's batches may begin."""
        async with self._turns.of(owner):
            while self._num_running >= self._most_running:
                self._freed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await self._freed.wait()
            self._num_running += 1

    @property
    def _most_running(self) -> int:
        ready = self._client.ready
        most = 0 if ready is None else ready.max_num_seqs or _ROWS
        is_busy = self._client.num_open > self._client.request_queue.num_open_of(CLIENT)  # something of others is open
        return min(most, _ROWS) if is_busy else most

    async def _answer(self, batch: Batch, line: Line, answers: Answers) -> None:
        wait_s = _RETRY_S
        body = idle(line.body)
        while True:
            tenant = self._tenant_of(batch.owner)
            if tenant is None:
                raise _OwnerGone
            once = f"{batch.id} {line.custom_id}"  # it may be answered again if this process ends before it is kept
            status, told = await call(
                self._app, batch.endpoint, body, CLIENT, batch.owner, tenant.in_batches(), once=once
            )
            if status not in _RETRIED:
                break
            await asyncio.sleep(wait_s)
            wait_s = min(_MOST_RETRY_S, 2 * wait_s)
        name = self.store.new_id("batch_req").replace("-", "_", 1)
        written = answered(name, line.custom_id, status, name, told)
        await answers.put(line.custom_id, written, is_error=status != 200)

    def _free(self, _: asyncio.Task[None]) -> None:
        """A line's task is over, even if it was cancelled before its first step."""
        self._num_running -= 1
        self._freed.set()

    async def _expire(self, batch: Batch, answers: Answers) -> None:
        """Say of each line that is left that it was not called."""
        message = "This call could not be made before the completion window expired."
        async for line in self._undone(batch, answers):
            name = self.store.new_id("batch_req").replace("-", "_", 1)
            told = unanswered(name, line.custom_id, "batch_expired", message)
            await answers.put(line.custom_id, told, is_error=True)

    async def _finish(self, identifier: str, end: str, answers: Answers | None, **changes: object) -> None:
        """Make files of what was answered, and end the batch."""
        now = self.store.wall_s()
        batch = self._batches[identifier]
        if end == "completed" and batch.status != "finalizing":
            batch = await self._save(batch.moved("finalizing", now))
        sizes = [0, 0] if answers is None else answers.sizes
        names = ("output", "errors")
        for file_id, size, name in zip((batch.output_id, batch.error_id), sizes, names, strict=True):
            if size:
                record = FileRecord(
                    id=file_id,
                    owner=batch.owner,
                    filename=f"{batch.id}_{name}.jsonl",
                    purpose=HIDDEN if batch.is_of_messages else "batch_output",
                    size_bytes=size,
                    created_at=int(now),
                    expires_at=int(now) + min(batch.kept_s, KEPT_S),
                )
                await self.store.add(record)
        await self._save(
            batch.moved(
                end,
                self.store.wall_s(),
                num_completed=0 if answers is None else answers.num_completed,
                num_failed=0 if answers is None else answers.num_failed,
                has_output=bool(sizes[0]),
                has_errors=bool(sizes[1]),
                **changes,
            )
        )

    async def _fail(self, identifier: str, faults: tuple[Fault, ...]) -> None:
        """What was answered is kept. A batch whose end cannot be written has failed as long as this server runs, and
        is gone on with by the next."""
        _log.warning("Batch %s failed: %s", identifier, faults[0].message)
        batch = self._batches[identifier]
        try:
            answers = Answers(self.store, batch.output_id, batch.error_id)
            await answers.open()
            await answers.close()
            await self._finish(identifier, "failed", answers, faults=faults)
        except OSError as error:
            _log.error("The end of batch %s cannot be written: %s", identifier, error)
            self._batches[identifier] = batch.moved("failed", self.store.wall_s(), faults=faults)

    async def _save(self, batch: Batch) -> Batch:
        """Make it the batch's state, at once, and write the newest there is."""
        self._batches[batch.id] = batch
        async with self._writing:
            await self.store.write_batch(self._batches[batch.id])
        return batch

    async def _sweep(self) -> None:
        """Delete what has expired, but for the inputs of batches that have not ended."""
        while True:
            used = {batch.input_id for batch in self._batches.values() if not batch.has_ended}
            try:
                await self.store.drop_expired(used)
            except OSError as error:
                _log.warning("Expired files cannot be deleted: %s", error)
            await asyncio.sleep(_SWEEP_S)

    def _drop_old(self, now: int, owner: str) -> None:
        """Forget batches that have ended long ago, and where there are too many the oldest, the owner's own first."""
        own_first = sorted(self._batches.values(), key=lambda batch: batch.owner != owner)
        num_excess = len(self._batches) - MAX_BATCHES + 1
        for number, batch in enumerate([each for each in own_first if each.has_ended]):
            if number < num_excess or batch.created_at + 2 * KEPT_S < now:
                del self._batches[batch.id]
                self.store.remove_batch(batch)


PERIOD_S = 1.0


class Handover:
    """`open` it inside the loop, `close` it when the server ends."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._batches.open()
        if self._batches.store.is_taken():
            self._task = asyncio.create_task(self._wait(), name="folder-of-files")

    async def _wait(self) -> None:
        while self._batches.store.is_taken():
            await asyncio.sleep(PERIOD_S)
        _log.info("The other server has gone: /v1/files and /v1/batches answer here.")
        try:
            self.open()  # a third one may have been quicker
        except ConfigError as error:
            _log.error("Files are not kept: %s", error.message)

    def stop(self) -> None:
        """Begin nothing more."""
        if self._task is not None:
            self._task.cancel()
        self._batches.stop()

    async def close(self) -> None:
        self.stop()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        await self._batches.close()

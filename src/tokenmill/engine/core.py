"""EngineCore: events in, plans and effects out.

What belongs here: which part of the engine hears an event, and the order of a step's life. What never does: clocks,
I/O, randomness, order of service (`sched`), block ids (`kv.blocks`). Handlers here are of what every engine does:
requests come and go, steps fail, the engine drains. Features are plan rows, policies, or events and jobs with a handler
in a file of their own (`adapters`, `grammars`, `kv.connector.scheduler`); never branches here.

    handle   an event of the front end, of a job or of a failed step
    plan     the next step: `sched` composes it through the builder
    commit   the result of the oldest step in flight

The core is deterministic: the same calls give the same plans and effects. `record` hears of every call (`journal`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from ..core.config import EngineConfig
from ..core.effects import (
    Effects,
    Event,
    FetchBlocks,
    FindBlocks,
    GiveBack,
    JobEnded,
    PrepareGrammar,
    Relax,
    SaveBlocks,
    StepFailed,
    StoreOpened,
)
from ..core.errors import InvalidRequest, TokenmillError, Unavailable
from ..core.events import (
    Abort,
    Drain,
    EngineStats,
    ForgetTenants,
    LoadAdapter,
    SetPool,
    ShowCache,
    Submit,
    UnloadAdapter,
)
from ..core.kv_events import KeepKV, PromoteKV, WatchKV
from ..core.moves import Continue, Offer, Prefetch, PullBlocks, Release, SendBlocks, Yield
from ..core.outputs import aborted, refused
from ..core.request import Request
from ..core.step import StepPlan, StepResult
from ..core.work import step_work
from ..kv.connector.scheduler.kv_export import KVExports
from ..kv.connector.scheduler.kv_import import KVImports
from ..kv.connector.scheduler.prefetch import Hints, StorePrefetch
from ..kv.connector.scheduler.saves import Saves
from ..kv.connector.scheduler.transfers import Transfers
from ..kv.connector.scheduler.writes import Writes
from ..sched.admission import refusal
from ..sched.scheduler import compose_step
from .commit import commit_step, fail_step
from .grammars import PendingGrammars
from .journal import Committed, Handled, Planned, Recorder
from .memory_reclaim import MemoryReclaim
from .state import EngineState, check_state
from .stats import shown_cache, snapshot
from .step_builder import StepBuilder

Handler = Callable[[Any, float], None]
"""Takes an event and the time; what it gives goes to the outbox."""


class EngineCore:
    """One engine. `state` is for the engine's own parts and for tests."""

    def __init__(self, config: EngineConfig, record: Recorder | None = None) -> None:
        self.config = config
        self.state = state = EngineState(config)
        self._transfers = transfers = Transfers(state)
        numbers = count()
        self._saves = Saves(state, numbers)
        self._writes = Writes(state, numbers, transfers.is_stored)
        self._prefetch = prefetch = StorePrefetch(state)
        hints, lean = Hints(state, self._writes), MemoryReclaim(state)
        self.memory_reclaim = lean
        self._grammars = grammars = PendingGrammars(state, self._adapter_refusal)
        self._kv_exports = kv_exports = KVExports(state, grammars)
        self._kv_imports = kv_imports = KVImports(state, grammars)
        self._builder = StepBuilder(state, transfers)
        self._record = record
        self._is_draining = False
        self._handlers: dict[type, Handler] = {
            Submit: self._submit,
            Abort: self._abort,
            Drain: self._drain,
            LoadAdapter: state.adapters.load,
            UnloadAdapter: state.adapters.unload,
            ShowCache: self._show_cache,
            SetPool: state.membership.set_pool,
            WatchKV: state.kv_events.watch,
            ForgetTenants: self._forget_tenants,
            StepFailed: self._fail_step,
            JobEnded: self._end_job,
            StoreOpened: self._open_store,
            Relax: lean.relax,
            KeepKV: hints.keep,
            PromoteKV: hints.promote,
            Offer: kv_exports.offer,
            Yield: kv_exports.stop,
            Release: kv_exports.release,
            Continue: kv_imports.go_on,
            Prefetch: lambda event, now: (kv_imports.prefetch if event.source else prefetch.begin)(event, now),
        }
        # By the type of the job. One whose end changes nothing has no handler.
        self._job_handlers: dict[type, Handler] = {
            LoadAdapter: state.adapters.end_load,
            FindBlocks: lambda event, now: (prefetch if event.job.number < 0 else transfers).end_lookup(event, now),
            FetchBlocks: lambda event, now: (prefetch if event.job.number < 0 else transfers).end_fetch(event, now),
            SaveBlocks: self._end_save,
            PrepareGrammar: grammars.end,
            GiveBack: lean.end,
            PullBlocks: kv_imports.end_pull,
            SendBlocks: kv_exports.end_send,
        }

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step in flight."""
        return bool(self.state.by_id or self.state.in_flight or self._grammars)

    @property
    def open_ids(self) -> tuple[str, ...]:
        """Of the requests that are unfinished."""
        return (*self.state.by_id, *self._grammars)

    @property
    def open_tickets(self) -> tuple[str, ...]:
        """Of what is offered to peers."""
        return self._kv_exports.tickets

    @property
    def is_recorded(self) -> bool:
        """Whether somebody hears of every call."""
        return self._record is not None

    @property
    def builder(self) -> StepBuilder:
        """Of the step in the making, for the engine's own parts."""
        return self._builder

    @property
    def has_jobs(self) -> bool:
        """Whether KV comes from elsewhere or goes there, or a grammar is being prepared."""
        parts = (self._transfers, self._saves, self._writes, self._kv_exports, self._kv_imports, self._prefetch)
        return bool(self._grammars) or any(part.has_work for part in parts)

    @property
    def is_drained(self) -> bool:
        """Whether a Drain came and nothing is left to do."""
        return self._is_draining and not self.has_work and not self.has_jobs

    def handle(self, event: Event, now: float) -> Effects:
        """Take an event in. Returned is also what calls of `plan` have left since effects were last taken: jobs."""
        if self._record is not None:
            self._record(Handled(event, now))
        self._handlers[type(event)](event, now)
        return self._take_effects(now)

    def plan(self, now: float) -> StepPlan | None:
        """The next step to execute; None when there is nothing to run, or enough is in flight: one step is where it
        verifies drafts, since only its end tells from where its sequences go on, and where drafts are worth it."""
        state, builder = self.state, self._builder
        if len(state.in_flight) >= self.config.steps_in_flight or not state.by_id:
            return None
        if state.in_flight and (state.in_flight[-1].num_drafts or (state.speculation and state.speculation.waits)):
            return None
        if state.deadlines:
            state.expire(now)
        builder.now = now
        compose_step(state.running, state.waiting, self.config, state.policies, builder)
        plan = self._submit_step() if builder.step.rows else None
        if self._record is not None:
            self._record(Planned(plan, now))
        return plan

    def take_effects(self) -> Effects:
        """What has come of planning since the last call: jobs alone."""
        return self.state.outbox.take()

    def commit(self, result: StepResult, now: float) -> Effects:
        """Apply the result of the oldest step in flight."""
        if self._record is not None:
            self._record(Committed(result, now))
        commit_step(self.state, self._saves, result, now)
        return self._take_effects(now)

    def stats(self) -> EngineStats:
        return snapshot(self.state, len(self._grammars))

    def check(self) -> None:
        """Assert what must hold between calls; slow, for tests."""
        check_state(
            self.state, self._saves, (self._transfers, self._saves, self._kv_exports, self._kv_imports, self._prefetch)
        )
        self._grammars.check()

    def _take_effects(self, now: float) -> Effects:
        for hear in self.state.borders:
            hear(now)
        if self._is_draining and not (self.has_work or self._transfers.has_work):
            self._saves.save_rest(now)
            self._writes.save_rest(now)
        return self.state.outbox.take()

    def _submit_step(self) -> StepPlan:
        state, step = self.state, self._builder.take_step()
        step.is_ahead = state.speculation is not None and len(state.in_flight) == self.config.steps_in_flight - 1
        step.released = tuple(state.released)
        state.released.clear()
        state.in_flight.append(step)
        state.work_done += step_work(step.num_tokens, self.config.max_num_batched_tokens)
        return StepPlan(step.number, tuple(step.rows), step.released)

    # ---- handlers ----

    def _submit(self, event: Submit, now: float) -> None:
        for request in event.requests:
            error = self._refusal(request)
            if error is None and request.sampling.grammar:
                self._grammars.hold(request)
            elif error is None:
                self.state.enter(request, now)
            else:
                self.state.outbox.outputs.append(refused(request, error, now))

    def _refusal(self, request: Request) -> TokenmillError | None:
        state = self.state
        if self._is_draining:
            return Unavailable("The engine is shutting down. Try again shortly.")
        if request.id in state.by_id or request.id in self._grammars:
            return InvalidRequest(f"A request with the id {request.id!r} is running already.", param="request_id")
        if (error := self._adapter_refusal(request)) is not None:
            return error
        if request.handoff and not state.has_store and not request.is_resumed:
            message = "kv_transfer_params needs a store of KV; start the server with --kv-save FOLDER or a KV tier."
            return InvalidRequest(message, param="kv_transfer_params")
        return refusal(request, self.config, len(state.waiting) + len(self._grammars))

    def _adapter_refusal(self, request: Request) -> TokenmillError | None:
        if request.adapter and not self.state.adapters.takes(request.adapter):
            return InvalidRequest("The adapter that this request names is not loaded any more.", param="model")
        return None

    def _abort(self, event: Abort, now: float) -> None:
        for request_id in event.request_ids:
            seq = self.state.by_id.get(request_id)
            if seq is not None:
                self.state.leave(seq)
                self.state.outbox.outputs.append(aborted(seq, now))
            elif request_id in self._grammars:
                self._grammars.abort(request_id, now)

    def _drain(self, event: Drain, now: float) -> None:
        self._is_draining = True

    def _forget_tenants(self, event: ForgetTenants, now: float) -> None:
        if self.config.speculation is not None:
            self.state.outbox.jobs.append(event)

    def _open_store(self, event: StoreOpened, now: float) -> None:
        self._transfers.open_store(event, now)
        self._writes.open_store(event, now)
        if self._writes.is_open:
            self.state.writes = self._writes

    def _show_cache(self, event: ShowCache, now: float) -> None:
        self.state.outbox.answers.append(shown_cache(self.state, event))

    def _fail_step(self, event: StepFailed, now: float) -> None:
        fail_step(self.state, event, now)

    def _end_save(self, event: JobEnded, now: float) -> None:
        if not self._writes.end_save(event, now):
            self._saves.end_save(event, now)

    def _end_job(self, event: JobEnded, now: float) -> None:
        handler = self._job_handlers.get(type(event.job))
        if handler is not None:
            handler(event, now)

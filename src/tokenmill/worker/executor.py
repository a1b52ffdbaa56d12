"""The live Executor: a step is prepared where it is planned, computed by the backend's queue, collected by the loop.

    event loop   plan --prepare--> arrays                    tokens --collect--> result
                                      |                        ^
    queue        ... the step before, | this one's work, ...   |

While a step computes, the loop takes in the results of the one before, plans the next and prepares it. The order in
which plans come is that in which they are computed; whatever else touches the model's memory (an adapter that is put in
place) takes its turn in the same queue. See runner.py for the three parts of a step, ops/work_queue.py for the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..core.effects import (
    DropAdapter,
    DropBlocks,
    FetchBlocks,
    FindBlocks,
    GiveBack,
    Job,
    NoteStepCosts,
    PinBlocks,
    PrepareGrammar,
    PromoteBlocks,
    SaveBlocks,
)
from ..core.errors import EngineFailed, InvalidRequest, TokenmillError
from ..core.events import ForgetTenants, LoadAdapter
from ..core.moves import EndMove, PullBlocks, SendBlocks
from ..core.step import StepPlan, StepResult
from ..kv.connector.worker.moves import PeerMoves
from ..kv.connector.worker.tiers import TierCopies
from ..kv.connector.worker.transfers import Transfers
from ..ops.kv_pool import KVPool
from ..ops.work_queue import Ticket, WorkQueue
from .adapters import Adapters
from .draft_sequences import DraftSequences
from .grammars import Grammars
from .pooling import PoolingRunner
from .runner import Runner

Work = Callable[[], Any]
Collect = Callable[[Ticket], Any]
"""Makes a result of what work has left behind. Raises what the work has failed with."""


class ModelExecutor:
    """Runs plans first in, first out. It closes `queue`; `on_close` frees what the runner uses after that."""

    def __init__(
        self,
        runner: Runner | PoolingRunner,
        queue: WorkQueue,
        on_close: Callable[[], None],
        adapters: Adapters | None = None,
        transfers: Transfers | None = None,
        grammars: Grammars | None = None,
        pools: Sequence[KVPool] = (),
        draft_kv: DraftSequences | None = None,
    ) -> None:
        self._runner: Any = runner  # the steps that it prepares are its own
        self._queue = queue
        self._adapters = adapters
        self._transfers = transfers
        self._grammars = grammars
        self._pools = pools
        self._draft_kv = draft_kv
        self._on_close = on_close
        self._moves: PeerMoves | None = None
        self._tiers: TierCopies | None = None
        self._is_closed = False

    def reach_peers(self, moves: PeerMoves) -> None:
        """From now on KV may go to other workers and come from them."""
        self._moves = moves

    def use_tiers(self, tiers: TierCopies) -> None:
        """From now on KV goes to a store with tiers and comes from it."""
        self._tiers = tiers

    @property
    def tiers(self) -> TierCopies | None:
        return self._tiers

    def execute(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """Run a step. Calls that overlap run one after the other in the order they were made; one that fails raises
        where its future is awaited and does not stop the next."""
        self._require_open()
        future = self._submit(*self._prepare(plan))
        self._runner.hand_over()
        return future

    def execute_now(self, plan: StepPlan) -> StepResult:
        """Run a step and wait for it."""
        self._require_open()
        work, collect = self._prepare(plan)
        self._runner.hand_over()
        result: StepResult = collect(self._queue.run(work))
        return result

    async def run(self, job: Job) -> str:
        match job:
            case LoadAdapter(path=path, inside=inside):
                return await self._load_adapter(path, inside)
            case DropAdapter(digest):
                return await self._drop_adapter(digest)
            case PrepareGrammar(grammar):
                return await self._prepare_grammar(grammar)
            case FindBlocks() | FetchBlocks() | SaveBlocks() if self._tiers is not None:
                return await self._tiers.run(job)
            case FindBlocks():
                return await self._open_transfers().find(job)
            case FetchBlocks():
                return await self._open_transfers().fetch(job, self._between_steps)
            case PullBlocks():
                return await self._open_moves().pull(job)
            case SendBlocks():
                return await self._open_moves().send(job)
            case EndMove():
                return "" if self._moves is None else self._moves.end(job)
            case SaveBlocks():
                return await self._open_transfers().save(job, self._between_steps)
            case GiveBack(blocks=blocks):
                return await self._between_steps(partial(self._give_back, blocks))
            case ForgetTenants(tenants):
                self._runner.forget_tenants(tenants)
                return ""
            case PromoteBlocks() | DropBlocks() | PinBlocks() | NoteStepCosts():
                return "" if self._tiers is None else self._tiers.tell(job)

    async def _load_adapter(self, path: str, inside: str) -> str:
        """Reading goes on beside the steps; packing is done between two of them."""
        adapters = self._adapters
        if adapters is None:
            raise InvalidRequest("This server takes no LoRA adapters; start it with --enable-lora.", param="lora_name")
        prepared = await asyncio.get_running_loop().run_in_executor(None, adapters.prepare, path, inside)
        digest: str = await self._submit(partial(adapters.install, prepared), Ticket.outcome)
        return digest

    async def _drop_adapter(self, digest: str) -> str:
        """Takes effect after the steps submitted before."""
        adapters = self._adapters
        assert adapters is not None, "no adapter was ever loaded"
        await self._submit(partial(adapters.remove, digest), Ticket.outcome)
        return digest

    async def _prepare_grammar(self, grammar: str) -> str:
        """Beside the steps; the first one loads what all need."""
        if self._grammars is None:
            raise InvalidRequest("This model gives no tokens, and follows no grammar.", param="grammar")
        spent_s = await asyncio.get_running_loop().run_in_executor(None, self._grammars.prepare, grammar)
        return f"{spent_s:.6f}" if spent_s else ""

    def _open_moves(self) -> PeerMoves:
        if self._moves is None:
            raise EngineFailed("There is no way to other engines.")
        return self._moves

    def _open_transfers(self) -> Transfers:
        assert self._transfers is not None, "there is no store"
        return self._transfers

    def _between_steps(self, work: Work) -> asyncio.Future[Any]:
        return self._submit(work, Ticket.outcome)

    async def warm_up_grammars(self) -> None:
        """Have loaded what the first grammar would wait for. Steps meanwhile may wait for tenths of a second."""
        if self._grammars is not None:
            with contextlib.suppress(TokenmillError, OSError):  # the first grammar finds the same, and is told
                await asyncio.get_running_loop().run_in_executor(None, self._grammars.vocabulary)

    def close(self) -> None:
        """Wait for the step that is running, drop what has not begun, free memory. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._grammars is not None:
            self._grammars.close()
        if self._moves is not None:
            self._moves.close()
        if self._tiers is not None:
            self._tiers.close()
        self._queue.close()
        if self._transfers is not None:
            self._transfers.close()
        self._on_close()
        # What they hold goes now, and not when somebody lets go of the executor.
        self._pools = ()
        self._runner = self._adapters = self._transfers = self._grammars = self._moves = self._tiers = None
        self._draft_kv = None
        self._on_close = lambda: None

    def _give_back(self, blocks: Sequence[Sequence[int]]) -> str:
        for pool, ids in zip(self._pools, blocks, strict=True):
            pool.give_back(ids)
        if self._draft_kv is not None:
            self._draft_kv.forget_blocks(blocks[0])
        return ""

    def _prepare(self, plan: StepPlan) -> tuple[Work, Collect]:
        """A plan that cannot be prepared fails when it would have been computed."""
        try:
            step = self._runner.prepare(plan)
        except Exception as error:
            self._runner.give_up(plan)
            return partial(_raise, error), Ticket.outcome
        return step.work, partial(_collect, self._runner, step)

    def _submit(self, work: Work, collect: Collect) -> asyncio.Future[Any]:
        self._require_open()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._queue.submit(work, partial(_settle, future, collect))
        return future

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("The executor is closed.")


def _collect(runner: Any, step: Any, ticket: Ticket) -> StepResult:
    try:
        ticket.outcome()
    except BaseException:
        runner.give_up(step.plan)
        raise
    result: StepResult = runner.collect(step, ticket.duration_s)
    return result


def _settle(future: asyncio.Future[Any], collect: Collect, ticket: Ticket) -> None:
    if future.cancelled() or future.get_loop().is_closed():
        return
    try:
        future.set_result(collect(ticket))
    except Exception as error:
        future.set_exception(error)


def _raise(error: Exception) -> None:
    raise error

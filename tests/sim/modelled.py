"""Engines of which only time and room are modelled, under the real gateway: fast enough for thousands of requests.

A step takes what a linear cost model says of its work (core.cost.Costs). Rows draw one token a step; prompts take what
is left of the step's tokens, in order. KV has room for so many tokens; where none is left, the row that came last is
preempted and computed again. KV is copied at so many seconds a token. Lengths of answers are given, and no engine sees
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from tokenmill.cluster.events import Effects, EngineMessage, GatewayEvent, Joined, Opened, Stepped, Ticked
from tokenmill.cluster.gateway import Gateway
from tokenmill.core.cost import Costs, Work
from tokenmill.core.events import FINISH_MOVED, FINISH_STOP, EngineStats, Output, Ready, StepOutputs, WorkerFacts
from tokenmill.core.kv_events import WatchKV
from tokenmill.core.moves import Continue, Moved, Offer, Release, Staged, Yield
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.terms import USUAL, Terms

_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Law:
    """costs    of a step
    num_rows   most of a step; num_tokens: most of a step
    room       tokens whose KV it holds
    copy_s     seconds to copy the KV of a token to another engine; handoff_s: for the last part of a move, beside that
    """

    costs: Costs
    num_rows: int
    num_tokens: int
    room: int
    copy_s: float = 2e-6
    handoff_s: float = 0.005


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: when it comes, tokens of its prompt and of its answer, and the most it asked for (0: just these)."""

    at_s: float
    num_prompt: int
    num_answer: int
    max_tokens: int = 0
    terms: Terms = USUAL


@dataclass(slots=True)
class Served:
    """arrival_s, first_s, end_s: seconds; longest_s: the longest gap between two of its tokens."""

    ask: Ask
    first_s: float = -1.0
    last_s: float = -1.0
    end_s: float = -1.0
    longest_s: float = 0.0
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.ask.at_s

    @property
    def latency_s(self) -> float:
        return self.end_s - self.ask.at_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / max(1, self.num_tokens - 1)


@dataclass(slots=True, eq=False)
class _Row:
    request: Request
    num_tokens: int
    num_computed: int = 0
    num_new: int = 0
    num_drawn: int = 0
    is_stopping: bool = False
    waits: bool = False


@dataclass(slots=True)
class _Report:
    """num_preempted  tokens whose KV was computed for nothing."""

    num_preempted: int = 0
    num_moved: int = 0
    num_failed: int = 0
    num_rerouted: int = 0
    num_split: int = 0
    busy_s: dict[int, float] = field(default_factory=dict)
    pauses_s: list[float] = field(default_factory=list)
    lengths: list[tuple[int, int, bool]] = field(default_factory=list)
    end_s: float = 0.0


class _Engine:
    """Messages in, messages out through the cluster, which calls `end_step` when a step's time is over."""

    def __init__(self, number: int, cost_model: Law, cluster: Cluster) -> None:
        self.number, self.cost_model, self.cluster = number, cost_model, cluster
        self.waiting: deque[_Row] = deque()
        self.running: dict[str, _Row] = {}
        self.coming: dict[str, _Row] = {}
        self.kept: dict[str, int] = {}
        self.used = 0
        self.plan: list[tuple[_Row, int]] | None = None
        self.step_s = 0.0
        self.num_steps = 0
        self.outputs: list[Output] = []

    def submit(self, request: Request) -> None:
        row = _Row(request, len(request.prompt_tokens) + len(request.output_tokens))
        row.num_drawn = len(request.output_tokens)
        if request.source is not None:
            self.coming[request.id] = row
            row.waits = True
            self._reserve_coming()
        else:
            self.waiting.append(row)

    def abort(self, request_id: str) -> None:
        row = self.running.pop(request_id, None)
        coming = self.coming.pop(request_id, None)
        if coming is not None and not coming.waits:
            self.used -= coming.num_tokens
        if row is not None:
            self.used -= row.num_computed + row.num_new
            row.request = None  # type: ignore[assignment]
        self.waiting = deque(each for each in self.waiting if each.request.id != request_id)

    def tell(self, message: object) -> None:
        if isinstance(message, Yield):
            row = self.running.get(message.request_id)
            if row is not None:
                row.is_stopping = True
                if self.plan is None:
                    self._stop(row, ())
                    self.cluster.step_ended(self)
            else:
                for each in [each for each in self.waiting if each.request.id == message.request_id]:
                    self.waiting.remove(each)
                    self.outputs.append(self._output(each, (), FINISH_MOVED))
                    self.cluster.step_ended(self)
        elif isinstance(message, Release):
            self.used -= self.kept.pop(message.ticket, 0)
        elif isinstance(message, Continue):
            row = self.coming.get(message.request_id)
            if row is not None:
                self._arrive(row, message)
        else:
            assert isinstance(message, Offer | WatchKV), message

    def _reserve_coming(self) -> None:
        for row in self.coming.values():
            if (
                row.waits
                and self.used + row.num_tokens <= self.cost_model.room
                and len(self.running) < self.cost_model.num_rows
            ):
                row.waits = False
                self.used += row.num_tokens
                staged = Staged(row.request.id, row.request.attempt, row.num_tokens)
                self.cluster.later(row.num_tokens * self.cost_model.copy_s, lambda staged=staged: self._say(staged))

    def _say(self, message: Staged | Moved) -> None:
        self.cluster.handle(EngineMessage(self.number, message))

    def _arrive(self, row: _Row, message: Continue) -> None:
        num_more = len(message.tokens)
        request = row.request

        def come() -> None:
            if self.coming.pop(request.id, None) is None:
                return
            had = 0 if row.waits else row.num_tokens
            row.num_tokens += num_more
            row.num_drawn += num_more
            num_needed = row.num_tokens - had
            if self.used + num_needed > self.cost_model.room or len(self.running) >= self.cost_model.num_rows:
                self.used -= had
                row.num_computed = 0
                self.waiting.appendleft(row)
                self._say(Moved(request.id, request.attempt, 0, "no room"))
            else:
                self.used += num_needed
                row.num_computed = row.num_tokens - 1
                self.used -= 1
                self.running[request.id] = row
                self._say(Moved(request.id, request.attempt, row.num_computed, ""))
            self.cluster.wake(self)

        rest = num_more if not row.waits else row.num_tokens + num_more
        if request.source is not None and row.num_tokens == len(request.prompt_tokens):
            rest += min(
                row.num_tokens, self.cost_model.num_tokens
            )  # of a prompt that was just computed, the last chunk
        self.cluster.later(self.cost_model.handoff_s + rest * self.cost_model.copy_s, come)

    def compose(self) -> bool:
        """Begin a step; False: there is nothing to do."""
        cost_model, plan = self.cost_model, []
        self._reserve_coming()
        budget, room = cost_model.num_tokens, cost_model.room - self.used
        rows = list(self.running.values())
        for row in rows:
            if row.num_computed >= row.num_tokens - 1 and row.request is not None:
                while room <= 0 and self.running:
                    victim = next(reversed(self.running.values()))
                    freed = victim.num_computed + victim.num_new
                    room += freed
                    self.used -= freed
                    self.cluster.report.num_preempted += victim.num_computed
                    victim.num_computed = victim.num_new = 0
                    del self.running[victim.request.id]
                    self.waiting.appendleft(victim)
                    plan = [(each, num) for each, num in plan if each is not victim]
                    if victim is row:
                        break
                if row.request.id in self.running:
                    plan.append((row, 1))
                    row.num_new = 1
                    room -= 1
                    self.used += 1
                    budget -= 1
        for row in list(self.running.values()):
            left = row.num_tokens - row.num_computed
            if left > 1 and budget > 0:
                num = min(left, budget, room)
                if num > 0:
                    plan.append((row, num))
                    row.num_new = num
                    self.used += num
                    room -= num
                    budget -= num
        while self.waiting and budget > 0 and len(self.running) + len(self.coming) < cost_model.num_rows:
            row = self.waiting[0]
            if row.num_tokens + 1 > room:
                break
            self.waiting.popleft()
            num = min(row.num_tokens, budget)
            self.running[row.request.id] = row
            plan.append((row, num))
            row.num_new = num
            self.used += num
            room -= num
            budget -= num
        if not plan:
            return False
        num_tokens = sum(num for _, num in plan)
        context = sum(row.num_computed for row, _ in plan)
        positions = sum(num * row.num_computed + num * (num - 1) // 2 for row, num in plan)
        self.plan, self.step_s = plan, cost_model.costs.predict(Work(len(plan), num_tokens, positions, context))
        return True

    def end_step(self) -> None:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        self.num_steps += 1
        answers = self.cluster.answers
        for row, num in plan:
            request = row.request
            if request is None or request.id not in self.running:
                continue
            row.num_computed += num
            row.num_new = 0
            if row.num_computed < row.num_tokens:
                continue
            row.num_tokens += 1
            row.num_drawn += 1
            if row.num_drawn >= answers[request.id]:
                self.outputs.append(self._output(row, (0,), FINISH_STOP))
                del self.running[request.id]
                self.used -= row.num_computed
            elif request.yields or row.is_stopping:
                self._stop(row, (0,))
            else:
                self.outputs.append(Output(request.id, (0,), num_output=row.num_drawn, attempt=request.attempt))
        self.cluster.step_ended(self)

    def _stop(self, row: _Row, tokens: tuple[int, ...]) -> None:
        request = row.request
        del self.running[request.id]
        ticket = request.yields or self.cluster.tickets[self.number, request.id]
        if ticket in self.cluster.released:
            self.used -= row.num_computed
        else:
            self.kept[ticket] = row.num_computed
        self.outputs.append(self._output(row, tokens, FINISH_MOVED))

    def _output(self, row: _Row, tokens: tuple[int, ...], reason: str) -> Output:
        request = row.request
        return Output(request.id, tokens, finish_reason=reason, num_output=row.num_drawn, attempt=request.attempt)

    def stats(self) -> EngineStats:
        cost_model = self.cost_model
        left = sum(row.num_tokens - row.num_computed for row in self.waiting)
        left += sum(row.num_tokens - row.num_computed - 1 for row in self.running.values())
        return EngineStats(
            num_running=len(self.running), num_waiting=len(self.waiting), num_steps=self.num_steps,
            num_blocks=cost_model.room // _BLOCK, num_free_blocks=max(0, cost_model.room - self.used) // _BLOCK,
            num_prompt_left=left, last_step_s=self.step_s, costs=cost_model.costs,
        )  # fmt: skip


class Cluster:
    """`run` serves all that is asked. `answers`: lengths, by request id."""

    def __init__(self, cost_models: Sequence[Law], pools: Sequence[str], configure: Callable[[Gateway], None]) -> None:
        tickets = count()
        self.now = 0.0
        self.gateway = Gateway(new_ticket=lambda: f"ticket {next(tickets)}")
        configure(self.gateway)
        self.report = _Report()
        self.answers: dict[str, int] = {}
        self.tickets: dict[tuple[int, str], str] = {}
        self.released: set[str] = set()
        self.served: dict[str, Served] = {}
        self.engines = [_Engine(number, cost_model, self) for number, cost_model in enumerate(cost_models)]
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self._tick_s = float("inf")
        self._num_ended = 0
        for engine, pool in zip(self.engines, pools, strict=True):
            cost_model = engine.cost_model
            worker = WorkerFacts(f"w{engine.number}", "1", 1, pool, "host", "kv")
            ready = Ready("m", 1 << 20, 100, (), "id", _BLOCK, cost_model.room // _BLOCK,
            num_pool_blocks=cost_model.room // _BLOCK,
                          max_num_seqs=cost_model.num_rows, max_num_batched_tokens=cost_model.num_tokens, worker=worker,
                          stats=EngineStats(costs=cost_model.costs))  # fmt: skip
            self.handle(Joined(engine.number, ready))

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        heappush(self._heap, (self.now + delay_s, next(self._number), call))

    def handle(self, event: GatewayEvent) -> None:
        effects = self.gateway.handle(event, self.now)
        self._carry_out(effects)
        due_s = self.gateway.next_due_s
        if due_s is not None and due_s < self._tick_s:
            self._tick_s = max(due_s, self.now)
            self.later(self._tick_s - self.now, self._tick)

    def _tick(self) -> None:
        self._tick_s = float("inf")
        self.handle(Ticked())

    def _carry_out(self, effects: Effects) -> None:
        report, woken = self.report, set()
        for number, request_id in effects.aborts:
            self.engines[number].abort(request_id)
            woken.add(number)
        for number, request in effects.submits:
            self.engines[number].submit(request)
            report.num_split += bool(request.yields)
            woken.add(number)
        for number, message in effects.tells:
            if isinstance(message, Offer):
                self.tickets[number, message.request_id] = message.ticket
            elif isinstance(message, Release):
                self.released.add(message.ticket)
            self.engines[number].tell(message)
            woken.add(number)
        for output in effects.outputs:
            served = self.served[output.request_id]
            if output.tokens:
                if served.num_tokens:
                    served.longest_s = max(served.longest_s, self.now - served.last_s)
                else:
                    served.first_s = self.now
                served.last_s = self.now
                served.num_tokens += len(output.tokens)
        for ended in effects.ended:
            assert ended.reason == FINISH_STOP, ended
            served = self.served[ended.request.id]
            assert served.num_tokens == served.ask.num_answer, "no token lost, none twice"
            served.end_s = self.now
            self._num_ended += 1
        for moved in effects.moved:
            report.num_failed += bool(moved.error)
            report.num_moved += not moved.error
            if moved.pause_s and not moved.error:
                report.pauses_s.append(moved.pause_s)
        report.num_rerouted += effects.rerouted
        report.lengths.extend(effects.lengths)
        for number in sorted(woken):
            self.wake(self.engines[number])

    def wake(self, engine: _Engine) -> None:
        if engine.plan is None and engine.compose():
            busy = self.report.busy_s
            busy[engine.number] = busy.get(engine.number, 0.0) + engine.step_s
            self.later(engine.step_s, engine.end_step)

    def step_ended(self, engine: _Engine) -> None:
        outputs, engine.outputs = tuple(engine.outputs), []
        self.handle(Stepped(engine.number, StepOutputs(outputs, engine.stats(), self.now)))
        self.wake(engine)

    def run(self, asks: Sequence[Ask], at: Sequence[tuple[float, GatewayEvent]] = ()) -> list[Served]:
        """Everything that is asked, to its end. `at`: what else happens when."""
        for number, ask in enumerate(asks):
            name = f"r{number}"
            self.answers[name] = ask.num_answer
            self.served[name] = Served(ask)
            self.later(ask.at_s, lambda name=name, ask=ask: self._open(name, ask))
        for at_s, event in at:
            self.later(at_s, lambda event=event: self.handle(event))
        while self._heap and self._num_ended < len(asks):
            self.now, _, call = heappop(self._heap)
            call()
        assert self._num_ended == len(asks), f"{len(asks) - self._num_ended} are not served"
        assert not self.gateway.num_open
        self.gateway.check()
        self.report.end_s = self.now
        assert all(not engine.kept and engine.used == 0 for engine in self.engines), "all KV was given back"
        return list(self.served.values())

    def _open(self, name: str, ask: Ask) -> None:
        most = ask.max_tokens or ask.num_answer
        request = Request(
            name,
            range(ask.num_prompt),
            SamplingParams(),
            most,
            1,
            terms=ask.terms,
            arrival_s=self.now,  # type: ignore[arg-type]
        )
        self.handle(Opened((request,)))


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

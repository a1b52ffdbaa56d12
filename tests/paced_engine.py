"""An engine of one idea: at each step every open request gets the next token of a fixed text. It computes nothing.

It speaks over a link of processes and keeps its pace whatever the front end does, so that what is measured is the front
end. As a program it connects to a socket, and when the front end has gone it prints what it did as JSON.

    python tests/paced_engine.py ADDRESS STEP_S
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from tokenmill.bench.load.timer import SystemTimer
from tokenmill.core.events import FINISH_LENGTH, Abort, EngineStats, Output, Ready, StepOutputs, Submit, Timing
from tokenmill.core.request import Request
from tokenmill.net.system import MonotonicClock, run_event_loop
from tokenmill.net.unix import UnixEngineEnd

READY = Ready("toy", 8192, 262, (2,), "paced", 16, 1 << 20, max_num_seqs=4096, max_num_batched_tokens=1 << 20)
WORDS = "the quick brown fox jumps over a lazy dog "


class PacedEngine:
    """step_s: from one step to the next; 0: as fast as the link takes them. A step that is late does not move those
    that follow.

    records            of each request the moments its message had come and its first token was handed to the link, in
                       the order of coming
    full_tokens_per_s  at what rate tokens went while as many requests as ever were open
    """

    def __init__(self, link: UnixEngineEnd, step_s: float, answer: tuple[int, ...]) -> None:
        self._link = link
        self._step_s = step_s
        self._answer = answer
        self._open: dict[str, Request] = {}
        self._given: dict[str, int] = {}
        self._records: dict[str, list[float]] = {}
        self._arrived = asyncio.Event()
        self._due = asyncio.Event()
        self._num_steps = self._num_tokens = self._most_open = 0
        self._full = 0, 0, 0.0, 0.0

    async def run(self) -> dict[str, Any]:
        """Until the front end has gone."""
        timer = SystemTimer(asyncio.get_running_loop(), self._due.set)
        await self._link.send(READY)
        stepping = asyncio.create_task(self._step(timer.set))
        try:
            await self._read()
        except EOFError:
            pass
        finally:
            stepping.cancel()
            with contextlib.suppress(asyncio.CancelledError, EOFError):
                await stepping
            timer.close()
            self._link.close()
        return {
            "records": list(self._records.values()),
            "num_steps": self._num_steps,
            "num_tokens": self._num_tokens,
            "most_open": self._most_open,
            "full_tokens_per_s": self._full_rate(),
        }

    def _full_rate(self) -> float:
        num_rows, num_steps, _, full_s = self._full
        return num_rows * num_steps / full_s if full_s else 0.0

    def _note_step(self, num_rows: int, now_s: float) -> None:
        """`_full`: most rows of a step, pairs of such steps in a row, when the last was (0: the last had fewer), the
        time between the steps of all pairs."""
        most, num, last_s, full_s = self._full
        if num_rows > most:
            self._full = num_rows, 0, now_s, 0.0
        elif num_rows < most:
            self._full = most, num, 0.0, full_s
        elif last_s:
            self._full = most, num + 1, now_s, full_s + now_s - last_s
        else:
            self._full = most, num, now_s, full_s

    async def _read(self) -> None:
        while True:
            message = await self._link.receive()
            now_s = time.perf_counter()
            if isinstance(message, Submit):
                for request in message.requests:
                    self._open[request.id], self._given[request.id] = request, 0
                    self._records[request.id] = [now_s]
                self._most_open = max(self._most_open, len(self._open))
                self._arrived.set()
            elif isinstance(message, Abort):
                for name in message.request_ids:
                    self._open.pop(name, None)

    async def _step(self, wake_at: Callable[[float], None]) -> None:
        due_s = 0.0
        while True:
            if not self._open:
                self._arrived.clear()
                await self._arrived.wait()
                due_s = time.perf_counter()
            due_s += self._step_s
            if time.perf_counter() < due_s:
                self._due.clear()
                wake_at(due_s)
                await self._due.wait()
            else:
                await asyncio.sleep(0)
            await self._send_step()

    async def _send_step(self) -> None:
        now_s = time.monotonic()
        outputs = [self._next(request, now_s) for request in list(self._open.values())]
        self._num_steps += 1
        self._num_tokens += len(outputs)
        stats = EngineStats(
            num_running=len(self._open), num_blocks=READY.num_blocks, num_free_blocks=READY.num_blocks,
            num_steps=self._num_steps, generation_tokens=self._num_tokens, last_step_tokens=len(outputs),
            last_step_s=self._step_s,
        )  # fmt: skip
        at_s = time.perf_counter()
        self._note_step(len(outputs), at_s)
        for output in outputs:
            record = self._records[output.request_id]
            if len(record) == 1:
                record.append(at_s)
        await self._link.send(StepOutputs(tuple(outputs), stats, now_s))

    def _next(self, request: Request, now_s: float) -> Output:
        num = self._given[request.id]
        self._given[request.id] = num + 1
        is_last = num + 1 >= request.max_tokens
        if is_last:
            del self._open[request.id]
        timing = None
        if is_last or num == 0:
            timing = Timing(request.arrival_s, request.arrival_s, now_s, now_s if is_last else -1.0)
        return Output(
            request.id,
            (self._answer[num % len(self._answer)],),
            finish_reason=FINISH_LENGTH if is_last else None,
            num_output=num + 1,
            timing=timing,
            attempt=request.attempt,
        )


async def _main(address: str, step_s: float) -> None:
    from scripted import make_text_model

    answer = tuple(make_text_model().tokenizer.encode(WORDS, add_special=False))
    report = await PacedEngine(UnixEngineEnd(address, MonotonicClock()), step_s, answer).run()
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    run_event_loop(_main(sys.argv[1], float(sys.argv[2])))

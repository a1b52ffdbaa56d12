"""What the flight recorder and the step log take of a step, and the registry of requests of a request, in microseconds.
No test.

python tests/unit/time_flight.py
"""

from __future__ import annotations

import mmap
import tempfile
import timeit

from prometheus_client import CollectorRegistry

from tokenmill.cluster.events import Ended
from tokenmill.control.observe.monitor import Monitor
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.events import Output, Timing
from tokenmill.core.flight import SIZE, FlightWriter
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.sequence import Sequence
from tokenmill.core.step import PlanRow
from tokenmill.core.step_records import SIZE as LOG_SIZE
from tokenmill.core.step_records import LogFacts, StepWriter
from tokenmill.engine.recorders import FlightRecorder, StepLog, Watcher
from tokenmill.engine.state import EngineState
from tokenmill.sched.steps import Step

_TIMES, _REPEATS = 10_000, 5


def time_step(recorder: Watcher, num_rows: int) -> float:
    state = EngineState(EngineConfig(groups=full_groups(64), max_model_len=512))
    step = Step(0, [PlanRow(number, 100, (), 5, sample=True) for number in range(num_rows)])
    step.sequences = [Sequence(0, Request("r", (1,), SamplingParams(), 9, seed=1), [1])] * num_rows

    def record() -> None:
        step.number += 1
        state.in_flight.append(step)
        recorder.planned(state, 1.0)
        recorder.submitted(step.number, 1.1)
        state.in_flight.pop()
        recorder.ended(step, 1.2, 0.1, 1.3, has_failed=False)

    return min(timeit.repeat(record, number=_TIMES, repeat=_REPEATS)) / _TIMES


def time_request() -> float:
    monitor, sampling = Monitor("m", CollectorRegistry()), SamplingParams()
    requests = [Request(f"r-{i}", (1, 2, 3), sampling, 9, seed=1, arrival_s=1.0) for i in range(_TIMES)]
    output = Output("r", finish_reason="stop", num_output=5, num_cached=1, timing=Timing(1.0, 1.2, 1.5, 2.0))

    def serve() -> None:
        for request in requests:
            monitor.opened([request], "me", 1.0)
            monitor.requests.given(0, request, 1.1)
            monitor.first(request, 0.5, 1.5)
            monitor.requests.close(Ended(request, output, "stop", 2.0, 2.0))

    return min(timeit.repeat(serve, number=1, repeat=_REPEATS)) / _TIMES


def main() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        writer = FlightWriter(mmap.mmap(file.fileno(), SIZE), pid=1, began_s=0.0, unix_s=0.0, model="m")
        for num_rows in (1, 16, 64, 200):
            print(f"{1e6 * time_step(FlightRecorder(writer), num_rows):.1f} us for a step of {num_rows} rows")
    with tempfile.TemporaryFile() as file:
        file.truncate(LOG_SIZE)
        log = StepLog(StepWriter(mmap.mmap(file.fileno(), LOG_SIZE), LogFacts("m")))
        for num_rows in (1, 16, 64, 200):
            print(f"{1e6 * time_step(log, num_rows):.1f} us for the step log of a step of {num_rows} rows")
    print(f"{1e6 * time_request():.1f} us for a request in the registry, the window and the metrics")


if __name__ == "__main__":
    main()

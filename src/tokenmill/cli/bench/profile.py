"""`bench profile`: takes an engine apart, and a server, and times the parts.

The engine is wired as `node.load` wires it, with a watch on the calls of the compiled forward, and run twice: by hand,
plan after plan, which gives the parts; and by its own shell, which gives the whole step. Then a real server is started,
and the processor time of its two processes is divided by the tokens that clients were streamed.

    T rows  L logit rows  V vocabulary
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ...bench import machine
from ...bench.profile import ROWS, ServedTimes, Server, StepTimes, run_streams, show
from ...core.block import FULL, KVGroup, KVGroupSpec, state_group, window_group
from ...core.config import EngineConfig
from ...core.events import EngineStats, Output, StepOutputs, Submit
from ...core.request import Request, SamplingParams
from ...core.step import StepResult
from ...engine.build import build_engine, local_link
from ...engine.core import EngineCore
from ...formats.checkpoint import open_checkpoint
from ...models.loader import Model, load_model
from ...net.codec import decode, encode
from ...net.system import MonotonicClock
from ...node.load import describe_kernels
from ...ops.native import NativeOps
from ...ops.native.operation import Operation
from ...ops.native.program import NativeCall, NativeProgram
from ...server.deltas import Delta
from ...text.choice import Choice
from ...text.text_model import TextModel, load_text
from ...worker.batch import Slots
from ...worker.executor import ModelExecutor
from ...worker.memory import step_limits
from ...worker.runner import PreparedStep, Runner
from .kernels import open_native

PROMPT_TOKENS = 128
SERVED_STREAMS = (1, 16)
SERVED_NEW_TOKENS = 128
BLOCK_SIZE = 16
MAX_BATCHED_TOKENS = 512


def profile(args: argparse.Namespace) -> int:
    path, ops = open_native(args, "bench profile looks into")
    before = machine.read_cpu_time()
    checkpoint = open_checkpoint(path)
    text = load_text(checkpoint)
    bench = _Bench(ops, load_model(checkpoint, ops, block_size=BLOCK_SIZE), args.steps)
    checkpoint.close()
    facts = {"model": path.name, "kernels": describe_kernels(ops)}
    steps = [bench.measure(rows) for rows in ROWS]
    bench.close()
    state = machine.interference(before, machine.read_cpu_time())
    served = _served(path, text, args.threads)
    hardware = machine.hardware()
    facts = {
        "machine": f"{hardware['processor']}, {hardware['cores']} cores",
        **facts,
        "commit": machine.commit() or "not a checkout",
        "others on the machine": str(state or "not known"),
    }
    return show(args, steps, served, facts)


class _Watched:
    """What a runner asks of a program. Keeps the calls, which tell when they began and ended."""

    def __init__(self, program: NativeProgram) -> None:
        self._program = program
        self.calls: list[NativeCall] = []

    def bind(self, *given: Any) -> NativeCall:
        self.calls.append(self._program.bind(*given))
        return self.calls[-1]


def _spec(group: KVGroup, num_blocks: int) -> KVGroupSpec:
    """Room for every block; of states, none stays."""
    if group.state_values:
        return state_group(num_blocks, num_blocks)
    return KVGroupSpec(FULL, num_blocks) if not group.window else window_group(num_blocks, group.window)


class _Bench:
    """An engine in parts, with room for the widest step to be measured."""

    def __init__(self, ops: NativeOps, model: Model, num_steps: int) -> None:
        config = model.config
        self._num_steps = num_steps
        self._num_positions = -(-(PROMPT_TOKENS + num_steps + 1) // BLOCK_SIZE) * BLOCK_SIZE
        num_blocks = max(ROWS) * self._num_positions // BLOCK_SIZE
        limits = step_limits(
            config,
            max_model_len=self._num_positions,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_num_seqs=max(ROWS),
            block_size=BLOCK_SIZE,
        )
        self._ops = ops
        self._pools = [ops.new_pool(group, num_blocks) for group in model.kv_groups]
        kvs = tuple(pool.kv for pool in self._pools)
        program = ops.compile(lambda recorder, batch: model.forward(recorder, kvs, batch), limits)
        self._operations = _Operations(program, model)
        self._program = _Watched(program)
        watched: Any = self._program
        self._vocab_size = config.vocab_size

        def make_runner() -> Runner:
            return Runner(
                ops,
                watched,
                limits,
                vocab_size=config.vocab_size,
                block_size=BLOCK_SIZE,
                slots=Slots(limits.max_seqs, limits.max_blocks_per_seq, num_blocks, len(model.kv_groups)),
            )

        self._make_runner = make_runner
        self._config = EngineConfig(
            groups=tuple(_spec(group, num_blocks) for group in model.kv_groups),
            max_model_len=self._num_positions,
            block_size=BLOCK_SIZE,
            max_num_seqs=max(ROWS),
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            enable_prefix_caching=False,
        )

    def close(self) -> None:
        self._ops.close()
        for pool in self._pools:
            pool.close()

    def measure(self, rows: int) -> StepTimes:
        parts = self._by_hand(rows)
        operations = self._operations.take()
        between_s, whole_s = asyncio.run(self._by_shell(rows))
        medians = {name: 1e6 * median(values) for name, values in parts.items()}
        call = medians.pop("native call")
        total_ns = sum(operations.values())
        # Sums of all steps become shares of the median call, of which they are nearly all.
        inside = sum(parts["inside"]) / sum(parts["native call"]) if total_ns else 0.0
        medians.pop("inside")
        scale = call * inside / total_ns if total_ns else 0.0
        return StepTimes(
            rows=rows,
            context=PROMPT_TOKENS + self._num_steps // 2,
            operations={name: scale * ns for name, ns in operations.items()},
            call=call,
            between=1e6 * between_s,
            whole=1e6 * whole_s,
            beside=medians,
        )

    def _requests(self, count: int) -> list[Request]:
        rng = random.Random(count)
        return [
            Request(
                id=str(number),
                prompt_tokens=tuple(rng.randrange(100, self._vocab_size) for _ in range(PROMPT_TOKENS)),
                sampling=SamplingParams(max_tokens=self._num_steps, temperature=0.0, ignore_eos=True),
                max_tokens=self._num_steps,
                seed=number,
            )
            for number in range(count)
        ]

    def _by_hand(self, rows: int) -> dict[str, list[float]]:
        """Seconds of each part, for every step that decodes all rows. As in the running engine, a step is planned and
        prepared while the one before it is not committed yet."""
        core, runner = EngineCore(self._config), self._make_runner()
        core.handle(Submit(tuple(self._requests(rows))), 0.0)
        found: dict[str, list[float]] = defaultdict(list)

        def timed(part: str, work: Callable[[], Any]) -> Any:
            start_s = time.perf_counter()
            outcome = work()
            times[part] = time.perf_counter() - start_s
            return outcome

        uncommitted: StepResult | None = None
        step: PreparedStep | None = None
        while core.has_work:
            times: dict[str, float] = {}
            is_decode = step is not None and len(step.plan.rows) == rows and step.plan.num_tokens == rows
            result, call_s = None, 0.0
            if step is not None:
                with self._operations.timed(is_decode):
                    step.work()
                assert isinstance(step.work, NativeCall), "a plain step is a single call"
                call_start_s, call_end_s = step.work.span_s
                call_s = call_end_s - call_start_s
                result = timed("results", partial(runner.collect, step, call_s))
            if uncommitted is not None:
                timed("commit", partial(core.commit, uncommitted, 0.0))
            plan = timed("plan", partial(core.plan, 0.0))
            step = None if plan is None else timed("arrays", partial(runner.prepare, plan))
            uncommitted = result
            if is_decode and len(times) == 4:
                times |= {"native call": call_s, "inside": self._operations.last_step_s}
                for name, seconds in times.items():
                    found[name].append(seconds)
        return found

    async def _by_shell(self, rows: int) -> tuple[float, float]:
        """Seconds from one native call to the next, and of a decode step from one message of the engine to the next."""
        engine_end, front_end = local_link()
        executor = ModelExecutor(self._make_runner(), self._ops.open_queue(lambda: False), on_close=lambda: None)
        shell = asyncio.create_task(build_engine(self._config, executor, engine_end, MonotonicClock()).run())
        self._program.calls.clear()
        await front_end.send(Submit(tuple(self._requests(rows))))
        num_open, gaps, last_s = rows, [], 0.0
        while num_open:
            message = await front_end.receive()
            assert isinstance(message, StepOutputs), message
            now_s = time.perf_counter()
            if len(message.outputs) == rows and last_s:
                gaps.append(now_s - last_s)
            last_s = now_s if len(message.outputs) == rows else 0.0
            num_open -= sum(output.finish_reason is not None for output in message.outputs)
        front_end.close()
        await shell
        executor.close()
        spans = [call.span_s for call in self._program.calls[-len(gaps) :]]
        between = [later[0] - earlier[1] for earlier, later in pairwise(spans)]
        return median(between), median(gaps)


class _Operations:
    """Names the operations of a program by their role in the model, and adds up their times."""

    def __init__(self, program: NativeProgram, model: Model) -> None:
        self._program = program
        self._names = operation_names(program, model)
        self._step_ns = np.zeros(len(self._names), np.int64)
        self._sum_ns = np.zeros(len(self._names), np.int64)
        self.last_step_s = 0.0

    @contextmanager
    def timed(self, is_wanted: bool) -> Iterator[None]:
        self._step_ns[:] = 0
        self._program.time_operations(self._step_ns if is_wanted else None)
        yield
        self._program.time_operations(None)
        self._sum_ns += self._step_ns
        self.last_step_s = float(self._step_ns.sum()) / 1e9

    def take(self) -> dict[str, float]:
        """Nanoseconds by name since the last call."""
        found: dict[str, float] = defaultdict(float)
        for name, ns in zip(self._names, self._sum_ns.tolist(), strict=True):
            found[name] += ns
        self._sum_ns[:] = 0
        return dict(found)


def operation_names(program: NativeProgram, model: Model) -> list[str]:
    """Of each operation of the model's program by its role, and of the draws after them."""
    roles = {id(model.weights.head): "linear lm_head"}
    for layer in model.weights.layers:
        of_experts = "shared " if layer.moe is not None else ""
        linears = {name: getattr(layer, name) for name in ("qkv", "q_up", "output", "mixer_in", "mixer_out")}
        linears |= {f"{of_experts}gate_up": layer.gate_up, f"{of_experts}down": layer.down}
        if layer.moe is not None:
            linears |= {"router": layer.moe.router, "shared gate": layer.moe.mix}
        roles |= {id(linear.weight): f"linear {role}" for role, linear in linears.items() if linear is not None}
    return [*(_name(operation, roles) for operation in program.operations), "draw"]


def _name(operation: Operation, roles: dict[int, str]) -> str:
    """A linear by the role of its weight (which the embedding may share with the head); others by their kind."""
    kind = operation.kind.replace("_", " ")
    return roles.get(id(operation.weight), kind) if kind.startswith("linear") else kind


def _served(path: Path, text: TextModel, threads: int | None) -> list[ServedTimes]:
    words = text.tokenizer.decode([token % 1000 + 1000 for token in range(PROMPT_TOKENS)])
    encode_s = median(_seconds(lambda: text.tokenizer.encode(words)) for _ in range(9))
    command = [sys.executable, "-m", "tokenmill.cli.main", "serve", str(path), "--log-level", "warning"]
    command += [] if threads is None else ["--threads", str(threads)]
    found = []
    with Server(command, os.environ) as server:
        rng = random.Random(0)
        for streams in SERVED_STREAMS:
            prompts = [[rng.randrange(1000, 10000) for _ in range(PROMPT_TOKENS)] for _ in range(2 * streams)]
            asyncio.run(run_streams(server.port, prompts[streams:], 8))
            before = server.cpu_seconds()
            seen = asyncio.run(run_streams(server.port, prompts[:streams], SERVED_NEW_TOKENS))
            after = server.cpu_seconds()
            num_tokens = streams * SERVED_NEW_TOKENS
            found.append(
                ServedTimes(
                    streams=streams,
                    prompt_tokens=PROMPT_TOKENS,
                    new_tokens=SERVED_NEW_TOKENS,
                    first_token=1e6 * median(times[0] for times in seen),
                    between_tokens=1e6 * median((times[-1] - times[0]) / (SERVED_NEW_TOKENS - 1) for times in seen),
                    encode=1e6 * encode_s,
                    processes={name: 1e6 * (after[name] - before[name]) / num_tokens for name in before},
                    parts=_front_end_parts(text, streams),
                )
            )
    return found


def _front_end_parts(text: TextModel, streams: int) -> dict[str, float]:
    """Microseconds of a token in what can be run alone: reading the engine's message, and tokens to text."""
    sampling = SamplingParams(max_tokens=SERVED_NEW_TOKENS, temperature=0.0)
    requests = [Request(str(n), (1,), sampling, SERVED_NEW_TOKENS, n) for n in range(streams)]
    outputs = tuple(Output(request.id, (1000 + n,), num_output=n) for n, request in enumerate(requests))
    data = encode(StepOutputs(outputs, EngineStats(), 0.0), 0.0)
    read_s = median(_seconds(lambda: decode(data, 0.0)) for _ in range(99)) / streams
    choices = [Choice(0, request, text.tokenizer) for request in requests]
    deltas = [[Delta(request.id, [1000 + step]) for request in requests] for step in range(99)]

    def push(step: Sequence[Delta]) -> None:
        for choice, delta in zip(choices, step, strict=True):
            choice.push(delta)

    push_s = median(_seconds(partial(push, step)) for step in deltas) / streams
    return {"reading the engine's message": 1e6 * read_s, "tokens to text": 1e6 * push_s}


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s

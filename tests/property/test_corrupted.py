"""A request whose logits are not finite ends with an error, and no other request notices.

Random mixes over a tiny model whose embedding of one token is not a number, through the real engine core and worker:
greedy, sampled and adjusted rows, logprobs of outputs and of prompts, shared prefixes, chunks, steps in flight.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tiny import tiny_checkpoint
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.events import Output, Submit
from tokenmill.core.request import PoolingParams, Request, SamplingParams
from tokenmill.engine.commit import CORRUPTED
from tokenmill.engine.core import EngineCore
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.library import ISAS, TILE_ISAS, available_isas
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker import build
from tokenmill.worker.build import Worker
from workers import build_vector_worker, build_worker

BAD = 7
CONFIG = EngineConfig(
    groups=full_groups(60),
    max_model_len=128,
    block_size=8,
    max_num_batched_tokens=24,
    max_num_seqs=6,
    steps_in_flight=2,
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 5, "min_p": 0.1, "logprobs": 5},
    {"temperature": 0, "logprobs": 20},
    {"temperature": 1.0, "allowed_token_ids": (3, 4, 5), "logprobs": 0},
    {"temperature": 0, "repetition_penalty": 1e-39, "frequency_penalty": 0.5},
    {"temperature": 1.0, "logit_bias": ((BAD, -100.0),), "min_tokens": 4, "stop_token_ids": (1, 2)},
    {"temperature": 0, "prompt_logprobs": 3, "logprobs": 3},
)


def _backends() -> Iterator[Any]:
    yield "numpy"
    if available() is None:
        yield from available_isas((*ISAS, *TILE_ISAS))


@pytest.fixture(params=_backends())
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "spoiled")
    return ReferenceOps() if request.param == "numpy" else NativeOps(2, request.param)


def _spoiled() -> Any:
    checkpoint = tiny_checkpoint()
    (name,) = (name for name in checkpoint.tensors if "embed" in name)
    bad = checkpoint.tensors[name]
    values = np.frombuffer(bad.data, np.float32).reshape(bad.shape).copy()
    values[BAD, 5] = np.nan
    checkpoint.tensors[name] = replace(bad, data=memoryview(values.reshape(-1).view(np.uint8)))
    return checkpoint


def _request(name: str, rng: random.Random, shared: tuple[int, ...], is_bad: bool) -> Request:
    tail = [rng.choice([token for token in range(96) if token != BAD]) for _ in range(rng.randint(1, 30))]
    if is_bad:
        tail[rng.randrange(len(tail))] = BAD
    params = SamplingParams(max_tokens=rng.randint(4, 12), **rng.choice(SETTINGS))
    start = shared[: rng.choice((0, 8, 19, 40))]
    return Request(name, (*start, *tail), params, params.max_tokens or 1, rng.getrandbits(40))


def _run(worker: Worker, config: EngineConfig, requests: list[Request]) -> tuple[dict[str, list[Output]], EngineCore]:
    core, results, seen = EngineCore(config), deque[Any](), {request.id: list[Output]() for request in requests}
    left = deque(requests)
    for turn in range(10_000):
        outputs: list[Output] = []
        if left and turn % 2 == 0:
            outputs += core.handle(Submit((left.popleft(),)), 0.0).outputs
        with np.errstate(all="ignore"):
            while (plan := core.plan(0.0)) is not None:
                results.append(worker.executor.execute_now(plan))
        if results:
            outputs += core.commit(results.popleft(), 0.0).outputs
        core.check()
        for output in outputs:
            seen[output.request_id].append(output)
        if not left and not core.has_work:
            return seen, core
    raise AssertionError("does not end")


def _essence(outputs: list[Output]) -> Any:
    tokens = [token for output in outputs for token in output.tokens]
    return tokens, outputs[-1].finish_reason, [output.logprobs for output in outputs if output.logprobs]


def test_only_their_own_requests_end_with_an_error(ops: Any) -> None:
    """Thirty requests, a third of them with the token: those fail, others give what they give alone."""
    worker = build_worker(
        _spoiled(), ops, max_model_len=128, groups=full_groups(60), block_size=8, kv_dtype=ops.kv_dtype,
        max_num_batched_tokens=128, max_num_seqs=6,
    )  # fmt: skip
    rng = random.Random(3)
    shared = tuple(rng.choice(range(8, 96)) for _ in range(40))
    requests = [_request(f"r{i}", rng, shared, i % 3 == 0) for i in range(30)]
    seen, core = _run(worker, CONFIG, requests)
    alone = replace(CONFIG, enable_prefix_caching=False, max_num_seqs=1, max_num_batched_tokens=128)
    num_corrupted = 0
    for request in requests:
        outputs = seen[request.id]
        last = outputs[-1]
        drew_it = BAD in [token for output in outputs for token in output.tokens]
        if BAD in request.prompt_tokens:
            assert (last.finish_reason, last.error, last.error_kind) == ("error", CORRUPTED, "internal_error")
            assert not last.tokens and len(outputs) == 1
        elif not drew_it:
            expected, _ = _run(worker, alone, [request])
            got, wanted = _essence(outputs), _essence(expected[request.id])
            assert got[:2] == wanted[:2]
            assert isinstance(ops, ReferenceOps) or got == wanted
        num_corrupted += last.finish_reason == "error"
    assert core.stats().num_corrupted == num_corrupted
    assert core.stats().num_held_blocks == 0
    worker.executor.close()


@pytest.mark.parametrize("how", ["last", "mean"])
def test_a_vector_that_is_not_finite_is_an_error(ops: Any, how: str) -> None:
    """Its request fails, one beside it gets its vector."""
    worker = build_vector_worker(
        _spoiled(), ops, max_model_len=64, groups=full_groups(20), block_size=8, kv_dtype=ops.kv_dtype
    )
    params = SamplingParams(max_tokens=1)
    pooling = PoolingParams(how, activation="unit")
    prompts = {"good": (3, 4, 5), "bad": (3, BAD, 5)}
    requests = [Request(name, prompt, params, 1, 0, pooling=pooling) for name, prompt in prompts.items()]
    seen, _ = _run(worker, replace(CONFIG, groups=full_groups(20), max_model_len=64), requests)
    assert np.isfinite(np.frombuffer(seen["good"][-1].vector, np.float32)).all()
    assert seen["bad"][-1].error == CORRUPTED and not seen["bad"][-1].vector
    worker.executor.close()

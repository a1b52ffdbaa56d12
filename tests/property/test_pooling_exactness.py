"""Exactness of vectors: what a pooling request gets does not depend on what runs beside it, how its prompt is chunked,
whether its prefix came from the cache, nor on threads and instruction sets.

Random mixes run through the real engine core and worker, and every vector is compared, bit for bit, with that of the
request alone. On numpy, whose BLAS sums in an order of its own, within what that and KV rounded to float16 make.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny import VOCAB_SIZE, tensor, tiny_checkpoint
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.events import Submit
from tokenmill.core.request import PoolingParams, Request, SamplingParams
from tokenmill.engine.core import EngineCore
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.models.encoder import expected_shapes
from tokenmill.models.encoder_config import encoder_config
from tokenmill.models.roles import expected_shapes as decoder_shapes
from tokenmill.models.vectors import vector_config
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.library import available_isas, family_isas
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker import build
from tokenmill.worker.build import Worker
from workers import build_vector_worker

LONGEST = 320
needs_native = pytest.mark.skipif(available() is not None, reason=str(available()))


BERT, SCORER, AHEAD = "BertModel", "ModernBertForSequenceClassification", "Gemma3TextModel"
ARCHITECTURES = (BERT, "ModernBertModel", "NomicBertModel", "GteModel", SCORER, AHEAD)


def tiny_encoder(architecture: str = BERT, seed: int = 0) -> Checkpoint:
    """An encoder of a few thousand weights, with no file behind it. ModernBERT's, and the decoder that sees ahead, have
    layers with and without a window; the one that scores does so from the mean of its states."""
    metadata = {
        "architectures": [architecture], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "vocab_size": VOCAB_SIZE, "max_position_embeddings": LONGEST, "type_vocab_size": 2,
        "local_attention": 40, "classifier_pooling": "mean", "num_labels": 1, "num_key_value_heads": 1,
        "head_dim": 32, "sliding_window": 40, "use_bidirectional_attention": True, "sliding_window_pattern": 2,
    }  # fmt: skip
    checkpoint = Checkpoint("hf", Path("tiny-bert"), metadata, {})
    if architecture == AHEAD:
        shapes = decoder_shapes("hf", vector_config(checkpoint))
        return Checkpoint("hf", Path("tiny-bert"), metadata, _values(((n, n, s) for n, s in shapes.items()), seed))
    name = f"{encoder_config(checkpoint).family.names['embed']}.weight"
    checkpoint.tensors = {} if architecture == SCORER else {name: None}  # type: ignore[dict-item]
    return Checkpoint("hf", Path("tiny-bert"), metadata, _values(expected_shapes(encoder_config(checkpoint)), seed))


def _values(shapes: Iterable[tuple[str, str, tuple[int, ...]]], seed: int) -> dict[str, Any]:
    """Random tensors of (role, name, shape)."""
    tensors = {}
    for index, (role, name, shape) in enumerate(shapes):
        rng = np.random.default_rng([seed, index])
        values = rng.normal(size=shape) * (shape[-1] ** -0.5 * 3 if len(shape) > 1 else 0.2)
        tensors[name] = tensor(name, values + 1 if "norm" in role and name.endswith("weight") else values)
    return tensors


@pytest.fixture
def make_worker(monkeypatch):
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "tiny")
    made: list[Worker] = []

    def make(ops, checkpoint: Checkpoint, quantization: str | None = None) -> Worker:
        is_encoder = checkpoint.metadata["architectures"][0] in ARCHITECTURES
        made.append(
            build_vector_worker(
                checkpoint,
                ops,
                max_model_len=LONGEST if is_encoder else 128,
                groups=full_groups(0 if is_encoder else 96),
                max_num_batched_tokens=2 * LONGEST,
                max_num_seqs=16,
                quantization=quantization,
            )
        )
        return made[-1]

    yield make
    for worker in made:
        worker.executor.close()


Arrivals = list[tuple[int, Request]]
"""(round, request)"""


def run(worker: Worker, config: EngineConfig, arrivals: Arrivals) -> tuple[dict[str, bytes], EngineCore]:
    core, vectors, results = EngineCore(config), {}, deque()
    waiting = deque(sorted(arrivals, key=lambda pair: pair[0]))
    for round_number in range(100_000):
        while waiting and waiting[0][0] <= round_number:
            assert not core.handle(Submit((waiting.popleft()[1],)), 0.0).outputs
        while (plan := core.plan(0.0)) is not None:
            results.append(worker.executor.execute_now(plan))
        if results:
            for output in core.commit(results.popleft(), 0.0).outputs:
                assert output.finish_reason == "stop" and output.vector, output
                vectors[output.request_id] = output.vector
        core.check()
        if not (waiting or core.has_work):
            return vectors, core
    raise AssertionError("the mix did not end")


def random_mix(rng: random.Random, config: EngineConfig, hows: list[str]) -> Arrivals:
    prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(config.max_model_len)] for _ in range(2)]
    arrivals = []
    for number in range(12):
        shared = rng.randrange(config.max_model_len)
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, config.max_model_len - shared + 1))]
        tokens = tuple(rng.choice(prefixes)[:shared] + own)
        params = PoolingParams(
            rng.choice(hows),
            rng.choice([0, 0, 24]),
            rng.choice(["", "unit"]),
            rng.choice([0, rng.randrange(len(tokens))]),
        )
        request = Request(f"r{number}", tokens, SamplingParams(max_tokens=1), 1, 0, pooling=params)
        arrivals.append((rng.randrange(12), request))
    return arrivals


def check(worker: Worker, config: EngineConfig, arrivals: Arrivals, exact: bool) -> EngineCore:
    alone = EngineConfig(
        groups=full_groups(config.groups[0].num_blocks and 96),
        max_model_len=config.max_model_len,
        max_num_seqs=1,
        max_num_batched_tokens=2 * LONGEST,
        enable_prefix_caching=False,
        steps_in_flight=1,
    )
    got, core = run(worker, config, arrivals)
    for _, request in arrivals:
        want = run(worker, alone, [(0, request)])[0][request.id]
        if exact:
            assert got[request.id] == want, request
        else:
            ours, theirs = np.frombuffer(got[request.id], np.float32), np.frombuffer(want, np.float32)
            np.testing.assert_allclose(ours, theirs, atol=1e-3 * max(1, np.abs(theirs).max()))
    return core


def decoder_mixes(worker: Worker, seeds: range, exact: bool) -> None:
    hits = 0
    for seed in seeds:
        rng = random.Random(seed)
        config = EngineConfig(
            groups=full_groups(rng.choice([9, 16, 96])),
            max_model_len=128,
            max_num_seqs=rng.choice([1, 3, 8]),
            max_num_batched_tokens=rng.choice([8, 24, 64]),
            enable_prefix_caching=rng.random() < 0.8,
            steps_in_flight=rng.choice([1, 2, 3]),
        )
        core = check(worker, config, random_mix(rng, config, ["last", "cls", "mean"]), exact)
        hits += core.stats().prefix_hits
    assert hits, "mixes that never share a prefix prove too little"


def encoder_mixes(worker: Worker, seeds: range, exact: bool, hows: Sequence[str] = ("last", "cls", "mean")) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        config = EngineConfig(
            groups=full_groups(0),
            max_model_len=LONGEST,
            max_num_seqs=rng.choice([1, 3, 16]),
            max_num_batched_tokens=rng.choice([LONGEST, 2 * LONGEST]),
            enable_prefix_caching=False,
            steps_in_flight=rng.choice([1, 2, 3]),
        )
        check(worker, config, random_mix(rng, config, list(hows)), exact)


def test_mixes_on_numpy(make_worker):
    decoder_mixes(make_worker(ReferenceOps(), tiny_checkpoint()), range(2), exact=False)
    encoder_mixes(make_worker(ReferenceOps(), tiny_encoder()), range(1), exact=False)


@pytest.mark.exact
@needs_native
def test_decoders_bit_for_bit(make_worker):
    decoder_mixes(make_worker(NativeOps(), tiny_checkpoint()), range(20, 32), exact=True)


@pytest.mark.exact
@needs_native
@pytest.mark.parametrize("quantization", [None, "q8_0"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_encoders_bit_for_bit(make_worker, architecture, quantization):
    worker = make_worker(NativeOps(), tiny_encoder(architecture), quantization)
    hows = ("score",) if architecture == SCORER else ("last", "cls", "mean")
    encoder_mixes(worker, range(40, 43), exact=True, hows=hows)


@pytest.mark.exact
@needs_native
@pytest.mark.parametrize(
    ("architecture", "quantization"),
    [(BERT, None), (BERT, "q8_0"), ("ModernBertModel", "q8_0"), (SCORER, None), (AHEAD, None)],
)
def test_no_thread_instruction_set_or_fusing_changes_a_bit(make_worker, architecture, quantization):
    """Inputs of more than one span of attention, on every variant of the kernels that can run here."""
    config = EngineConfig(groups=full_groups(0), max_model_len=LONGEST, max_num_batched_tokens=2 * LONGEST)
    arrivals = random_mix(random.Random(7), config, ["score"] if architecture == SCORER else ["mean", "cls"])
    assert max(len(request.prompt_tokens) for _, request in arrivals) > 256
    want, _ = run(make_worker(NativeOps(2), tiny_encoder(architecture), quantization), config, arrivals)
    for isa in available_isas(family_isas(NativeOps(1).isa)):
        got, _ = run(
            make_worker(NativeOps(1, isa, fuse=False), tiny_encoder(architecture), quantization), config, arrivals
        )
        assert got == want, isa
    got, _ = run(make_worker(NativeOps(3), tiny_encoder(architecture), quantization), config, arrivals)
    assert got == want

"""A model's own layer for further tokens drafts what its definition says, and changes no token (models/mtp.py)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_draft_model import check
from test_drafts_exact import all_are_verified  # noqa: F401, a fixture
from test_exactness import BLOCK_SIZE, NUM_BLOCKS

from tiny import VOCAB_SIZE, tensor
from tiny_latent import latent_checkpoint
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import BadCheckpoint
from tokenmill.core.request import SamplingParams
from tokenmill.core.speculation import MTP, SpeculationConfig
from tokenmill.core.step import Introduction, PlanRow, StepPlan
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.models.config import config_from_checkpoint
from tokenmill.models.decoder import AuxHiddenStates
from tokenmill.models.loader import load_model
from tokenmill.models.mtp import mtp_checkpoint
from tokenmill.ops.api import StepBatch, StepLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker import build
from tokenmill.worker.build import Worker, load_drafter
from tokenmill.worker.spec import WorkerSpec
from workers import build_worker

needs_native = pytest.mark.skipif(available() is not None, reason=str(available()))
LIMITS = {"max_model_len": 128, "max_num_batched_tokens": 128, "max_num_seqs": 8, "block_size": BLOCK_SIZE}
SPECULATION = SpeculationConfig((MTP,), num_speculative_tokens=5)
EPS = 1e-6


def mtp_model(*, seed: int = 0, with_ends: bool = True) -> Checkpoint:
    """With a layer for further tokens behind its own; with_ends: which has embeddings and a head of its own."""
    checkpoint = latent_checkpoint("V3", seed=seed)
    width, last = 64, config_from_checkpoint(checkpoint).num_layers
    rng, before = np.random.default_rng([7, seed]), f"model.layers.{last - 1}."
    shapes = {
        each.removeprefix(before): tuple(found.shape)
        for each, found in checkpoint.tensors.items()
        if each.startswith(before)
    }
    shapes |= {"enorm.weight": (width,), "hnorm.weight": (width,), "eh_proj.weight": (width, 2 * width)}
    shapes |= {"shared_head.norm.weight": (width,)}
    if with_ends:
        shapes |= {f"{each}.weight": (VOCAB_SIZE, width) for each in ("embed_tokens", "shared_head.head")}
    tensors = dict(checkpoint.tensors)
    for each, shape in shapes.items():
        values = rng.normal(size=shape) * shape[-1] ** -0.5 * 2 if len(shape) > 1 else 1 + 0.1 * rng.normal(size=shape)
        tensors[f"model.layers.{last}.{each}"] = tensor(f"model.layers.{last}.{each}", values)
    return replace(checkpoint, metadata=checkpoint.metadata | {"num_nextn_predict_layers": 1}, tensors=tensors)


def values(found: Any) -> np.ndarray:
    return np.frombuffer(found.data, np.float32).reshape(found.shape).astype(np.float64)


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def states_of(checkpoint: Checkpoint, tokens: list[int], *, is_normed: bool) -> tuple[np.ndarray, np.ndarray]:
    """A plain model's last states at each token, behind its final norm or before it, and the logits of the last."""
    ops, count = ReferenceOps(), len(tokens)
    model = load_model(checkpoint, ops, kv_dtype="f32")
    aux = AuxHiddenStates.of(model.config, count, () if is_normed else (model.config.num_layers,), is_normed=is_normed)
    pool, num_blocks = ops.new_pool(model.kv_group, 16), -(-count // BLOCK_SIZE)
    program = ops.compile(
        lambda recorder, batch: model.forward(recorder, pool.kv, batch, aux), StepLimits(count, 1, num_blocks, 1)
    )
    places = np.arange(count, dtype=np.int32)
    ends, rows = np.array([0, count], np.int32), np.array([count - 1], np.int32)
    tables = np.arange(num_blocks, dtype=np.int32)[None]
    (logits,) = program(StepBatch(np.array(tokens, np.int32), places, ends, ends[1:], tables, rows))
    return aux.arrays[0].astype(np.float64), logits


def guesses(checkpoint: Checkpoint, tokens: list[int], num: int) -> list[int]:
    """By the definition: what follows tokens, the last of which the target has not seen yet. Inputs of the layer are
    the embeddings of a plain model of one layer, which others tests compare with transformers."""
    view = mtp_checkpoint(checkpoint)
    part = {each: values(view.tensors[f"mtp.{each}.weight"]) for each in ("enorm", "hnorm", "eh_proj")}
    embed = values(view.tensors["model.embed_tokens.weight"])
    num_seen = len(tokens) - 1
    given = states_of(checkpoint, tokens[:-1], is_normed=True)[0]
    tokens = list(tokens)
    for _ in range(num):
        both = [normed(embed[tokens[1:]], part["enorm"]), normed(given, part["hnorm"])]
        x = np.concatenate(both, axis=1) @ part["eh_proj"].T
        tensors = {each: found for each, found in view.tensors.items() if not each.startswith("mtp.")}
        tensors["model.embed_tokens.weight"] = tensor("model.embed_tokens.weight", x)
        tensors["lm_head.weight"] = view.tensors["lm_head.weight"]
        layer = replace(view, metadata=view.metadata | {"vocab_size": len(x)}, tensors=tensors)
        head = values(tensors.pop("lm_head.weight"))
        tensors["lm_head.weight"] = tensor("lm_head.weight", np.zeros_like(x))
        made, _ = states_of(layer, list(range(len(x))), is_normed=False)
        logits = normed(made[-1], values(view.tensors["model.norm.weight"])) @ head.T
        tokens.append(int(logits.argmax()))
        given = np.concatenate([given, made[-1:]])
    return tokens[num_seen + 1 :]


@pytest.fixture
def make_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Worker]]:
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "tiny")
    made: list[Worker] = []

    def make(checkpoint: Checkpoint, make_ops: Callable[[], Any], *, is_drafting: bool = True, **how: Any) -> Worker:
        ops, groups = make_ops(), full_groups(NUM_BLOCKS)
        how = {"groups": groups, **LIMITS, **how, "speculation": SPECULATION if is_drafting else None}
        if is_drafting:
            spec = WorkerSpec(EngineConfig(groups, **LIMITS, speculation=SPECULATION), kv_dtype=how["kv_dtype"])
            how["drafter"] = load_drafter(mtp_checkpoint(checkpoint), ops, spec)
        made.append(build_worker(checkpoint, ops, **how))
        return made[-1]

    yield make
    for worker in made:
        worker.executor.close()


@pytest.mark.parametrize("with_ends", [True, False])
def test_it_drafts_what_its_definition_says(make_worker: Callable[..., Worker], with_ends: bool) -> None:
    """A prompt in two chunks, drafts that are verified, and a second request that shares blocks of the first."""
    checkpoint = mtp_model(with_ends=with_ends)
    worker = make_worker(checkpoint, ReferenceOps, kv_dtype="f32")
    rng = random.Random(3)
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(40))
    tokens = list(prompt)

    def run(step: int, row: PlanRow) -> tuple[int, ...]:
        (given,) = worker.executor.execute_now(StepPlan(step, (row,))).rows
        tokens.extend(given.tokens)
        if not given.tokens:
            return ()
        assert given.drafts is not None
        assert list(given.drafts.tokens) == guesses(checkpoint, tokens, 5)
        return given.drafts.tokens

    intro = Introduction(prompt, (), SamplingParams(temperature=0), 1, 0, ())
    run(0, PlanRow(0, 0, prompt[:25], blocks=(0, 1), intro=intro))
    drafts = run(1, PlanRow(0, 25, prompt[25:], blocks=(2,), sample=True))
    for step in range(2, 5):
        start = len(tokens) - 1
        blocks = (step + 1,) if step < 4 else ()
        drafts = run(step, PlanRow(0, start, tuple(tokens[-1:]), -1, blocks, sample=True, drafts=drafts))
    tokens = [*prompt[:32], *(rng.randrange(VOCAB_SIZE) for _ in range(4))]
    intro = replace(intro, prompt_tokens=tuple(tokens))
    (given,) = worker.executor.execute_now(
        StepPlan(5, (PlanRow(1, 32, tuple(tokens[32:]), blocks=(0, 1, 7), intro=intro, sample=True),), (0,))
    ).rows
    assert given.drafts is not None and len(given.drafts.tokens) == 5


@pytest.mark.exact
@needs_native
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_bit_for_bit(make_worker: Callable[..., Worker], kv_dtype: str) -> None:
    """Mixes with preemption, hits and chunks give the tokens and logprobs of runs without it."""
    checkpoint = mtp_model()
    plain = make_worker(checkpoint, NativeOps, is_drafting=False, kv_dtype=kv_dtype)
    worker = make_worker(checkpoint, NativeOps, kv_dtype=kv_dtype)
    assert check(worker, plain, source=MTP).num_drafted > 50


def test_a_file_without_it_is_one_line() -> None:
    with pytest.raises(BadCheckpoint, match="no layer that predicts further tokens") as caught:
        mtp_checkpoint(latent_checkpoint("V3"))
    assert "\n" not in str(caught.value)
    damaged = mtp_model()
    name = "model.layers.3.eh_proj.weight"
    damaged.tensors[name] = tensor(name, np.zeros((64, 64)))
    spec = WorkerSpec(EngineConfig(full_groups(NUM_BLOCKS), **LIMITS, speculation=SPECULATION), kv_dtype="f32")
    with pytest.raises(BadCheckpoint, match=r"eh_proj\.weight of its MTP layer is"):
        load_drafter(mtp_checkpoint(damaged), ReferenceOps(), spec)

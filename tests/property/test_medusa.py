"""Medusa heads draft what their definition says, and change no token (models/medusa.py)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_draft_model import Counting, check, requests
from test_drafts_exact import all_are_verified  # noqa: F401, a fixture
from test_exactness import BLOCK_SIZE, NUM_BLOCKS, Mix, run
from test_mtp import states_of

from medusa_heads import AUTHORS, VLLM, Arrays, random_heads, write_heads
from tiny import VOCAB_SIZE, tensor, tiny_checkpoint
from tiny_latent import latent_checkpoint
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import BadCheckpoint
from tokenmill.core.request import SamplingParams
from tokenmill.core.speculation import MEDUSA, SpeculationConfig
from tokenmill.core.step import Introduction, PlanRow, StepPlan
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.models.config import config_from_checkpoint
from tokenmill.models.medusa import open_medusa
from tokenmill.ops.draws import NEVER, SampleBatch
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker import build
from tokenmill.worker.build import Worker, load_drafter
from tokenmill.worker.spec import WorkerSpec
from workers import build_worker

needs_native = pytest.mark.skipif(available() is not None, reason=str(available()))
LIMITS = {"max_model_len": 128, "max_num_batched_tokens": 128, "max_num_seqs": 8, "block_size": BLOCK_SIZE}
SPECULATION = SpeculationConfig((MEDUSA,), num_speculative_tokens=5, model="heads")
SEED = 11


def of_a_part(arrays: Arrays, num_known: int, *, is_cut: bool) -> Arrays:
    """The same heads, which know so many tokens; is_cut: have no rows for others."""
    known = np.random.default_rng(7).permutation(VOCAB_SIZE)[:num_known]
    cut = {name: values[known] if is_cut and "lm_heads" in name else values for name, values in arrays.items()}
    return cut | {"token_map": known}


def logits_of(arrays: Arrays, head: int, state: np.ndarray) -> np.ndarray:
    """By the definition."""
    x, block = state.astype(np.float64), 0
    while (name := f"blocks.{head}.layers.{block}.weight") in arrays:
        y = arrays[name] @ x + arrays.get(f"blocks.{head}.layers.{block}.bias", 0.0)
        x, block = x + y / (1 + np.exp(-y)), block + 1
    logits, known = np.asarray(arrays[f"lm_heads.{head}.weight"] @ x, np.float32), arrays.get("token_map")
    if known is None:
        return logits
    spread = np.full(VOCAB_SIZE, NEVER, np.float32)
    spread[known] = logits if len(logits) == len(known) else logits[known]
    return spread


def guesses(
    checkpoint: Checkpoint, arrays: Arrays, tokens: list[int], num_prompt: int, temperature: float
) -> list[int]:
    """What the heads draw behind tokens, the last of which the target has not seen yet."""
    state = states_of(checkpoint, tokens[:-1], is_normed=True)[0][-1]
    num_heads = sum(name.startswith("lm_heads") for name in arrays)
    logits_LV = np.array([logits_of(arrays, head, state) for head in range(num_heads)])
    one_L = np.ones(num_heads)
    how = SampleBatch(
        temperature_L=(temperature * one_L).astype(np.float32),
        top_k_L=(0 * one_L).astype(np.int32),
        top_p_L=one_L.astype(np.float32),
        min_p_L=(0 * one_L).astype(np.float32),
        seed_L=(SEED * one_L).astype(np.uint64),
        choice_L=(0 * one_L).astype(np.int32),
        position_L=np.arange(num_heads, dtype=np.int32) + np.int32(len(tokens) - num_prompt),
    )
    return ReferenceOps().sample(logits_LV, how).tolist()


@pytest.fixture
def make_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Worker]]:
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "tiny")
    made: list[Worker] = []

    def make(checkpoint: Checkpoint, heads: Path | None, make_ops: Callable[[], Any], **how: Any) -> Worker:
        """heads: their folder; None: nothing drafts."""
        ops, groups = make_ops(), full_groups(NUM_BLOCKS)
        how = {"groups": groups, **LIMITS, "speculation": SPECULATION, **how}
        if heads is not None:
            spec = WorkerSpec(EngineConfig(groups, **LIMITS, speculation=SPECULATION), kv_dtype=how["kv_dtype"])
            how["drafter"] = load_drafter(open_medusa(heads, checkpoint), ops, spec)
        made.append(build_worker(checkpoint, ops, **how))
        return made[-1]

    yield make
    for worker in made:
        worker.executor.close()


@pytest.mark.parametrize(
    ("num_heads", "num_blocks", "form", "with_bias", "temperature", "part"),
    [
        (3, 1, AUTHORS, True, 0.0, None),
        (4, 2, VLLM, False, 0.0, None),
        (5, 1, VLLM, True, 0.9, None),
        (7, 3, AUTHORS, True, 1.3, None),
        (3, 1, VLLM, False, 0.0, True),
        (3, 1, VLLM, False, 0.7, False),
    ],
)
def test_they_draft_what_their_definition_says(
    make_worker: Callable[..., Worker],
    tmp_path: Path,
    num_heads: int,
    num_blocks: int,
    form: str,
    with_bias: bool,
    temperature: float,
    part: bool | None,
) -> None:
    """A prompt in two chunks, then drafts that are right in part, and a sequence that comes with output. Heads are as
    many as there are, and no more than were asked for; they race as the target does."""
    checkpoint = tiny_checkpoint(seed=num_heads)
    arrays = random_heads(checkpoint, num_heads, num_blocks, seed=num_blocks, with_bias=with_bias)
    more = {}
    if part is not None:
        arrays, more = of_a_part(arrays, 30, is_cut=part), {"truncated_vocab_size": 30}
    heads = write_heads(tmp_path / "heads", arrays, form, **more)
    worker = make_worker(checkpoint, heads, ReferenceOps, kv_dtype="f32")
    rng, num_prompt = random.Random(3), 40
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_prompt))
    tokens = list(prompt)

    def step(number: int, row: PlanRow) -> None:
        (given,) = worker.executor.execute_now(StepPlan(number, (row,))).rows
        tokens.extend(given.tokens)
        if row.sample:
            assert given.drafts is not None and given.drafts.source == MEDUSA
            expected = guesses(checkpoint, arrays, tokens, num_prompt, temperature)[:5]
            assert list(given.drafts.tokens) == expected and len(expected) == min(5, num_heads)
        else:
            assert given.drafts is None

    sampling = SamplingParams(temperature=temperature)
    intro = Introduction(prompt, (), sampling, SEED, 0, ())
    step(0, PlanRow(0, 0, prompt[:25], blocks=(0, 1), intro=intro))
    step(1, PlanRow(0, 25, prompt[25:], blocks=(2, 3, 4), sample=True))
    known = list(tokens)
    for number in range(2, 5):  # learn what comes, to say some of it
        step(number, PlanRow(0, len(tokens) - 1, tuple(tokens[-1:]), sample=True))
    drawn, tokens[:] = tokens[len(known) :], known
    intro = replace(intro, prompt_tokens=prompt, output_tokens=tuple(tokens[num_prompt:]))
    drafts = (*drawn[:2], (drawn[2] + 1) % VOCAB_SIZE, 1)
    row = PlanRow(1, 0, tuple(tokens), blocks=(5, 6, 7, 8), intro=intro, sample=True, drafts=drafts)
    step(5, row)
    assert tokens[len(known) :] == drawn[:3]


def test_each_sequence_goes_on_by_its_own_state(make_worker: Callable[..., Worker], tmp_path: Path) -> None:
    """Of several in a step, some end where a head is not sure; the others get what they get alone."""
    checkpoint = tiny_checkpoint()
    arrays, speculation = random_heads(checkpoint, 5, 1), replace(SPECULATION, p_min=0.15)
    heads = write_heads(tmp_path / "heads", arrays)
    worker = make_worker(checkpoint, heads, ReferenceOps, kv_dtype="f32", speculation=speculation)
    rng, rows = random.Random(5), []
    for number in range(8):
        prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(9 + number))
        intro = Introduction(prompt, (), SamplingParams(temperature=0), SEED, 0, ())
        rows.append(PlanRow(number, 0, prompt, blocks=(2 * number, 2 * number + 1), intro=intro, sample=True))
    counts = []
    for row, given in zip(rows, worker.executor.execute_now(StepPlan(0, tuple(rows))).rows, strict=True):
        drafts = () if given.drafts is None else given.drafts.tokens
        expected = guesses(checkpoint, arrays, [*row.tokens, *given.tokens], len(row.tokens), 0.0)
        assert list(drafts) == expected[: len(drafts)]
        counts.append(len(drafts))
    assert any(before < after for before, after in itertools.pairwise(counts)) and max(counts) > 1, counts


@pytest.mark.exact
@needs_native
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("is_latent", [False, True])
def test_bit_for_bit(make_worker: Callable[..., Worker], tmp_path: Path, kv_dtype: str, is_latent: bool) -> None:
    """Mixes with preemption, hits and chunks give the tokens and logprobs of runs without it; once with heads that know
    a part of the vocabulary."""
    checkpoint = latent_checkpoint("V3") if is_latent else tiny_checkpoint()
    arrays, more = random_heads(checkpoint, 4, 1), {}
    if is_latent:
        arrays, more = of_a_part(arrays, 60, is_cut=True), {"truncated_vocab_size": 60}
    heads = write_heads(tmp_path / "heads", arrays, **more)
    plain = make_worker(checkpoint, None, NativeOps, kv_dtype=kv_dtype)
    worker = make_worker(checkpoint, heads, NativeOps, kv_dtype=kv_dtype)
    assert check(worker, plain, source=MEDUSA).num_drafted > 50


def counting_model() -> Checkpoint:
    """Layers add nothing, and the head of token t + 1 is the embedding of token t: after a token comes the next."""
    checkpoint = tiny_checkpoint()
    tensors = dict(checkpoint.tensors)
    for name, found in checkpoint.tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensor(name, np.zeros(found.shape))
    embed = np.frombuffer(tensors["model.embed_tokens.weight"].data, np.float32).reshape(VOCAB_SIZE, -1)
    tensors["lm_head.weight"] = tensor("lm_head.weight", 3 * np.roll(embed, 1, axis=0))
    tensors["model.norm.weight"] = tensor("model.norm.weight", np.ones(embed.shape[1]))
    return replace(checkpoint, tensors=tensors)


def knowing_heads() -> Arrays:
    """Of the counting model: each knows how far its token is from the last."""
    checkpoint = counting_model()
    embed = np.frombuffer(checkpoint.tensors["model.embed_tokens.weight"].data, np.float32).reshape(VOCAB_SIZE, -1)
    width, arrays = embed.shape[1], {}
    for head in range(5):
        arrays[f"blocks.{head}.layers.0.weight"] = np.zeros((width, width), np.float32)
        arrays[f"lm_heads.{head}.weight"] = 3 * np.roll(embed, 2 + head, axis=0)
    return arrays


@pytest.mark.exact
@needs_native
@pytest.mark.parametrize("num_batched", [16, 128])
def test_heads_that_know_are_right(make_worker: Callable[..., Worker], tmp_path: Path, num_batched: int) -> None:
    """Every draft of a greedy request is accepted, through chunks, hits and preemption, as many as there is room for;
    of others, most."""
    heads = write_heads(tmp_path / "heads", knowing_heads(), AUTHORS)
    worker = make_worker(counting_model(), heads, NativeOps, kv_dtype="f16")
    for num_blocks in (NUM_BLOCKS, 17):
        for temperature, least in ((0.0, 1.0), (0.3, 0.9)):
            counting = Counting(worker.executor, MEDUSA)
            how = {**LIMITS, "max_num_batched_tokens": num_batched}
            config = EngineConfig(full_groups(num_blocks), **how, speculation=SPECULATION)
            sampling = SamplingParams(temperature=temperature)
            mix = Mix(config, [(0, replace(each, sampling=sampling)) for each in requests(8)], {})
            streams, core = run(replace(worker, executor=counting), mix)
            assert all(len(stream.tokens) == 64 for stream in streams.values())
            assert counting.accepted >= least and counting.num_tokens > 1.5 * counting.num_rows
            assert core.stats().prefix_hits
            assert (core.stats().num_preemptions > 0) == (num_blocks < NUM_BLOCKS)


@pytest.mark.parametrize("make_ops", [ReferenceOps, pytest.param(NativeOps, marks=needs_native)])
def test_heads_that_are_not_finite_draft_nothing(
    make_worker: Callable[..., Worker], tmp_path: Path, make_ops: Callable[[], Any]
) -> None:
    """What heads before them draft stands."""
    checkpoint = tiny_checkpoint()
    arrays = random_heads(checkpoint, 4, 1)
    arrays["blocks.2.layers.0.weight"][:] = np.nan
    worker = make_worker(checkpoint, write_heads(tmp_path / "heads", arrays), make_ops, kv_dtype="f32")
    prompt = (1, 2, 3, 4)
    intro = Introduction(prompt, (), SamplingParams(temperature=0), SEED, 0, ())
    row = PlanRow(0, 0, prompt, blocks=(0,), intro=intro, sample=True)
    (given,) = worker.executor.execute_now(StepPlan(0, (row,))).rows
    assert given.drafts is not None
    assert list(given.drafts.tokens) == guesses(checkpoint, arrays, [*prompt, *given.tokens], 4, 0.0)[:2]


def test_what_cannot_draft_is_one_line(tmp_path: Path) -> None:
    target = tiny_checkpoint()
    sound = random_heads(target, 2, 1)
    width = config_from_checkpoint(target).width
    narrow = {name: values[:, :32] if "heads" in name else values for name, values in sound.items()}
    fewer = {name: values[:-1] if "heads" in name else values for name, values in sound.items()}
    lacking = {name: values for name, values in sound.items() if name != "blocks.1.layers.0.weight"}
    bent = sound | {"blocks.1.layers.0.weight": np.zeros((width, width + 1), np.float32)}
    cases: list[tuple[Arrays, dict[str, Any], str]] = [
        (narrow, {}, rf"heads of {VOCAB_SIZE} times 32 .*; the model .* has {VOCAB_SIZE} times {width}"),
        (fewer, {}, rf"heads of {VOCAB_SIZE - 1} times {width} "),
        (lacking, {}, r"is missing blocks\.1\.layers\.0\.weight"),
        (bent, {}, rf"has misshaped blocks\.1\.layers\.0\.weight \({width}, {width + 1}\) instead of"),
        (sound, {"num_heads": 3}, r"is missing blocks\.2\.layers\.0\.weight, lm_heads\.2\.weight"),
        (sound, {"num_heads": "two"}, "num_heads of its config.json must be from 1 to 64, got 'two'"),
        (sound, {"num_hidden_layers": 0}, "num_hidden_layers of its config.json must be from 1 to 64, got 0"),
        (sound | {"norm.weight": np.ones(3, np.float32)}, {}, r"has unexpected norm\.weight"),
        (sound, {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "no folder of Medusa heads"),
    ]
    part, cut = of_a_part(sound, 30, is_cut=True), {"truncated_vocab_size": 30}
    twice, beyond = part["token_map"].copy(), part["token_map"].copy()
    twice[3], beyond[3] = twice[4], VOCAB_SIZE
    cases += [
        (sound, cut, "is missing token_map"),
        (part, {"truncated_vocab_size": 31}, rf"heads of 30 times {width} "),
        (part, {"truncated_vocab_size": VOCAB_SIZE + 1}, f"truncated_vocab_size .* from 1 to {VOCAB_SIZE}, got"),
        (part | {"token_map": twice}, cut, "token_map must lead each of its 30 tokens to another one"),
        (part | {"token_map": beyond}, cut, f"token_map must lead .* to {VOCAB_SIZE}"),
        (part | {"token_map": twice.astype(np.float32)}, cut, "token_map must be of int64 or int32, not of f32"),
    ]
    spec = WorkerSpec(EngineConfig(full_groups(NUM_BLOCKS), **LIMITS, speculation=SPECULATION), kv_dtype="f32")
    for number, (arrays, more, said) in enumerate(cases):
        folder = write_heads(tmp_path / str(number), arrays, **more)
        with pytest.raises(BadCheckpoint, match=said) as caught:
            load_drafter(open_medusa(folder, target), ReferenceOps(), spec)
        assert "\n" not in str(caught.value)
    folder = write_heads(tmp_path / "damaged", sound)
    (folder / "model.safetensors").write_bytes(b"\x01" * 40)
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
        open_medusa(folder, target)
    (folder / "model.safetensors").unlink()
    (folder / "medusa_lm_head.pt").write_bytes(b"\x80\x04")
    with pytest.raises(BadCheckpoint, match=r"medusa_lm_head\.pt alone, a pickle, .* as medusa_lm_head\.safetensors"):
        open_medusa(folder, target)


def test_further_heads_and_one_matrix_for_all(tmp_path: Path) -> None:
    """Heads that config.json does not count are left out, and heads may share their matrix."""
    target, ops = tiny_checkpoint(), ReferenceOps()
    arrays = random_heads(target, 3, 1)
    spec = WorkerSpec(EngineConfig(full_groups(NUM_BLOCKS), **LIMITS, speculation=SPECULATION), kv_dtype="f32")
    given = load_drafter(open_medusa(write_heads(tmp_path / "few", arrays, num_heads=2), target), ops, spec)
    assert len(given.heads) == 2
    shared = {name: values for name, values in arrays.items() if name not in ("lm_heads.1.weight", "lm_heads.2.weight")}
    folder = write_heads(tmp_path / "one", shared, num_heads=3, original_lm_head=True)
    given = load_drafter(open_medusa(folder, target), ops, spec)
    assert len({id(head.head) for head in given.heads}) == 1 and len(given.heads) == 3

"""EAGLE-3 heads draft what their definition says, and change no token (models/eagle3.py)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_draft_model import check
from test_drafts_exact import all_are_verified  # noqa: F401, a fixture
from test_exactness import BLOCK_SIZE, NUM_BLOCKS

from heads import BASE, EPS, HEAD_DIM, HEADS, KV_HEADS, NUM_DRAFTED, head_model, stored
from tiny import VOCAB_SIZE, tensor, tiny_checkpoint
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import BadCheckpoint
from tokenmill.core.request import SamplingParams
from tokenmill.core.speculation import EAGLE3, SpeculationConfig
from tokenmill.core.step import Introduction, PlanRow, StepPlan
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.models.decoder import AuxHiddenStates
from tokenmill.models.eagle3 import eagle3_checkpoint, is_eagle3
from tokenmill.models.loader import load_model
from tokenmill.ops.api import StepBatch, StepLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker import build
from tokenmill.worker.build import Worker, load_drafter
from tokenmill.worker.draft_length import DraftLength
from tokenmill.worker.draft_runs import DraftRunner
from tokenmill.worker.draft_states import Joining
from tokenmill.worker.spec import WorkerSpec
from workers import build_worker

needs_native = pytest.mark.skipif(available() is not None, reason=str(available()))
LIMITS = {"max_model_len": 128, "max_num_batched_tokens": 128, "max_num_seqs": 8, "block_size": BLOCK_SIZE}
SPECULATION = SpeculationConfig((EAGLE3,), num_speculative_tokens=5, model="tiny")
NUM_LAYERS, WIDTH = 5, 64


def target_model(**how: Any) -> Checkpoint:
    return tiny_checkpoint(num_layers=NUM_LAYERS, **how)


def values(found: Any) -> np.ndarray:
    return np.frombuffer(found.data, np.float32).reshape(found.shape).astype(np.float64)


def states_of(checkpoint: Checkpoint, tokens: list[int], layers: list[int]) -> list[np.ndarray]:
    """What test_models_decoder.py compares with a plain transformer's."""
    ops, count = ReferenceOps(), len(tokens)
    model = load_model(checkpoint, ops, kv_dtype="f32")
    aux = AuxHiddenStates.of(model.config, count, layers)
    pool, num_blocks = ops.new_pool(model.kv_group, 16), -(-count // BLOCK_SIZE)
    program = ops.compile(
        lambda recorder, batch: model.forward(recorder, pool.kv, batch, aux), StepLimits(count, 1, num_blocks, 0)
    )
    places, ends = np.arange(count, dtype=np.int32), np.array([0, count], np.int32)
    tables = np.arange(num_blocks, dtype=np.int32)[None]
    program(StepBatch(np.array(tokens, np.int32), places, ends, ends[1:], tables, places[:0]))
    return [array.astype(np.float64) for array in aux.arrays]


class PlainHead:
    """By the definition of the paper and of vLLM's model, a whole sequence at a time."""

    def __init__(self, head: Checkpoint, target: Checkpoint, layers: list[int]) -> None:
        named = {name.replace("midlayer.", "layers.0."): each for name, each in head.tensors.items()}
        self.part = {
            name.removeprefix("layers.0.").removesuffix(".weight"): values(each)
            for name, each in named.items()
            if each.kind == "f32"
        }
        self.part.setdefault("embed_tokens", values(target.tensors["model.embed_tokens.weight"]))
        self.places = np.arange(NUM_DRAFTED) + np.frombuffer(head.tensors["d2t"].data, np.int64)
        self.said, self.target, self.layers = head.metadata, target, layers

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * self.part[name]

    def features(self, tokens: list[int]) -> np.ndarray:
        each = states_of(self.target, tokens, self.layers)
        if self.said.get("fc_norm"):
            each = [self.norm(f"fc_norm.{index}", x) for index, x in enumerate(each)]
        x = np.concatenate(each, axis=1)
        return (self.norm("input_norm", x) if self.said.get("norm_before_fc") else x) @ self.part["fc"].T

    def layer(self, given: np.ndarray, tokens: list[int]) -> np.ndarray:
        part, count = self.part, len(tokens)
        hidden = self.norm("hidden_norm", given)
        x = np.concatenate([self.norm("input_layernorm", part["embed_tokens"][tokens]), hidden], axis=1)
        q, k, v = ((x @ part[f"self_attn.{name}_proj"].T).reshape(count, -1, HEAD_DIM).swapaxes(0, 1) for name in "qkv")
        q, k, repeats = self.turned(q), self.turned(k), HEADS // KV_HEADS
        scores = q @ k.repeat(repeats, axis=0).swapaxes(1, 2) / HEAD_DIM**0.5
        scores[:, ~np.tri(count, dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = weights / weights.sum(-1, keepdims=True) @ v.repeat(repeats, axis=0)
        x = hidden if self.said.get("norm_before_residual") else given
        x = x + mixed.swapaxes(0, 1).reshape(count, -1) @ part["self_attn.o_proj"].T
        inner = self.norm("post_attention_layernorm", x)
        gate = inner @ part["mlp.gate_proj"].T
        return x + (gate / (1 + np.exp(-gate)) * (inner @ part["mlp.up_proj"].T)) @ part["mlp.down_proj"].T

    def turned(self, x: np.ndarray) -> np.ndarray:
        half = HEAD_DIM // 2
        angles = np.arange(x.shape[1])[:, None] * BASE ** (-np.arange(half) / half)
        cos, sin, one, two = np.cos(angles), np.sin(angles), x[..., :half], x[..., half:]
        return np.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)

    def guesses(self, tokens: list[int], num: int) -> list[int]:
        """What follows tokens, the last of which the target has not seen yet."""
        num_seen, given, tokens = len(tokens) - 1, self.features(tokens[:-1]), list(tokens)
        for _ in range(num):
            x = self.layer(given, tokens[1:])
            normed = self.norm("norm", x)
            tokens.append(int(self.places[(normed[-1] @ self.part["lm_head"].T).argmax()]))
            given = np.concatenate([given, (normed if self.said.get("norm_output") else x)[-1:]])
        return tokens[num_seen + 1 :]


@pytest.fixture
def make_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Worker]]:
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "tiny")
    made: list[Worker] = []

    def make(
        target: Checkpoint, head: Checkpoint | None, make_ops: Callable[[], Any] = NativeOps, **how: Any
    ) -> Worker:
        """head: None: nothing drafts."""
        ops, groups = make_ops(), full_groups(NUM_BLOCKS)
        how = {"groups": groups, **LIMITS, **how}
        if head is not None:
            config = EngineConfig(groups, **LIMITS, speculation=SPECULATION)
            spec = WorkerSpec(config, kv_dtype=how["kv_dtype"])
            how["model"] = load_model(
                target, ops, max_model_len=LIMITS["max_model_len"], block_size=BLOCK_SIZE, kv_dtype=how["kv_dtype"]
            )
            how |= {"speculation": SPECULATION}
            how["drafter"] = load_drafter(eagle3_checkpoint(head, target), ops, spec, target=how["model"])
        made.append(build_worker(target, ops, **how))
        return made[-1]

    yield make
    for worker in made:
        worker.executor.close()


@pytest.mark.parametrize("backend", ["numpy", "native"])
@pytest.mark.parametrize(
    ("how", "layers"),
    [
        ({}, [2, 2, 2]),
        ({"form": "SpecForge", "layers": [1, 3, 4], "embeds": False}, [1, 3, 4]),
        ({"layers": [0, 2, 5], "norm_before_residual": True, "norm_before_fc": True}, [0, 2, 5]),
        ({"layers": [4, 1, 3], "fc_norm": True, "norm_output": True}, [1, 3, 4]),
        ({"form": "SpecForge", "layers": [1, 5], "norm_before_residual": True, "embeds": False}, [1, 5]),
    ],
)
def test_it_drafts_what_its_definition_says(
    make_worker: Callable[..., Worker], how: dict[str, Any], layers: list[int], backend: str
) -> None:
    """A prompt in two chunks, drafts that are verified, a second request in the blocks of the first that goes on with
    its drafts, whose KV must be that of the target's states, and a third one that shares some of them."""
    if backend == "native" and (why := available()) is not None:
        pytest.skip(why)
    target, head = target_model(), head_model(**how)
    plain = PlainHead(head, target, layers)
    worker = make_worker(target, head, ReferenceOps if backend == "numpy" else NativeOps, kv_dtype="f32")
    rng = random.Random(3)
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(40))
    tokens = list(prompt)

    def run(step: int, row: PlanRow) -> tuple[int, ...]:
        (given,) = worker.executor.execute_now(StepPlan(step, (row,))).rows
        tokens.extend(given.tokens)
        if not given.tokens:
            return ()
        assert given.drafts is not None and given.drafts.source == EAGLE3
        assert list(given.drafts.tokens) == plain.guesses(tokens, 5)
        return given.drafts.tokens

    intro = Introduction(prompt, (), SamplingParams(temperature=0), 1, 0, ())
    run(0, PlanRow(0, 0, prompt[:25], blocks=(0, 1), intro=intro))
    drafts = run(1, PlanRow(0, 25, prompt[25:], blocks=(2,), sample=True))
    for step in range(2, 5):
        start = len(tokens) - 1
        blocks = (step + 1,) if step < 4 else ()
        drafts = run(step, PlanRow(0, start, tuple(tokens[-1:]), -1, blocks, sample=True, drafts=drafts))
    going_on = (1, len(tokens) - 1, tuple(range(5)), [*tokens, *drafts[:3], 7])
    sharing = (2, 32, (0, 1, 7), [*prompt[:33], *(rng.randrange(VOCAB_SIZE) for _ in range(4))])
    for seq, start, blocks, tokens in (going_on, sharing):
        intro = replace(intro, prompt_tokens=tuple(tokens))
        run(4 + seq, PlanRow(seq, start, tuple(tokens[start:]), blocks=blocks, intro=intro, sample=True))


@pytest.mark.exact
@needs_native
@pytest.mark.parametrize(("kv_dtype", "rests"), [("bf16", False), ("int8", False), ("bf16", True)])
def test_bit_for_bit(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, kv_dtype: str, rests: bool
) -> None:
    """Mixes with preemption, hits and chunks give the tokens and logprobs of runs without it, also where the head loses
    all sequences now and then, and takes up new ones."""
    if rests:
        rng = random.Random(5)
        monkeypatch.setattr(DraftLength, "pays", property(lambda self: rng.random() < 0.8))
    target = target_model()
    plain = make_worker(target, None, kv_dtype=kv_dtype)
    worker = make_worker(target, head_model(form="SpecForge"), kv_dtype=kv_dtype)
    assert check(worker, plain, source=EAGLE3).num_drafted > (20 if rests else 50)


def test_a_head_that_does_not_pay_computes_nothing(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its layer nor what joins states, until it pays: then for new sequences, and not for those that it has
    lost."""
    worker = make_worker(target_model(), head_model(), ReferenceOps, kv_dtype="f32")
    calls: list[str] = []
    for kind, name in ((DraftRunner, "_call"), (Joining, "join")):
        computed = getattr(kind, name)

        def count(self: Any, *given: Any, computed: Any = computed, name: str = name) -> Any:
            calls.append(name)
            return computed(self, *given)

        monkeypatch.setattr(kind, name, count)
    intro = Introduction((1, 2, 3, 4), (), SamplingParams(temperature=0), 1, 0, ())

    def run(step: int, seq: int, row: PlanRow) -> bool:
        (given,) = worker.executor.execute_now(StepPlan(step, (row._replace(seq=seq),))).rows
        return given.drafts is not None

    first = PlanRow(0, 0, intro.prompt_tokens, blocks=(0,), intro=intro, sample=True)
    assert run(0, 0, first) and set(calls) == {"_call", "join"}
    calls.clear()
    monkeypatch.setattr(DraftLength, "pays", False)
    assert not run(1, 0, PlanRow(0, 4, (5,), sample=True)) and not run(2, 1, first._replace(blocks=(1,)))
    monkeypatch.setattr(DraftLength, "pays", True)
    assert not run(3, 0, PlanRow(0, 5, (6,), sample=True)) and not run(4, 1, PlanRow(0, 4, (5,), sample=True))
    assert not calls
    assert run(5, 2, first._replace(blocks=(2,)))


def _with(name: str, value: Any) -> Callable[[Checkpoint], None]:
    def change(head: Checkpoint) -> None:
        inner = head.metadata["transformer_layer_config"]
        (inner if name in inner else head.metadata)[name] = value

    return change


def _offset(at: int, value: int) -> Callable[[Checkpoint], None]:
    def change(head: Checkpoint) -> None:
        offsets = np.frombuffer(head.tensors["d2t"].data, np.int64).copy()
        offsets[at] = value
        head.tensors["d2t"] = replace(head.tensors["d2t"], data=stored(offsets))

    return change


def _shape(name: str, shape: tuple[int, ...]) -> Callable[[Checkpoint], None]:
    return lambda head: head.tensors.update({name: tensor(name, np.ones(shape))})


def _without(name: str) -> Callable[[Checkpoint], None]:
    return lambda head: head.tensors.pop(name) and None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without("fc.weight"), r"is missing fc\.weight"),
        (_without("layers.0.hidden_norm.weight"), r"is missing model\.layers\.0\.hidden_norm\.weight"),
        (_without("d2t"), "is missing d2t"),
        (_offset(3, VOCAB_SIZE), "d2t must lead each of its 40 tokens to another one of 96"),
        (_offset(1, -1), "d2t must lead each of its 40 tokens"),
        (_shape("d2t", (NUM_DRAFTED,)), "d2t must be of int64 or int32, not of f32"),
        (_shape("fc.weight", (WIDTH, 2 * WIDTH)), r"has misshaped fc\.weight \(64, 128\) instead of \(64, 192\)"),
        (_shape("layers.0.self_attn.q_proj.weight", (64, 64)), r"q_proj\.weight \(64, 64\) instead of \(64, 128\)"),
        (_shape("layers.1.mlp.up_proj.weight", (64, 64)), r"has unexpected model\.layers\.1"),
        (_with("vocab_size", 32_000), "a vocabulary of 32000 tokens; the model that it is to draft for has 96"),
        (_with("draft_vocab_size", 0), "draft_vocab_size must be from 1 to 96, got 0"),
        (_with("num_hidden_layers", 2), "has 2 layers; heads of one are supported"),
        (_with("model_type", "mamba"), "must be of model_type llama or qwen3"),
        (_with("norm_before_residual", 1), "norm_before_residual must be true or false, got 1"),
        (_with("eagle_aux_hidden_state_layer_ids", [1, 6]), r"takes states of layers \[1, 6\]; its model has 5 layers"),
        (_with("eagle_aux_hidden_state_layer_ids", "all"), "must be a list of integers"),
        (_with("speculators_model_type", "eagle"), "is no folder of an EAGLE-3 head but of 'eagle'"),
        (
            _with("speculators_config", {"verifier": {"name_or_path": "q", "architectures": ["Qwen2ForCausalLM"]}}),
            "was trained for q, a Qwen2ForCausalLM, and not for a LlamaForCausalLM",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_one_line(change: Callable[[Checkpoint], None], said: str) -> None:
    head = head_model()
    if "eagle'" in said:
        head.metadata["architectures"] = ["EagleSpeculator"]
    change(head)
    with pytest.raises(BadCheckpoint, match=said) as caught:
        eagle3_checkpoint(head, target_model())
    assert "\n" not in str(caught.value)


def test_a_head_in_a_gguf_file_is_told() -> None:
    """As llama.cpp's converter writes one."""
    head = Checkpoint("gguf", Path("head.gguf"), {"general.architecture": "eagle3"}, {})
    assert is_eagle3(head.metadata)
    with pytest.raises(BadCheckpoint, match=r"head\.gguf is an EAGLE-3 head in a GGUF file; name the folder"):
        eagle3_checkpoint(head, target_model())


def test_a_head_without_embeddings_needs_those_of_its_model() -> None:
    head = head_model(embeds=False)
    head.metadata["transformer_layer_config"]["hidden_size"] = 32
    with pytest.raises(
        BadCheckpoint, match=r"has no embeddings, and those of the model .* have 64 channels and not 32"
    ):
        eagle3_checkpoint(head, target_model())

"""A draft model or a head from its file to its first drafts: what is checked, what it takes, and that answers stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heads import head_model, write_head
from medusa_heads import random_heads, write_heads
from random_models import Shape, write_gguf_model
from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import ConfigError
from tokenmill.core.units import GiB, MiB
from tokenmill.formats.checkpoint import open_checkpoint
from tokenmill.node.load import load_engine, model_facts, open_drafter
from tokenmill.node.machine import MachineFacts
from tokenmill.node.options import EngineOptions
from tokenmill.node.resolve import DrafterFacts, ModelFacts, resolve
from tokenmill.worker.draft_length import DraftLength

SMALL = {"width": 64, "heads": 2, "kv_heads": 2, "head": 32, "rope": 32, "value": 32, "experts": 0, "dense_ffn": 64}
MACHINE = MachineFacts(num_cpus=2, cpu_quota=None, memory_available=4 * GiB, cgroup_headroom=None)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target.gguf, draft.gguf of half its layers and context, and others of more tokens."""
    folder = tmp_path_factory.mktemp("models")
    half = {"layers": 1, "context": 128, **SMALL}
    write_gguf_model(folder / "target.gguf", Shape("qwen3", layers=2, context=256, **SMALL), "q8_0")
    write_gguf_model(folder / "draft.gguf", Shape("qwen3", **half), "q8_0", seed=1)
    write_gguf_model(folder / "longer.gguf", Shape("qwen3", vocab=33_000, **half), "q8_0")
    write_gguf_model(folder / "padded.gguf", Shape("qwen3", vocab=32_100, **half), "q8_0")
    data = (folder / "padded.gguf").read_bytes()
    (folder / "other.gguf").write_bytes(data.replace(b"<|unused 32050|>", b"<|taken_ 32050|>"))
    return folder


def options(model: Path | str, **more: Any) -> EngineOptions:
    return EngineOptions(
        speculative_config={"model": str(model), "num_speculative_tokens": 4, **more},
        kv_cache_memory_bytes=16 * MiB,
        max_num_seqs=4,
        threads=1,
    )


def test_answers_are_those_without_it(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they go on behind the drafter's context, and several are made of a prompt."""
    monkeypatch.setattr(DraftLength, "is_worth_more", lambda self, costs, chances, most: True)
    monkeypatch.setattr(DraftLength, "pays", True)
    how = [SamplingParams(temperature=t, max_tokens=150, seed=3, n=2, ignore_eos=True) for t in (0.0, 0.9)]
    answers = []
    for speculation in (None, {"model": str(models / "draft.gguf"), "num_speculative_tokens": 4}):
        limits = {"kv_cache_memory_bytes": 16 * MiB, "max_num_seqs": 4, "threads": 1}
        with LLM(str(models / "target.gguf"), speculative_config=speculation, **limits) as llm:
            given = llm.generate(["one two three", "four"], how)
            answers.append([choice.token_ids for each in given for choice in each.outputs])
    assert answers[0] == answers[1] and all(len(each) == 150 for each in answers[0])


def test_what_it_takes_is_said(models: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(models / "target.gguf")
    engine = load_engine(checkpoint, options(models / "draft.gguf"), MACHINE, tmp_path)
    try:
        memory, facts = dict(engine.memory()), dict(engine.facts())
        plan = engine.worker.memory
        assert memory["draft KV"] == plan.draft_kv > 0 and memory["weights"] == plan.weights + plan.draft_weights
        assert plan.draft_model == plan.draft_kv + plan.draft_weights and plan.kv + plan.draft_kv < 17 * MiB
        assert "by " + str(models / "draft.gguf") in facts["speculation"] and "up to 128 tokens" in facts["speculation"]
        assert "for the draft model" in facts["draft_kv"]
        assert any(line.startswith("drafts ") for line in plan.lines())
        (group,) = engine.config.groups
        assert group.bytes_per_block == engine.worker.kv_groups[0].bytes_per_block
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        ("other.gguf", r"its token 32050 is '<\|taken_ 32050\|>', that of the model .* '<\|unused 32050\|>'"),
        ("longer.gguf", "another tokenizer, of 33000 tokens; the model that it is to draft for has one of 32100"),
        ("gone.gguf", "There is no file or folder"),
        ("damaged.gguf", "GGUF"),
        ("bert", "it gives vectors and no tokens"),
    ],
)
def test_what_cannot_draft_is_one_line(models: Path, draft: str, said: str) -> None:
    (models / "damaged.gguf").write_bytes(b"not a model")
    (models / "bert").mkdir(exist_ok=True)
    (models / "bert" / "config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    (models / "bert" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(ConfigError, match=said) as caught:
        open_drafter(open_checkpoint(models / "padded.gguf"), options(models / draft))
    assert caught.value.message.startswith(f"{models / draft} cannot draft: ") and "\n" not in caught.value.message
    assert caught.value.param == "speculative_config"


@pytest.mark.parametrize("form", ["speculators", "SpecForge"])
def test_a_head_drafts_for_the_model_it_is_for(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """With the model's own embeddings or its own, beside suffixes, behind the context that it says; what is no head, or
    is taken for something else, is one line."""
    monkeypatch.setattr(DraftLength, "is_worth_more", lambda self, costs, chances, most: True)
    monkeypatch.setattr(DraftLength, "pays", True)
    made = head_model(form=form, layers=[0, 1, 2], vocab_size=32_100, embeds=form != "speculators")
    head = str(write_head(tmp_path / "head", made))
    how = SamplingParams(temperature=0.9, max_tokens=100, seed=3, ignore_eos=True)
    asked: dict[str, Any] = {
        "method": "eagle3,suffix",
        "model": head,
        "num_speculative_tokens": 3,
        "quantization": "q8",
    }
    answers = []
    for speculation in (None, asked, asked | {"method": "draft-eagle3", "adaptive": False, "quantization": None}):
        limits = {"kv_cache_memory_bytes": 16 * MiB, "max_num_seqs": 4, "threads": 1}
        with LLM(str(models / "target.gguf"), speculative_config=speculation, **limits) as llm:
            (given,) = llm.generate(["one two three"], how)
            answers.append(given.outputs[0])
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids
    assert sum(drafted for drafted, _ in answers[2].draft_steps) > 100
    target = open_checkpoint(models / "target.gguf")
    facts = model_facts(
        target, None, options(head, method="eagle3"), open_drafter(target, options(head, method="eagle3"))
    )
    assert facts.drafter is not None and facts.drafter.max_context == facts.max_context
    for given, said in (
        ({"model": head}, "it is a head; name eagle3 as method"),
        ({"model": str(models / "draft.gguf"), "method": "eagle3"}, "is no folder of an EAGLE-3 head but of 'qwen3'"),
        ({"model": str(models / "gone"), "method": "eagle3"}, "There is no file or folder"),
    ):
        with pytest.raises(ConfigError, match=f"{given['model']} cannot draft: .*{said}"):
            open_drafter(target, EngineOptions(speculative_config=given))


def test_its_kv_is_of_the_pool(models: Path) -> None:
    """Tokens that one of two has behind those of the other do not matter. A pool has as many blocks as fit with the
    drafter's; a model without layers that see everything has none that a drafter could go by."""
    asked = options(models / "draft.gguf")
    target = open_checkpoint(models / "target.gguf")
    assert open_drafter(target, options(models / "padded.gguf")) is not None
    facts = model_facts(target, None, asked, open_drafter(target, asked))
    assert facts.drafter is not None and 2 * facts.drafter.kv_bytes_per_token == facts.kv_bytes_per_token
    with_it = resolve(asked, MACHINE, facts).config.groups[0]
    without = resolve(
        EngineOptions(kv_cache_memory_bytes=16 * MiB), MACHINE, replace(facts, drafter=None)
    ).config.groups[0]
    assert with_it.bytes_per_block == facts.kv_bytes_per_token * 16
    assert without.num_blocks * 2 // 3 - 1 <= with_it.num_blocks <= without.num_blocks * 2 // 3
    windowed = ModelFacts(256, 1024, 1 << 20, windows=((64, 1024),), drafter=DrafterFacts(256, 1 << 20, 256))
    with pytest.raises(ConfigError, match="this model has none"):
        resolve(asked, MACHINE, windowed)


def test_heads_draft_and_change_no_answer(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Medusa heads beside suffixes, from their folder to answers, of which several are made of a prompt. They take no
    KV, and no more tokens are drafted than there are heads."""
    monkeypatch.setattr(DraftLength, "is_worth_more", lambda self, costs, chances, most: True)
    monkeypatch.setattr(DraftLength, "pays", True)
    target = open_checkpoint(models / "target.gguf")
    heads = write_heads(tmp_path / "heads", random_heads(target, 3, 1), "authors")
    asked = {"method": "medusa,suffix", "model": str(heads), "quantization": "q8_0"}
    how = [SamplingParams(temperature=t, max_tokens=90, seed=3, n=2, ignore_eos=True) for t in (0.0, 0.9)]
    limits = {"kv_cache_memory_bytes": 16 * MiB, "max_num_seqs": 4, "threads": 1}
    answers = []
    for speculation in (None, asked):
        with LLM(str(models / "target.gguf"), speculative_config=speculation, **limits) as llm:
            given = llm.generate(["one two three", "four"], how)
            answers.append([choice.token_ids for each in given for choice in each.outputs])
    assert answers[0] == answers[1]
    engine = load_engine(target, EngineOptions(speculative_config=asked, **limits), MACHINE, tmp_path)
    try:
        memory, facts = dict(engine.memory()), dict(engine.facts())
        assert "draft KV" not in memory and engine.worker.memory.draft_weights > 3 * 32_000 * 64
        assert "there are 3 heads, for 3 tokens" in facts["speculation"] and "draft_kv" not in facts
    finally:
        engine.close()


def test_heads_of_another_model_are_one_line(models: Path, tmp_path: Path) -> None:
    target, other = (open_checkpoint(models / f"{name}.gguf") for name in ("target", "padded"))
    heads = write_heads(tmp_path / "heads", random_heads(target, 1, 1))
    with pytest.raises(ConfigError, match=r"heads cannot draft: .* the model that they are to draft for has 32100"):
        open_drafter(other, EngineOptions(speculative_config={"method": "medusa", "model": str(heads)}))
    with pytest.raises(ConfigError, match="heads cannot draft: it is a head; name medusa as method"):
        open_drafter(target, options(heads))

"""EAGLE-3 heads: what is kept of texts, that training gets better and goes on after a kill, the format, bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from random_models import Shape, write_gguf_model
from tiny import VOCAB_SIZE, logits_of, tiny_checkpoint
from tokenmill.cli.main import main
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.request import SamplingParams
from tokenmill.core.speculation import EAGLE3, SpeculationConfig
from tokenmill.core.step import Introduction, PlanRow, StepPlan
from tokenmill.draft import target as target_module
from tokenmill.draft.target import LIKELIEST, Rows, Sample, SampleFile, Target, embeddings, to_bfloat16
from tokenmill.formats.checkpoint import open_checkpoint
from tokenmill.formats.safetensors import open_safetensors
from tokenmill.models.config import config_from_checkpoint
from tokenmill.models.eagle3 import eagle3_checkpoint, load_eagle3, usual_aux_layers
from tokenmill.models.loader import load_model
from tokenmill.ops.api import StepBatch
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker import build
from tokenmill.worker.spec import WorkerSpec

torch = pytest.importorskip("torch")

from tokenmill.draft import train as training  # noqa: E402
from tokenmill.draft.eagle3 import speculators_config, train_steps, write_head  # noqa: E402
from tokenmill.draft.train import Acceptance, Plan, Trainer, trainer_of  # noqa: E402

SMALL = {"width": 64, "heads": 2, "kv_heads": 2, "head": 32, "rope": 32, "value": 32, "experts": 0, "dense_ffn": 64}


@pytest.fixture(scope="module")
def lessons() -> tuple[list[Sample], list[np.ndarray]]:
    """Of a random model: prompts of one of a dozen tokens, and what it goes on with."""
    target, rng = Target(tiny_checkpoint(), ReferenceOps()), np.random.default_rng(0)
    samples, rows = [], []
    for _ in range(40):
        tokens = rng.integers(0, 12, 1).tolist()
        while len(tokens) < 20:
            last = target.read(Sample(tokens, 0))[-1]
            tokens.append(int(last["ids"][last["probabilities"].argmax()]))
        samples.append(Sample(tokens, 1))
        rows.append(target.read(samples[-1]))
    target.close()
    return samples, rows


def ticks() -> Callable[[], float]:
    """A clock on which whatever is between two looks takes a second."""
    now = iter(range(1_000_000))
    return lambda: float(next(now))


def trainer(lessons: tuple[list[Sample], list[np.ndarray]], folder: Path, seconds: float, **plan: Any) -> Trainer:
    torch.set_num_threads(1)
    samples, rows = lessons
    return trainer_of(tiny_checkpoint(), samples, rows, Plan(seconds, **plan), folder, ticks())


def test_a_row_has_the_states_and_what_the_target_expects(lessons):
    """A text in pieces gives what it gives at once, the model's own choice is the likeliest, and a line that a kill cut
    short is forgotten with the states that belong to no text."""
    samples, rows = lessons
    assert rows[0]["aux"].shape == (20, 3 * 64) and rows[0]["ids"].shape == (20, LIKELIEST)
    for sample, each in zip(samples, rows, strict=True):
        best = np.take_along_axis(each["ids"], each["probabilities"].argmax(1)[:, None], 1)[:, 0]
        assert best[1:-1].tolist() == sample.tokens[2:] and not each[0]["probabilities"].any()
        assert (each["probabilities"].sum(1) <= 1.01).all()
    assert usual_aux_layers(30) == [2, 15, 27] and usual_aux_layers(2) == [0, 1, 1]


@pytest.mark.exact
@pytest.mark.skipif(available() is not None, reason="the native kernels are not there")
def test_a_long_prompt_is_read_in_pieces():
    """Where nothing is learned there are states alone; what is learned is what the whole text gives."""
    target = Target(tiny_checkpoint(), NativeOps(1))
    tokens = np.random.default_rng(3).integers(0, VOCAB_SIZE, 200).tolist()
    whole = target.read(Sample(tokens, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_module, "_STEP", 32)
        part = target.read(Sample(tokens, 150))
    target.close()
    assert (part["aux"] == whole["aux"]).all()
    assert not part["probabilities"][:150].any() and (part[150:] == whole[150:]).all()
    logits = logits_of(tiny_checkpoint(), 13)
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    ids, found = target_module._likeliest(logits)
    assert np.sort(found, 1) == pytest.approx(np.sort(expected, 1)[:, -LIKELIEST:], rel=1e-4)
    assert found == pytest.approx(np.take_along_axis(expected, ids, 1), rel=1e-4)


def test_files_go_on_behind_what_is_whole(lessons, tmp_path):
    samples, rows = lessons
    (tmp_path / "answers").write_bytes(b"[[1, 2, 3], 1]\n[[4, 5")
    kept = SampleFile(tmp_path / "answers")
    assert kept.samples == [Sample([1, 2, 3], 1)]
    kept.add([Sample([6], 0)])
    assert SampleFile(tmp_path / "answers").samples == kept.samples == [Sample([1, 2, 3], 1), Sample([6], 0)]
    file = Rows(tmp_path / "rows", 64, samples)
    file.add(rows[0])
    file.add(rows[1])
    with open(tmp_path / "rows", "ab") as cut:
        cut.write(rows[2].tobytes()[:-1])
    again = Rows(tmp_path / "rows", 64, samples)
    assert again.num_samples == 2
    again.add(rows[2])
    assert all((read == row).all() for read, row in zip(again.read(), rows, strict=False)) and len(again.read()) == 3


def test_bfloat16_is_that_of_torch():
    values = np.random.default_rng(1).normal(size=1000).astype(np.float32) * 1000
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert (to_bfloat16(values) == expected).all()


def test_training_gets_better(lessons, tmp_path):
    """The loss falls, and more drafts are right on samples that were not trained on."""
    head, said = trainer(lessons, tmp_path, 150), []
    before, after = head.evaluate(), head.train(said.append)
    print(f"\nbefore: {before}\nafter: {after}")
    assert np.mean(head.losses[-10:]) < 0.8 * np.mean(head.losses[:10])
    assert after.tokens_a_step > before.tokens_a_step + 0.3
    assert after.num_positions == before.num_positions > 0
    assert sum(line.startswith("held out: ") for line in said) == 5


def test_the_steps_of_training_are_those_of_drafting(lessons, tmp_path):
    """What a position sees in its later steps is what a head sees that drafts from there, one token after another."""
    head = trainer(lessons, tmp_path, 30)
    head.train(lambda line: None)
    tokens = lessons[0][0].tokens
    batch = head._batch([0])
    together = [x[0].detach() for x in head._steps(batch)]
    at = 9
    cut = replace(batch, aux_BTA=batch.aux_BTA.clone())
    cut.aux_BTA[:, at + 1 :] = 1e3  # what the target has not computed yet
    for step, x_BTD in enumerate(head._steps(cut)):
        assert torch.allclose(x_BTD[0, at], together[step][at], atol=1e-5)
    other = [*tokens[: at + 3], 5, *tokens[at + 4 :]]
    embeds = head._embeds_UD[torch.from_numpy(head._lessons.places_V[other])][None]
    changed = [x[0, at].detach() for x in head._steps(replace(batch, embeds_BTD=embeds))]
    same = [torch.equal(one, each[at]) for one, each in zip(changed, together, strict=True)]
    assert same == [True, True, tokens[at + 3] == 5]  # step s is given token at + 1 + s


def test_who_is_killed_goes_on(lessons, tmp_path, monkeypatch):
    """The weights and losses are those of a run without a break, wherever it is."""
    monkeypatch.setattr(training, "_SAVE_EVERY_S", 7)
    (tmp_path / "whole").mkdir()
    whole = trainer(lessons, tmp_path / "whole", 60)
    expected = whole.train(lambda line: None)

    class Killed(Exception):
        pass

    def until(most: int) -> Callable[[], float]:
        clock = ticks()

        def tell() -> float:
            now = clock()
            if now > most:
                raise Killed
            return now

        return tell

    for most in (10, 23, 5):
        broken = trainer(lessons, tmp_path, 60)
        broken._clock = until(most)
        with pytest.raises(Killed):
            broken.train(lambda line: None)
    resumed = trainer(lessons, tmp_path, 60)
    assert 0 < resumed._spent_s < 60
    assert resumed.train(lambda line: None) == expected
    assert resumed.losses == whole.losses and len(whole.losses) == 60
    for name, each in whole.weights.items():
        assert torch.equal(each, resumed.weights[name]), name


def test_a_head_has_the_tensors_of_the_format(lessons, tmp_path):
    """The names, shapes and kinds that speculators and vLLM read; the tokens that are drafted are among those that
    occur; `fc` takes states as they are."""
    head = trainer(lessons, tmp_path, 5, draft_vocab_size=24)
    head.train(lambda line: None)
    out = tmp_path / "head"
    write_head(out, speculators_config(head.shape, "tiny", ["LlamaForCausalLM"], 3), head.tensors())
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["speculators_config"]["verifier"] == {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}
    assert config["draft_vocab_size"] == 24 and config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 1]
    assert config["transformer_layer_config"]["vocab_size"] == VOCAB_SIZE and config["norm_before_residual"] is True
    stored = open_safetensors(out)
    matrices = {"q": (64, 128), "k": (32, 128), "v": (32, 128), "o": (64, 64)}
    expected = {f"layers.0.self_attn.{name}_proj.weight": shape for name, shape in matrices.items()}
    expected |= {f"layers.0.mlp.{name}_proj.weight": (96, 64) for name in ("gate", "up")}
    expected |= {
        f"layers.0.{name}.weight": (64,) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    }
    expected |= {"layers.0.mlp.down_proj.weight": (64, 96), "norm.weight": (64,), "lm_head.weight": (24, 64)}
    expected |= {"fc.weight": (64, 192), "d2t": (24,), "t2d": (VOCAB_SIZE,)}
    assert {name: each.shape for name, each in stored.items()} == expected
    kinds = {name: each.kind for name, each in stored.items()}
    assert kinds.pop("d2t") == "i64" and kinds.pop("t2d") == "bool" and set(kinds.values()) == {"bf16"}
    ids = np.frombuffer(stored["d2t"].data, "<i8") + np.arange(24)
    assert np.flatnonzero(np.frombuffer(stored["t2d"].data, np.bool_)).tolist() == ids.tolist()
    aux = torch.from_numpy((lessons[1][0]["aux"].astype(np.uint32) << 16).view(np.float32))
    taken = torch.nn.functional.linear(aux, head.tensors()["fc.weight"].float())
    trained = torch.nn.functional.linear(aux * head._scale_A, head.weights["fc.weight"])
    assert torch.allclose(taken, trained, rtol=0.05, atol=0.05)


def test_the_engine_drafts_as_well_as_was_told(lessons, tmp_path, monkeypatch):
    """Tokens a step where the trained head drafts for its model, against those on held-out samples."""
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "tiny")
    head = trainer(lessons, tmp_path, 150)
    told = head.train(lambda line: None)
    write_head(tmp_path / "head", speculators_config(head.shape, "tiny", ["LlamaForCausalLM"], 3), head.tensors())
    target, ops, how = tiny_checkpoint(), ReferenceOps(), {"block_size": 16, "kv_dtype": "f32"}
    speculation = SpeculationConfig((EAGLE3,), num_speculative_tokens=3, model="head", adaptive=False)
    config = EngineConfig(full_groups(4), max_model_len=32, max_num_seqs=1, speculation=speculation)
    model, spec = load_model(target, ops, max_model_len=32, **how), WorkerSpec(config, kv_dtype="f32")
    found = build.load_drafter(eagle3_checkpoint(open_checkpoint(tmp_path / "head"), target), ops, spec, target=model)
    worker = build.build_worker(target, ops, spec, model=model, drafter=found)
    taken: list[int] = []  # tokens of steps with drafts
    for first in range(12):
        tokens, drafts = [first], ()
        intro: Introduction | None = Introduction((first,), (), SamplingParams(temperature=0), 1, 0, ())
        while len(tokens) < 20:
            where = {"blocks": (0, 1), "intro": intro} if intro else {}
            row = PlanRow(first, len(tokens) - 1, tuple(tokens[-1:]), **where, sample=True, drafts=drafts)
            (given,) = worker.executor.execute_now(StepPlan(len(taken) + first, (row,))).rows
            taken += [len(given.tokens)] if drafts else []
            tokens.extend(given.tokens)
            drafts, intro = given.drafts.tokens, None
    worker.executor.close()
    print(f"\n{np.mean(taken):.2f} tokens a step, told: {told.tokens_a_step:.2f}")
    assert abs(np.mean(taken) - told.tokens_a_step) < 0.5


def test_the_engine_runs_the_head_that_was_trained(lessons, tmp_path):
    """The written folder, in models/eagle3.py: its logits for each position, and those behind its own state, are what
    training makes of the same states and tokens."""
    head = trainer(lessons, tmp_path, 20, draft_vocab_size=24)
    head.train(lambda line: None)
    write_head(tmp_path / "head", speculators_config(head.shape, "tiny", [], 3), head.tensors())
    ops, target = ReferenceOps(), tiny_checkpoint()
    view = eagle3_checkpoint(open_checkpoint(tmp_path / "head"), target)
    how: dict[str, Any] = {"max_model_len": 64, "block_size": 8, "kv_dtype": "f32"}
    model = load_eagle3(view, ops, load_model(target, ops, **how), **how)
    tokens, row = lessons[0][0].tokens, torch.from_numpy(lessons[1][0]["aux"].astype(np.uint32) << 16)
    aux_TA = row.view(torch.float32)
    embeds = torch.from_numpy(embeddings(target, config_from_checkpoint(target), np.array(tokens)))[None]
    weights = {name: each.float() for name, each in head.tensors().items()}
    steps = train_steps(weights, head.shape, aux_TA[None], embeds, 2)
    expected = [torch.nn.functional.linear(x[0], weights["lm_head.weight"]).numpy() for x in steps]
    num, at, pool = len(tokens) - 1, 9, ops.new_pool(model.kv_group, 8)
    states = np.zeros((num, 64), np.float32)
    states[:num] = model.join(ops, np.split(aux_TA.numpy()[:num], 3, axis=1))
    drafted = model.places_N

    def logits(start: int, end: int, given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of positions start to end, which are given the tokens behind them; and what the head makes there."""
        count, made = end - start, np.zeros_like(states)
        batch = StepBatch(
            tokens_T=np.array(tokens[start + 1 : end + 1], np.int32),
            positions_T=np.arange(start, end, dtype=np.int32),
            row_starts_S1=np.array([0, count], np.int32),
            context_lens_S=np.array([end], np.int32),
            block_tables_SB=np.arange(8, dtype=np.int32)[None],
            logit_rows_L=np.arange(count, dtype=np.int32),
        )
        return model.forward(ops, pool.kv, batch, given, made)[:, drafted], made

    found, made = logits(0, num, states)
    np.testing.assert_allclose(found, expected[0][:num], atol=0.03)
    further, _ = logits(at + 1, at + 2, made[at : at + 1])
    np.testing.assert_allclose(further[0], expected[1][at], atol=0.03)
    pool.close()


def test_what_acceptance_means():
    assert Acceptance((0.5, 0.25, 0.125), 8).tokens_a_step == 1.875


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_gguf_model(path, Shape("qwen3", layers=2, context=128, **SMALL), "q8_0")
    return path


def test_the_command_makes_a_head(model, tmp_path, capsys):
    """From rows that are answered and a text that is read; what it left is gone, and a second call refuses."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"q": f"say {n}"}) + "\n" for n in range(5)))
    (tmp_path / "text.md").write_text("one two three four " * 20)
    data = ["--data", str(tmp_path / "rows.jsonl"), str(tmp_path / "text.md"), "--template", "{q}"]
    asked = ["draft", "train", str(model), *data, "--out", str(tmp_path / "head"), "--minutes", "0.05"]
    asked += ["--max-tokens", "16", "--draft-vocab-size", "64", "--threads", "1"]
    assert main(asked) == 0
    assert "tokens a step" in capsys.readouterr().out
    assert sorted(each.name for each in (tmp_path / "head").iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["head", "rows.jsonl", "text.md"]
    assert main(asked) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data", "{}/none.jsonl"], "none.jsonl is not there"),
        (["--data", "{}/empty.txt"], "nothing to learn from"),
        (["--data", "{}/rows.jsonl", "--template", "{missing}"], "does not fit a row"),
        (["--data", "{}/rows.jsonl", "--minutes", "0"], "--minutes must be above 0"),
        (["--data", "{}/rows.jsonl", "--temperature", "9"], "--temperature must be from 0 to 2"),
        (["--data", "{}/rows.jsonl", "--out", "{}/rows.jsonl/head"], "cannot be written"),
        (["--data", "{}/rows.jsonl", "--out", "{}/other"], "asked for otherwise"),
    ],
)
def test_bad_input_gets_one_line(model, tmp_path, capsys, flags, said):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "say"}\n')
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "other.work").mkdir()
    (tmp_path / "other.work" / "settings").write_text("others")
    asked = ["draft", "train", str(model), "--out", str(tmp_path / "head"), "--max-tokens", "8"]
    assert main([*asked, *(flag.replace("{}", str(tmp_path)) for flag in flags)]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert said in error[-1]
    assert not (tmp_path / "head").exists()


def test_without_torch_it_says_what_to_install(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "text.md").write_text("text")
    asked = ["draft", "train", str(model), "--data", str(tmp_path / "text.md"), "--out", str(tmp_path / "head")]
    assert main(asked) == 2
    assert "install tokenmill[torch]" in capsys.readouterr().err

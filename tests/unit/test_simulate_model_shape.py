"""Shapes of checkpoints as the cost model takes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tiny import tiny_checkpoint
from tiny_latent import latent_checkpoint
from tiny_moe import moe_checkpoint, moe_config
from tokenmill.cli import main as cli
from tokenmill.core.errors import ConfigError
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.models.config import ModelConfig, config_from_checkpoint
from tokenmill.models.summary import model_summary
from tokenmill.plan.config import read_shape, shape_of
from tokenmill.sim.models import model_named


def check(checkpoint: Checkpoint, config: ModelConfig, rel: float = 0.0) -> None:
    """Matrices are as many numbers as the shape says."""
    num_values = sum(tensor.num_values for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1)
    shape = shape_of(config, "tiny")
    assert shape.num_parameters == pytest.approx(num_values, rel=rel)


@pytest.mark.parametrize("kind", ["hf", "gguf"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_dense_model_has_its_matrices(kind: str, tied: bool) -> None:
    """Of either format, with a head of its own and without; KV as the survey counts it."""
    checkpoint = tiny_checkpoint(kind=kind, tied=tied)
    config = config_from_checkpoint(checkpoint)
    check(checkpoint, config)
    assert shape_of(config, "tiny").kv_bytes("fp16") == model_summary(checkpoint).kv_bytes_per_token


def test_experts_dense_layers_and_shared_ones_are_counted() -> None:
    """Of three layers two have eight experts and a shared one of twice their width."""
    config = moe_config(shared_width=64)
    check(moe_checkpoint(config), config, rel=1e-9)
    shape = shape_of(config, "tiny")
    assert (shape.num_dense_layers, shape.num_experts, shape.num_chosen, shape.num_shared) == (1, 8, 3, 2)


@pytest.mark.parametrize("name, rel", [("V2", 1e-9), ("V3", 0.02)])
def test_latents_are_counted(name: str, rel: float) -> None:
    """Exactly where values are as wide as keys, nearly where not; KV is the latent and what turns."""
    checkpoint = latent_checkpoint(name)
    config = config_from_checkpoint(checkpoint)
    check(checkpoint, config, rel)
    assert shape_of(config, "tiny").kv_bytes("fp16") == model_summary(checkpoint).kv_bytes_per_token


def test_a_checkpoint_and_what_inspect_says_of_it_are_one_shape(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SmolLM2 is as in the table; through `inspect --json` and back nothing changes."""
    shape = read_shape(str(smollm2))
    known = model_named("smollm2-135m")
    assert replace(shape, name=known.name, title=known.title, source=known.source) == known
    assert cli.main(["inspect", str(smollm2), "--json"]) == 0
    (tmp_path / "facts.json").write_text(capsys.readouterr().out)
    said = read_shape(str(tmp_path / "facts.json"))
    assert replace(said, title=shape.title, source=shape.source) == shape


def test_facts_without_a_shape_say_what_to_do(tmp_path: Path) -> None:
    """A JSON file of something else, one that is none, and one that is not there."""
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"kind": "load"}))
    with pytest.raises(ConfigError, match=r"model.checkpoint: .* has no shape; write it by `tokenmill inspect"):
        read_shape(str(other))
    other.write_text("{")
    for path in (other, tmp_path / "missing.json"):
        with pytest.raises(ConfigError, match=r"model.checkpoint: .* cannot be read"):
            read_shape(str(path))

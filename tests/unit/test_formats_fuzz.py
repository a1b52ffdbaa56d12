"""Damaged files are opened or refused, in little memory: the first cases of tests/fuzz_formats.py."""

from __future__ import annotations

from pathlib import Path

from fuzz_formats import GPT_OSS, check, sound_folder, sound_gguf, sound_safetensors
from tokenmill.formats.checkpoint import open_checkpoint
from tokenmill.formats.quantization_config import join_quantised
from tokenmill.formats.safetensors import open_safetensors
from tokenmill.models.config import config_from_checkpoint
from tokenmill.models.weights import load_weights
from tokenmill.ops.reference import ReferenceOps


def test_damaged_headers_are_refused_and_nothing_worse(tmp_path: Path) -> None:
    wrong = {seed: found for seed in range(600) if (found := check(seed, tmp_path)[0])}
    assert not wrong, wrong


def test_the_undamaged_files_open(tmp_path: Path) -> None:
    """Else the test above would say nothing."""
    (tmp_path / "m.gguf").write_bytes(sound_gguf())
    assert config_from_checkpoint(open_checkpoint(tmp_path / "m.gguf")).num_layers == 2
    (tmp_path / "m.gguf").write_bytes(sound_gguf(with_experts=True))
    config = config_from_checkpoint(open_checkpoint(tmp_path / "m.gguf"))
    assert config.moe is not None and [layer.is_moe for layer in config.layers] == [True, False]
    for merged in (False, True):
        (tmp_path / "model.safetensors").write_bytes(sound_folder(tmp_path, merged))
        checkpoint = open_checkpoint(tmp_path)
        load_weights(checkpoint, config_from_checkpoint(checkpoint), ReferenceOps())
    (tmp_path / "m.safetensors").write_bytes(sound_safetensors())
    assert set(open_safetensors(tmp_path / "m.safetensors")) == {"a", "b", "c"}
    (tmp_path / "m.safetensors").write_bytes(sound_safetensors(with_experts=True))
    assert len(join_quantised(open_safetensors(tmp_path / "m.safetensors"), GPT_OSS)) == 3 + 2 * 2

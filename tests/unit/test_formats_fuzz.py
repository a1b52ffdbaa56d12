"""Damaged files are opened or refused, in little memory: the first cases of tests/fuzz_formats.py."""

from __future__ import annotations

from pathlib import Path

from fuzz_formats import check, sound_gguf, sound_safetensors
from tokenmill.formats.checkpoint import open_checkpoint
from tokenmill.formats.safetensors import open_safetensors
from tokenmill.models.config import config_from_checkpoint


def test_damaged_headers_are_refused_and_nothing_worse(tmp_path: Path) -> None:
    wrong = {seed: found for seed in range(600) if (found := check(seed, tmp_path)[0])}
    assert not wrong, wrong


def test_the_undamaged_files_open(tmp_path: Path) -> None:
    """Else the test above would say nothing."""
    (tmp_path / "m.gguf").write_bytes(sound_gguf())
    assert config_from_checkpoint(open_checkpoint(tmp_path / "m.gguf")).num_layers == 2
    (tmp_path / "m.safetensors").write_bytes(sound_safetensors())
    assert set(open_safetensors(tmp_path / "m.safetensors")) == {"a", "b", "c"}

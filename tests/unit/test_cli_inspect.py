"""`inspect` tells what a model would take here, fetches nothing, and knows every kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.cli import inspect
from tokenmill.cli import main as cli
from tokenmill.cli.models import local_model
from tokenmill.core.errors import ConfigError
from tokenmill.models.repack import DENSE_KINDS
from tokenmill.ops.api import BLOCK_BYTES


def test_it_leads_with_what_serving_here_would_take(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(smollm2), "-np", "4", "-c", "2048"]) == 0
    said = capsys.readouterr().out
    assert "served here    at most " in said and "of the" in said
    assert "at most 4 sequences at once, of at most 2,048 tokens" in said and "45.0 MiB of KV at 2,048 tokens" in said
    assert "in all" not in said


def test_a_wish_that_cannot_be_met_is_said(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(smollm2), "-c", "9000"]) == 0
    assert "not as it is: --max-model-len must be between 1 and 8192" in capsys.readouterr().out


def test_every_kind_that_kernels_hold_is_explained() -> None:
    assert set(BLOCK_BYTES) | set(DENSE_KINDS) <= set(inspect._KERNELS)
    assert "6-bit" in inspect._KERNELS["q6_h"]


@pytest.mark.parametrize("name", ["smollm2", "org/name", "org/name:Q4_K_M"])
def test_nothing_is_fetched_unasked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    assert cli.main(["inspect", name]) == 2
    said = capsys.readouterr().err
    assert f"tokenmill pull {name}" in said and said.count("\n") == 1
    assert not (tmp_path / "cache").exists()


def test_a_path_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_model("org/name") == Path("org/name")
    with pytest.raises(ConfigError, match="no file"):
        local_model("missing.gguf")

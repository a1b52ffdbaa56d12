"""`inspect` tells what a model would take here, fetches nothing, and knows every kernel."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from random_models import SHAPES, Shape, write_gguf_model, write_hf_model
from tokenmill.cli import inspect
from tokenmill.cli import main as cli
from tokenmill.core.errors import ConfigError
from tokenmill.core.units import format_bytes
from tokenmill.formats.hub import local_model
from tokenmill.llm.llm import LLM
from tokenmill.models.repack import DENSE_KINDS
from tokenmill.models.rope import RopeConfig, query_scale_table, rope_frequencies, rope_table, table_bytes
from tokenmill.ops.api import BLOCK_BYTES
from tokenmill.ops.native import available
from tokenmill.ops.native.library import replaced_kinds

needs_native = pytest.mark.skipif(available() is not None, reason=str(available()))


def test_it_leads_with_what_serving_here_would_take(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(smollm2), "-np", "4", "-c", "2048"]) == 0
    said = capsys.readouterr().out
    assert "served here    at most " in said and "of the" in said
    assert "at most 4 sequences at once, of at most 2,048 tokens" in said and "45.0 MiB of KV at 2,048 tokens" in said
    assert "in all" not in said


def test_it_plans_the_memory_that_serving_does(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the same options, each part but what steps need, which is known when the forward is compiled."""
    flags = ["--kv-cache-memory-bytes", "64MiB", "-c", "1024", "--max-num-seqs", "8", "--enable-lora"]
    assert cli.main(["inspect", str(smollm2), *flags]) == 0
    (said,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("served here"))
    with LLM(str(smollm2), kv_cache_memory_bytes="64MiB", max_model_len=1024, max_num_seqs=8, enable_lora=True) as llm:
        real = {name: format_bytes(size) for name, size in llm.ready.memory}
    planned = dict(re.findall(r"(?:\(|\+ )([a-zA-Z ]+) ([\d.]+ [KMG]iB)", said))
    for name in ("weights", "KV", "adapters", "grammars"):
        assert planned[name] == real[name], name
    assert set(planned) == {*real, "engine", "front end", "sandbox"}


@needs_native
def test_it_knows_what_these_kernels_take_in_place_of_a_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels with tiles take Q4_K as Q4_1, in 20 bytes for 32 weights and not 18; the table says so."""
    path = tmp_path / "m.gguf"
    sizes = {"width": 64, "heads": 2, "kv_heads": 2, "head": 32, "rope": 32, "value": 32, "experts": 0, "dense_ffn": 64}
    write_gguf_model(path, Shape("qwen3", layers=1, **sizes), "q8_0")
    for isa, replaced in (("scalar", {}), ("scalartiles", {"q4_k": "q4_1", "iq4_nl": "q8_0"})):
        monkeypatch.setenv("TOKENMILL_ISA", isa)
        assert replaced_kinds() == replaced
    monkeypatch.setattr("tokenmill.cli.inspect.replaced_kinds", lambda: {"q8_0": "f32"})
    assert cli.main(["inspect", str(path)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("embeddings"))
    assert line.split()[-2:] == ["float32", "products"] and " f32 " in line


def test_what_a_draft_model_takes_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights with the model's, and its KV, as when both are loaded; nothing is fetched."""
    sizes = {"width": 64, "heads": 2, "kv_heads": 2, "head": 32, "rope": 32, "value": 32, "experts": 0, "dense_ffn": 64}
    for name, layers, context in (("target", 2, 256), ("draft", 1, 128)):
        write_gguf_model(tmp_path / f"{name}.gguf", Shape("qwen3", layers=layers, context=context, **sizes), "q8_0")
    drafting = {"model": str(tmp_path / "draft.gguf"), "num_speculative_tokens": 4}
    flags = ["--kv-cache-memory-bytes", "16MiB", "--max-num-seqs", "4", "--speculative-config", json.dumps(drafting)]
    assert cli.main(["inspect", str(tmp_path / "target.gguf"), *flags]) == 0
    (said,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("served here"))
    how = {"kv_cache_memory_bytes": "16MiB", "max_num_seqs": 4, "speculative_config": drafting}
    with LLM(str(tmp_path / "target.gguf"), **how) as llm:
        real = {name: format_bytes(size) for name, size in llm.ready.memory}
    planned = dict(re.findall(r"(?:\(|\+ )([a-zA-Z ]+) ([\d.]+ [KMG]iB)", said))
    assert [planned[name] for name in ("weights", "KV", "draft KV")] == [
        real[name] for name in ("weights", "KV", "draft KV")
    ]
    flags[-1] = json.dumps({"model": "nobody/has-this"})
    assert cli.main(["inspect", str(tmp_path / "target.gguf"), *flags]) == 2
    assert "nobody/has-this" in capsys.readouterr().err


@pytest.mark.parametrize("long", [False, True])
def test_tables_of_angles_take_what_is_planned(long: bool) -> None:
    rope = RopeConfig(10_000.0, query_beta=0.1 if long else 0.0, original_context=16)
    made = [rope_table(rope_frequencies(rope, 32, 64), 64), query_scale_table(rope, 48, 64)]
    assert table_bytes([(rope, 32, 48)], 64) == sum(table.nbytes for table in made if table is not None)


def test_a_wish_that_cannot_be_met_is_said(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(smollm2), "-c", "9000"]) == 0
    assert "not as it is: --max-model-len must be between 1 and 8192" in capsys.readouterr().out


def hf_folder(folder: Path) -> Path:
    write_hf_model(folder, replace(SHAPES["moe"], layers=2, width=64, heads=2, kv_heads=1, experts=4, top_k=2))
    return folder


def test_settings_alone_tell_what_their_model_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same figures as of the whole folder, before its weights are fetched."""
    folder = hf_folder(tmp_path / "hf")
    assert cli.main(["inspect", str(folder)]) == 0
    whole = capsys.readouterr().out
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    (folder / "model.safetensors").unlink()
    assert cli.main(["inspect", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "none here" in said and "none here" not in whole
    (told,) = (line for line in whole.splitlines() if line.startswith("parameters"))
    assert told in said
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert (
        alone["kv_bytes_per_token"] == facts["kv_bytes_per_token"]
        and alone["num_parameters"] == facts["num_parameters"]
    )


def test_weights_that_only_torch_reads_are_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = hf_folder(tmp_path / "hf")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["inspect", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "parameters" in said and "torch is not installed" in said and "sizes are those that config.json" in said


def test_tensors_that_do_not_fit_the_settings_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After the facts, as loading would; exit code 2."""
    folder = hf_folder(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "moe_intermediate_size": config["moe_intermediate_size"] + 32})
    )
    assert cli.main(["inspect", str(folder)]) == 2
    told = capsys.readouterr()
    assert "has misshaped" in told.err and "gate_proj.weight" in told.err and "parameters" in told.out


def test_an_architecture_that_is_refused_is_told_what_it_would_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = hf_folder(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    strange = {"architectures": ["OddForCausalLM"], "model_type": "odd", "memory_tokens": 7}
    (folder / "config.json").write_text(json.dumps({**config, **strange}))
    for _ in range(2):
        assert cli.main(["inspect", str(folder)]) == 2
        told = capsys.readouterr().err
        assert "'OddForCausalLM' is not supported" in told
        assert re.search(r"nearest is \w+ForCausalLM, which does not read memory_tokens;", told), told
        (folder / "model.safetensors").unlink(missing_ok=True)


def test_every_kind_that_kernels_hold_is_explained() -> None:
    assert set(BLOCK_BYTES) | set(DENSE_KINDS) <= set(inspect._KERNELS)
    assert "6-bit" in inspect._KERNELS["q6_k"]


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


def test_show_says_in_short_what_a_model_is_and_can_do(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(smollm2)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    size = f"file size {format_bytes(smollm2.stat().st_size)}"
    for fact in ("architecture llama", "parameters 134.5M", "quantization Q4_1", "context length 8,192", size):
        assert fact in said
    assert "Capabilities completion tools" in said and "License apache-2.0" in said
    for flag, begins in (("--license", "apache-2.0"), ("--template", "{% for"), ("--parameters", "temperature")):
        assert cli.main(["show", str(smollm2), flag]) == 0
        assert capsys.readouterr().out.startswith(begins)


def test_show_reads_what_a_folder_says_of_its_license_and_names_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = hf_folder(tmp_path / "hf")
    assert cli.main(["show", str(folder), "--license"]) == 2
    assert capsys.readouterr().err == "tokenmill: The model's files tell no license.\n"
    (folder / "README.md").write_text("---\nlibrary_name: x\nlicense: mit\n---\nlicense: none of this\n")
    assert cli.main(["show", str(folder)]) == 0
    assert "License\n  mit\n" in capsys.readouterr().out
    (folder / "LICENSE").write_text("Permission is granted\n")
    assert cli.main(["show", str(folder), "--license"]) == 0
    assert capsys.readouterr().out == "Permission is granted\n\n"


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "\\x1b[2Jmit\n\n"), (False, "\x1b[2Jmit\n\n")])
def test_show_has_a_terminal_obey_no_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_terminal: bool,
    shown: str,
) -> None:
    folder = hf_folder(tmp_path / "hf")
    (folder / "LICENSE").write_text("\x1b[2Jmit\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert cli.main(["show", str(folder), "--license"]) == 0
    assert capsys.readouterr().out == shown

"""`pull`, `list`, `rm` and `search` as a user sees them, with a stand-in for the hub."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import run_command
from fake_hub import FakeHub, fake_hub
from tokenmill.bench import machine
from tokenmill.cli import models
from tokenmill.cli.models import progress_bar
from tokenmill.cli.partners import tell_if_small
from tokenmill.node.machine import MachineFacts


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub(monkeypatch) as server:
        monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
        yield server


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_model_from_pull_to_rm(server: FakeHub) -> None:
    server.files["gemma-3-1b-it-Q4_K_M.gguf"] = b"GGUF"
    pulled = run_command("pull", "gemma3:1b")
    path = Path(pulled.stdout.strip())
    assert pulled.returncode == 0 and path.read_bytes() == b"GGUF"
    assert pulled.stderr == "tokenmill: fetching gemma3:1b: 4 B\n"
    assert run_command("list").stdout.splitlines()[1].split()[0] == "gemma3:1b"
    assert run_command("pull", "gemma3:1b-it", "--verify").stdout.count("intact: sha256") == 1
    path.write_bytes(b"oops")
    damaged = run_command("pull", "--verify", "gemma3:1b")
    assert damaged.returncode == 2 and "changed on disk" in damaged.stderr.splitlines()[-1]
    assert "removed gemma3:1b" in run_command("rm", "hf.co/ggml-org/gemma-3-1b-it-GGUF:Q4_K_M").stdout
    assert "No model is cached" in run_command("list").stdout


def test_a_download_that_broke_off_is_removed_by_name(server: FakeHub) -> None:
    """And nothing else of its repository."""
    server.files["M-Q4_K_M.gguf"] = b"GGUF" * 100
    server.cuts = [100, 0, 0, 0, 0]
    failed = run_command("pull", "org/x")
    assert failed.returncode == 2 and "fetch it again to go on" in failed.stderr.splitlines()[1]
    assert "No model is cached" in run_command("list").stdout
    assert "removed org/x (100 B" in run_command("rm", "org/x").stdout
    assert run_command("rm", "org/x").returncode == 2
    server.files["M-Q8_0.gguf"] = b"GGUF"
    server.cuts = [100, 0, 0, 0, 0]
    run_command("pull", "org/x")
    run_command("pull", "org/x:Q8_0")
    assert "removed org/x:Q4_K_M (100 B" in run_command("rm", "org/x:Q4_K_M").stdout
    assert run_command("list").stdout.splitlines()[1].split()[0] == "org/x:Q8_0"


def test_flags_of_llama_server_that_name_a_model() -> None:
    """-hf takes what MODEL does, and so does the flag for an address."""
    refused = run_command("serve", "-mu", "http://models.example/M.gguf")
    assert refused.returncode == 2 and "tokenmill chat --url URL" in refused.stderr
    refused = run_command("serve", "-hf", "org/x", "-hff", "M.gguf")
    assert refused.returncode == 2 and "-hf org/name:FILE.gguf" in refused.stderr


def test_a_gated_model_says_what_to_do(server: FakeHub) -> None:
    server.refusal = (403, "GatedRepo")
    refused = run_command("pull", "google/gemma-3-1b-it")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "accept its licence" in refused.stderr and "HF_TOKEN" in refused.stderr and not refused.stdout


def test_known_models_and_which_fit(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["Qwen3-4B-Q4_K_M.gguf"] = b"GGUF"
    run_command("pull", "qwen3:4b")
    monkeypatch.setattr(models, "read_machine", lambda: MachineFacts(2, None, 6 * 10**9, None))
    monkeypatch.setattr(machine, "read_bandwidth", lambda num_threads: 40.0)
    lines = {line.split()[0]: line for line in run_command("list", "--available").stdout.splitlines() if line}
    assert " 12  yes " in lines["qwen3:4b"] and " 6.0  yes " in lines["qwen3:8b"].replace(" no ", " yes ")
    assert " 14  no " in lines["qwen3:30b-a3b"], "a token goes through 3.3 of 30.5 billion parameters"
    assert " yes " in lines["qwen3:4b"] and lines["qwen3:4b"].endswith("first choice for tools (cached)")
    assert " no " in lines["qwen3:14b"] and "4.0B" in lines["qwen3:4b"]


def test_a_model_that_does_not_fit_is_called_so_before_it_is_fetched(
    server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["Qwen3-4B-Q4_K_M.gguf"] = b"GGUF"
    monkeypatch.setattr(models, "read_machine", lambda: MachineFacts(2, None, 2 * 1024**3, None))
    first, again = run_command("pull", "qwen3:4b"), run_command("pull", "qwen3:4b")
    assert first.stderr.startswith(
        "tokenmill: note: qwen3:4b takes about 3.5 GiB to run, and 2.0 GiB of memory are free"
    )
    assert first.returncode == again.returncode == 0 and not again.stderr


def test_search_tells_what_runs_here(server: FakeHub) -> None:
    server.found = [
        {"id": "a/Qwen3-4B-GGUF", "downloads": 70_000, "gguf": {"total": 4 * 10**9, "architecture": "qwen3"}},
        {"id": "b/Odd-GGUF", "downloads": 5, "gated": "manual", "gguf": {"total": 7 * 10**6, "architecture": "odd"}},
    ]
    lines = run_command("search", "qwen3:4b").stdout.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["qwen3:4b", "qwen3:4b-instruct"], "known ones come first"
    assert lines[3].split() == ["a/Qwen3-4B-GGUF", "4.0B", "70.0K", "yes"]
    assert lines[4].split()[:5] == ["b/Odd-GGUF", "7.0M", "5", "no", "(odd),"] and "licence" in lines[4]
    server.found = [{"id": "c/M", "gguf": {"architecture": "\x1b]0;owned\x07"}}]
    assert "no (\\x1b]0;owned\\x07)" in run_command("search", "x").stdout, "uploaders choose it; a terminal would obey"
    server.found = []
    assert run_command("search", "nothing").stdout == "The hub has none with GGUF files.\n"
    assert "--limit must be from 1 to 100" in run_command("search", "x", "--limit", "0").stderr


def test_a_bar_begins_with_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rate and time left are of what comes now; nothing is drawn where nothing is fetched. A log gets one line."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress_bar("fetching x") as progress:
        assert progress is not None
        assert not sys.stderr.getvalue()  # type: ignore[attr-defined]
        progress(900_000_000, 1_000_000_000)
        progress(900_000_100, 1_000_000_000)
    drawn = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "858.3 MiB of 953.7 MiB" in drawn and "MiB/s" not in drawn
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress_bar("fetching x") as progress:
        assert progress is not None
        progress(1024, 3072)
        progress(2048, 3072)
    assert sys.stderr.getvalue() == "tokenmill: fetching x: 3.0 KiB\n"
    with progress_bar("fetching x", quiet=True) as progress:
        assert progress is None


@pytest.mark.parametrize(("count", "said"), [(134_515_008, "small (134.5M parameters)"), (4 * 10**9, ""), (0, "")])
def test_small_models_are_called_small(count: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal alone."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    tell_if_small(count)
    told = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert said in told and told.count("\n") == bool(said)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    tell_if_small(count)
    assert not sys.stderr.getvalue()  # type: ignore[attr-defined]

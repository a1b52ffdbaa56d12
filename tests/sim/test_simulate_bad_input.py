"""`tokenmill simulate` of what cannot be: exit code 2, and one line that names the field, flag or file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tokenmill.cli.main import main

FINE = """
[model]
name = "llama-3-8b"
[[workers]]
hardware = "h100-sxm"
"""
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
TRACE = ("--dataset-name", "trace", "--dataset-path")
ROUTER = """
class Mine:
    uses_keys = False

    def choose(self, request, links, now):
        raise ValueError("what is this?\\nno idea")

    def leave(self, link):
        pass

    def note_fetch(self, num_tokens, took_s):
        pass
"""

CLUSTERS = {
    "no TOML": ("[[workers", "c.toml is no TOML: "),
    "empty": ("", "workers: at least one [[workers]] is needed"),
    "section": (FINE + "[wrokers]\nx = 1", "wrokers: no such key; did you mean 'workers'?"),
    "key": (FINE + "hardwere = 1", "workers[0].hardwere: no such key; did you mean 'hardware'?"),
    "hardware": (FINE.replace("h100-sxm", "h1000"), "workers[0].hardware: 'h1000' is unknown"),
    "model": (FINE.replace("llama-3-8b", "llama-9"), "model.name: 'llama-9' is unknown"),
    "no workers": (FINE + "count = 0", "workers[0].count: a whole number of 1 or more"),
    "a billion workers": (FINE + "count = 1000000000", "workers[0].count: 100000 at most"),
    "heads": (FINE + "tensor_parallel = 3", "workers[0].tensor_parallel: llama-3-8b has 32 heads"),
    "dense": (FINE + "expert_parallel = true", "workers[0].expert_parallel: llama-3-8b has no experts"),
    "memory": (FINE + "memory_share = 1.5", "workers[0].memory_share: a number that is more than 0 and at most 1"),
    "nested": ("x = " + "[" * 5000 + "]" * 5000, "c.toml is no TOML: "),
    "too large": (FINE.replace("llama-3-8b", "deepseek-v3"), "workers[0].hardware: deepseek-v3 takes 1252 GiB"),
    "no price": (FINE.replace("h100-sxm", "a40") + "[prices]", "prices.a40: no price of a40 is known"),
    "price": (FINE + "[prices]\nh100-sxm = -1", "prices.h100-sxm: a number that is more than 0"),
    "router": (FINE + '[router]\nrouting_policy = "nearest"', "router.routing_policy: 'nearest' is unknown"),
    "rows": (FINE + "[engine]\nmax_num_seqs = 0", "engine.max_num_seqs: a whole number of 1 or more"),
    "no acceptance": (FINE + "[engine.speculative_config]", "engine.speculative_config.acceptance: a record's file"),
    "sure drafts": (
        FINE + "[engine.speculative_config]\nacceptance = [0.5, 2]",
        "engine.speculative_config.acceptance: a record's file, a rate from 0 to 1",
    ),
    "no record": (
        FINE + "[engine.speculative_config]\nacceptance = 'none.jsonl'",
        "engine.speculative_config.acceptance: none.jsonl cannot be read",
    ),
    "drafts": (
        FINE + "[engine.speculative_config]\nacceptance = 0.5\nnum_speculative_tokens = 65",
        "engine.speculative_config.num_speculative_tokens: 64 at most",
    ),
    "few drafts": (
        FINE + "[engine.speculative_config]\nacceptance = 0.5\nnum_speculative_tokens = 2\nn_min = 3",
        "engine.speculative_config.n_min: n_min of speculative_config must be at most num_speculative_tokens (2)",
    ),
    "drafter": (
        FINE + "[engine.speculative_config]\nacceptance = 0.5\nmethod = 'suffix'",
        "engine.speculative_config.method: no such key",
    ),
    "nan": (FINE + "[network]\nlatency_s = nan", "network.latency_s: a number that is 0 or more is needed, not nan"),
    "endless": (FINE + "[network]\nlatency_s = inf", "network.latency_s: a number that is 0 or more"),
    "a word": (FINE + '[network]\nlatency_s = "fast"', "network.latency_s: a number that is 0 or more"),
    "tape": (FINE + '[[tiers]]\nkind = "tape"', "tiers[0].kind: 'tape' is unknown"),
    "target": (FINE + '[[faults]]\nkind = "crash"\ntarget = "w9"\nat_s = 1', "faults[0].target: 'w9' is unknown"),
    "past": (FINE + '[[faults]]\nkind = "crash"\ntarget = "w0"\nat_s = -1', "faults[0].at_s: a number that is 0"),
    "calibration": ("[[workers]]\ncalibration = 'x.json'\nkv_blocks = 9", "workers[0].calibration: "),
    "front end": (FINE + "[host]\ncalibration = 'x.json'", "host.calibration: "),
    "load": (
        FINE + "[load]\nnmu_prompts = 3",
        "[load]: nmu_prompts is no setting of a load: did you mean num-prompts?",
    ),
}


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that there is."""
    try:
        code = main(["simulate", *words])
    except SystemExit as error:  # argparse's own
        code = int(str(error.code))
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1 and error.startswith("tokenmill"), error
    return error


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_that_cannot_be(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, told = CLUSTERS[name]
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(text)
    assert told in refused(capsys, "c.toml", "--num-prompts", "3")


WORDS: dict[str, tuple[tuple[str, ...], str]] = {
    "no such load": (("--load", "none.toml"), "none.toml cannot be read as a load: No such file"),
    "load of a folder": (("--load", "."), ". cannot be read as a load: Is a directory"),
    "live result": (("--against", "none.json"), "--against none.json cannot be read: No such file or directory."),
    "no live result": (("--against", "empty.json"), "empty.json is no result of tokenmill bench"),
    "half a result": (("--against", "half.json"), "--against half.json is no JSON: "),
    "load of a live result": (("--against", "empty.json", "--request-rate", "2"), "--request-rate is not of --against"),
    "rows of a live result": (("--against", "empty.json", "--csv", "x.csv"), "--csv is not of --against"),
    "fidelity's folder": (("--against", "empty.json", "--json", "no/where.json"), "The folder of no/where.json does"),
    "speed of nothing": (("--speed-factor", "2"), "--speed-factor is of --against"),
    "beside": (("--html", "h.html", "--beside", "none.json"), "none.json cannot be read: No such file or directory."),
    "no trace named": (("--dataset-name", "trace"), "--dataset-name trace needs --dataset-path"),
    "no trace": ((*TRACE, "none.csv"), "none.csv cannot be read as text: No such file"),
    "no column": ((*TRACE, "column.csv"), "column.csv has no column GeneratedTokens; its columns are TIMESTAMP, C"),
    "hole": ((*TRACE, "hole.csv"), "hole.csv has no row that can be used: 1 rows were left out: GeneratedTokens is no"),
    "time": ((*TRACE, "time.csv"), "time.csv has no row that can be used: 1 rows were left out: TIMESTAMP is no time"),
    "length": ((*TRACE, "length.csv"), "ContextTokens is below 1"),
    "form": ((*TRACE, "half.json"), "half.json, line 1, is not a JSON object"),
    "day": ((*TRACE, "fine.csv", "--day", "soon"), "--day: must be a time such as 24h"),
    "day of nothing": (("--day", "1h"), "--day is of --dataset-name trace"),
    "policy": (("--policy", "routing=nearest"), "--policy routing=... must be one of kv_aware"),
    "no policy file": (("--policy", "none.py"), "--policy none.py: the file cannot be read: No such file"),
    "no Python": (("--policy", "syntax.py"), "--policy syntax.py: line 1 is no Python"),
    "fails at once": (("--policy", "zero.py"), "--policy zero.py: running it failed: ZeroDivisionError"),
    "fails later": (("--policy", "router.py"), "/router.py, line 6, failed while it ran: ValueError: what is "),
    "returns nothing": (("--policy", "nothing.py"), "nothing.py: what it returned cannot be used: AttributeError: "),
    "nested load": (("--load", "nested.toml"), "nested.toml cannot be read as a load: "),
    "nested result": (("--against", "nested.json"), "--against nested.json is no JSON: "),
    "result's folder": (("--json", "no/where.json"), "The folder of no/where.json does not exist."),
    "result that is a folder": (("--json", "."), "--json . is a folder."),
    "half a client": (("--sweep-concurrency", "1.5"), "--sweep-concurrency: must be whole numbers above 0, got 1.5"),
    "trace's folder": (("--trace", "no/where.json"), "The folder of no/where.json does not exist."),
    "sweep of nothing": (("--sweep", "workers[5].count=1,2"), "--sweep: there is no workers[5].count"),
    "sweep": (("--sweep", "workers[0].count=a,b"), "workers[0].count: a whole number of 1 or more"),
    "no requests": (("--num-prompts", "0"), "--num-prompts must be at least 1"),
    "rate": (("--request-rate", "nan"), "--request-rate must be above 0, got nan."),
    "goodput": (("--goodput", "ttft:x"), "--goodput takes NAME:MILLISECONDS"),
    "cost": (("--find-goodput", "--goodput", "ttft:9", "--cost-per-hour", "-3"), "--cost-per-hour must be 0 or more"),
    "long prompts": (("--random-input-len", "9000"), "http_400): The prompt has 9000 tokens"),
}
FILES = {
    "empty.json": "{}",
    "half.json": '{"schema": 4, "kin',
    "column.csv": AZURE.replace(",GeneratedTokens", "").replace(",44", ""),
    "hole.csv": AZURE.replace("44", ""),
    "time.csv": AZURE.replace("2023-11-16", "yesterday"),
    "length.csv": AZURE.replace("374", "-374"),
    "fine.csv": AZURE,
    "syntax.py": "def f(:\n",
    "zero.py": "1 / 0\n",
    "router.py": ROUTER,
    "nothing.py": ROUTER.replace('raise ValueError("what is this?\\nno idea")', "return None"),
    "nested.toml": "x = " + "[" * 5000 + "]" * 5000,
    "nested.json": "[" * 100_000 + "]" * 100_000,
}


@pytest.mark.parametrize("name", WORDS)
def test_a_load_that_cannot_be(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, told = WORDS[name]
    monkeypatch.chdir(tmp_path)
    for path, text in FILES.items():
        Path(path).write_text(text)
    Path("c.toml").write_text(FINE + "count = 2\n[engine]\nmax_model_len = 8192\n")
    num = () if "--against" in words else ("--num-prompts", "3")
    assert told in refused(capsys, "c.toml", *num, *words)


def test_rows_with_holes_are_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where others can be used."""
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(FINE)
    Path("t.csv").write_text(AZURE + "2023-11-16 18:15:47.5,374,\n2023-11-16 18:15:48.5,20,5\n")
    assert main(["simulate", "c.toml", *TRACE, "t.csv"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"1 rows? .*left out.*GeneratedTokens is no number", said), said

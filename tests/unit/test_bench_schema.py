"""docs/operate/benchmarking.md names every field of the JSON that benchmarks write."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tokenmill.bench import core, kernels, result
from tokenmill.bench import profile as profile
from tokenmill.bench import report as output
from tokenmill.bench.machine import Interference
from tokenmill.bench.report import Figure, Report

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs" / "operate" / "benchmarking.md").read_text()


def described(kind: str) -> set[str]:
    """Names in code quotes between the kind's own heading and the next kind's."""
    start = PAGE.index(f'`"kind": "{kind}"`')
    rest = PAGE[start + 1 :]
    end = min((at for at in (rest.find('`"kind": "'), rest.find("\n### ")) if at >= 0), default=len(rest))
    return set(re.findall(r"`(\w+)`", PAGE[start : start + 1 + end]))


def keys_of(value: Any) -> set[str]:
    """Of an object and of all objects in its lists."""
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    return set(value) if isinstance(value, dict) else set()


CASE = kernels.Measured("linear", "a x b", 1, 10, 20, [0.1], [1e9], 1e12)
FIGURE = Figure("one", "decode", {"own": [1.0, 2.0], "peer": [1.0, 1.0]}, Interference(1.0, 0.0))
CORE = core.CoreTimes(64, "plan", [1.0, 2.0, 3.0])
STEP = profile.StepTimes(1, 128, {"linear": 1.0}, 2.0, 0.5, 3.0, {"plan": 0.1})
SERVED = profile.ServedTimes(1, 128, 128, 1.0, 1.0, 1.0, {"engine": 1.0}, {"json": 1.0})


@pytest.mark.parametrize(
    ("plain", "nested"),
    [
        (kernels.to_json([CASE], {"int8": 1.0, "f32": 1.0}, ["note"]), ("cases", "peaks")),
        (Report({"a": {"b": "c"}}, (1.0, 2.0), [FIGURE]).to_json(), ("figures", "bandwidth_gb_per_s")),
        (core.to_json([CORE], ["note"]), ("parts",)),
        (profile.to_json([STEP], [SERVED], {"model": "m"}), ("steps", "served")),
    ],
    ids=["kernels", "engine", "core", "profile"],
)
def test_every_field_in_process_is_described(plain: dict[str, Any], nested: tuple[str, ...]) -> None:
    """The object's own, and those of the objects in it."""
    names = described(plain["kind"]) | {"schema", "kind"}
    wanted = set(plain).union(*(keys_of(plain[name]) for name in nested))
    if plain["kind"] == "engine":
        wanted |= keys_of([figure["ratio"] for figure in plain["figures"]])
        wanted |= {field.name for field in fields(Interference)}
    assert wanted <= names, wanted - names
    assert plain["schema"] == 1


@pytest.mark.parametrize(
    ("kind", "nouns"),
    [
        ("run", (result.Run, result.Distribution, result.RequestRow, result.Slo, result.Fairness, result.TenantRow)),
        ("run", (result.ErrorClass, result.ClientCost, result.ServerMetrics, result.Energy, result.Bucket)),
        ("goodput", (result.Goodput, result.Probe)),
        ("compare", (result.Comparison, result.Ratio, result.Figure)),
        ("repeats", (result.Interval,)),
    ],
)
def test_every_field_of_a_load_is_described(kind: str, nouns: tuple[Any, ...]) -> None:
    """Of every noun that a result is made of."""
    wanted = {field.name for noun in nouns for field in fields(noun)}
    assert wanted <= described(kind), wanted - described(kind)


def test_json_takes_standard_output_for_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables go to standard error then; a file is written as ever, and nothing where none is asked for."""
    output.write_json(None, {})
    output.write_json(tmp_path / "x.json", {"a": "é"})
    assert (tmp_path / "x.json").read_text(encoding="utf8") == '{"a": "é"}\n'
    output.write_json(output.STANDARD_OUTPUT, {"a": 1})
    output.console_beside(output.STANDARD_OUTPUT).print("table")
    output.console_beside(None).print("other")
    seen = capsys.readouterr()
    assert seen.out == '{"a": 1}\nother\n' and seen.err == "table\n"

"""The sample of a change: the same for one commit, another for another, and over many commits all there is."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sampling
from sampling import ROOT, Sample, chosen, pinned

CASES = [f"test_x.py::test_it[{number}]" for number in range(12)]


def test_a_commit_has_one_sample() -> None:
    assert chosen("test_it", CASES, 0.25, "one") == chosen("test_it", CASES, 0.25, "one")
    assert len({frozenset(chosen("test_it", CASES, 0.25, f"commit {number}")) for number in range(20)}) > 10


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 1])
def test_commits_together_run_everything_about_as_often_as_the_share_says(share: float) -> None:
    samples = [chosen("test_it", CASES, share, f"commit {number}") for number in range(4000)]
    for case in CASES:
        assert share * 3000 <= sum(case in sample for sample in samples) <= share * 5000


def test_a_test_of_one_case_is_run_in_a_share_of_commits() -> None:
    num_run = sum(len(chosen("test_it", CASES[:1], 0.25, f"commit {number}")) for number in range(400))
    assert 70 <= num_run <= 130


def test_what_is_pinned_exists() -> None:
    """A name that fits no test any more would guard against nothing. Collection compares the parameters."""
    for name in pinned():
        path, function = name.split("[")[0].split("::")
        assert f"def {function}(" in (ROOT / path).read_text(), name


@pytest.mark.parametrize(
    ("args", "lf", "unknown"),
    [
        (["tests"], False, ["test_x.py::test_it[12]"]),
        (["test_x.py::test_it[1]"], False, []),
        (["tests"], True, []),
    ],
    ids=["whole", "by name", "last failed"],
)
def test_a_pinned_case_that_its_file_lacks_is_an_error_of_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], lf: bool, unknown: list[str]
) -> None:
    monkeypatch.setattr(sampling, "PINNED", tmp_path / "pinned.txt")
    sampling.PINNED.write_text(f"{CASES[3]}\ntest_x.py::test_it[12]\ntest_not_collected.py::test_it[12]\n")
    items: list[Any] = [SimpleNamespace(nodeid=case, get_closest_marker=lambda name: None) for case in CASES]
    reports: list[pytest.CollectReport] = []
    hook = SimpleNamespace(
        pytest_deselected=lambda items: None, pytest_collectreport=lambda report: reports.append(report)
    )
    config: Any = SimpleNamespace(hook=hook, args=args, getoption=lambda name, default: lf)
    Sample("one").pytest_collection_modifyitems(config, items)
    assert [str(report.longrepr).split(": ")[1] for report in reports] == unknown
    assert all(report.failed for report in reports) and len(items) == len(CASES)


def keep(into: list[Any], items: list[Any]) -> None:
    into += items


def test_what_is_marked_is_sampled_and_what_is_pinned_is_always_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "PINNED", tmp_path / "pinned.txt")
    sampling.PINNED.write_text(f"# found a fault\n{CASES[3]}\n")
    mark = pytest.mark.sampled(0.1).mark
    for number in range(20):
        items: list[Any] = [SimpleNamespace(nodeid=case, get_closest_marker=lambda name: mark) for case in CASES]
        items.append(SimpleNamespace(nodeid="test_x.py::test_other", get_closest_marker=lambda name: None))
        left_out: list[Any] = []
        hook = SimpleNamespace(pytest_deselected=partial(keep, left_out))
        config: Any = SimpleNamespace(hook=hook, args=["tests"], getoption=lambda name, default: default)
        Sample(f"commit {number}").pytest_collection_modifyitems(config, items)
        assert {CASES[3], "test_x.py::test_other"} <= {item.nodeid for item in items}
        assert len(items) <= 4 and len(items) + len(left_out) == len(CASES) + 1

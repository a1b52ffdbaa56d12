"""Which cases of costly tests a change runs: a sample that follows from what the commit contains.

A test with the mark `sampled(share)` has a share of its cases run when pytest is given `--sample`, and all of them when
it is not. The sample is a function of the commit's tree: two runs of one commit try the same, and other commits try
others. What a sample once found is listed in `pinned.txt` and is then always run.
"""

from __future__ import annotations

import random
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PINNED = ROOT / "tests" / "pinned.txt"


def tree() -> str:
    """The name that git has for what the commit contains; a fixed one where there is no git."""
    found = subprocess.run(["git", "rev-parse", "HEAD^{tree}"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else "no commit"


def pinned() -> list[str]:
    """The cases, by the names that pytest prints."""
    lines = (line.split("#")[0].strip() for line in PINNED.read_text().splitlines())
    return [line for line in lines if line]


def chosen(function: str, cases: list[str], share: float, seed: str) -> set[str]:
    """Of the cases of one test, a share: what is left after the whole number is one more in that share of commits."""
    rng = random.Random(f"{seed} {function}")
    return set(rng.sample(cases, int(len(cases) * share + rng.random())))


def unmatched(config: pytest.Config, collected: list[str]) -> list[str]:
    """What is pinned of collected files and is none of their cases; nothing where only some cases were asked for."""
    if config.getoption("lf", False) or any("::" in arg for arg in config.args):
        return []
    files = {name.split("::")[0] for name in collected}
    return [name for name in pinned() if name.split("::")[0] in files and name not in collected]


class Sample:
    """A pytest plugin: leaves out what is not in the sample, and says what to do about a failure in it."""

    def __init__(self, seed: str) -> None:
        self.seed = seed

    @pytest.hookimpl(tryfirst=True)  # before `-k` takes items away
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if unknown := unmatched(config, [item.nodeid for item in items]):
            message = f"no test has the name of these pinned cases: {', '.join(unknown)}"
            report = pytest.CollectReport("tests/pinned.txt", "failed", message, [])
            config.hook.pytest_collectreport(report=report)
        kept: set[str] = set()
        shares: dict[str, float] = {}
        cases = defaultdict(list)
        for item in items:
            if mark := item.get_closest_marker("sampled"):
                function = item.nodeid.split("[")[0]
                shares[function] = mark.args[0]
                cases[function].append(item.nodeid)
        for function, names in cases.items():
            kept |= chosen(function, names, shares[function], self.seed)
        left_out = {name for names in cases.values() for name in names} - kept - set(pinned())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        say = terminalreporter.write_line
        say(f"This was a sample, chosen by {self.seed}; make test-all runs everything.")
        for report in (*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("error", ())):
            if "sampled" not in getattr(report, "keywords", ()):  # of an error of collection there are none
                continue
            say(f"{report.nodeid} is of the sample. Whether the fault is new:")
            say(f"  git checkout --quiet HEAD^; make test ARGS=\"'{report.nodeid}'\"; git checkout --quiet -")
            say(f"  echo '{report.nodeid}' >> tests/pinned.txt    runs it with every change from now on")

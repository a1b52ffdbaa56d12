"""Plans that an earlier build made are still made: its journals replay equal."""

from __future__ import annotations

import gzip
from collections import Counter

from make_plans import PLANS, SEEDS

from tokenmill.core.effects import StepFailed
from tokenmill.engine.journal import Handled, Planned, entry_line, header_line, read_journal
from tokenmill.engine.replay import replay
from tokenmill.sim.run import run_seed
from tokenmill.sim.workload import make_scenario


def test_recorded_plans_are_planned_again() -> None:
    """Chunks, hits, windows, preemption, failed steps and cancelled requests are among them. A difference that is meant
    is recorded by make_plans.py."""
    journals: list[list[str]] = []
    for line in gzip.decompress(PLANS.read_bytes()).decode().splitlines(keepends=True):
        if line.startswith('{"type":"Header"'):
            journals.append([])
        journals[-1].append(line)
    assert len(journals) == len(SEEDS)
    seen: Counter[str] = Counter()
    for seed, lines in zip(SEEDS, journals, strict=True):
        config, entries = read_journal(lines)
        story = list(entries)
        num_steps, difference = replay(config, story)
        assert difference is None, f"seed {seed}, step {num_steps}: {difference}"
        assert num_steps > 30
        seen["windows"] += any(group.window for group in config.groups)
        for entry in story:
            seen["failed"] += isinstance(entry, Handled) and isinstance(entry.event, StepFailed)
            if isinstance(entry, Planned) and entry.plan is not None:
                seen["hits"] += any(row.intro is not None and row.start for row in entry.plan.rows)
                seen["resumed"] += any(row.intro is not None and row.intro.output_tokens for row in entry.plan.rows)
                seen["ahead"] += any(row.from_step >= 0 for row in entry.plan.rows)
    assert all(seen[what] for what in ("windows", "failed", "hits", "resumed", "ahead")), seen


def test_the_text_of_a_journal_says_all_that_happens_in_simulation() -> None:
    """Whatever a core is told, features that come later included, is read back as it was."""
    told: set[str] = set()
    for seed in range(12):
        journal = run_seed(seed).journal
        text = [f"{line}\n" for line in (header_line(make_scenario(seed).config), *map(entry_line, journal))]
        config, entries = read_journal(text)
        assert config == make_scenario(seed).config and list(entries) == journal, f"seed {seed}"
        told |= {type(entry.event).__name__ for entry in journal if isinstance(entry, Handled)}
    assert told >= {"Submit", "Abort", "StepFailed", "JobEnded"}, told

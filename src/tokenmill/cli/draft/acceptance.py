"""`draft acceptance JOURNAL... --out PATH`: what came of an engine's drafts, for simulations (sim/acceptance.py)."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...core.errors import ConfigError
from ...core.units import visible
from ...engine.journal import read_journal
from ...formats.digest import write_atomically
from ...sim.acceptance import AcceptanceRecorder, Record, lines_of


def add_arguments(acceptance: argparse.ArgumentParser) -> None:
    acceptance.add_argument(
        "journals", nargs="+", type=Path, metavar="JOURNAL", help="files of tokenmill serve --journal"
    )
    acceptance.add_argument(
        "--out", "-o", type=Path, required=True, metavar="PATH", help="the record to write: no prompts, no answers"
    )


def acceptance(args: argparse.Namespace) -> int:
    recorder = AcceptanceRecorder()
    for path in args.journals:
        _hear(path, recorder)
    record = recorder.end()
    write_record(args.out, record)
    steps = [step for answer in record.answers for step in answer]
    num_tokens, num_proposed = sum(step.num_drawn for step in steps), sum(step.proposed is not None for step in steps)
    print(
        f"{visible(str(args.out))}: {len(record.answers):,} answers, {num_tokens:,} tokens in {len(steps):,} steps,"
        f" behind {num_proposed:,} of which something was proposed"
    )
    return 0


def write_record(path: Path, record: Record) -> None:
    """Raises ConfigError."""
    if not record.answers:
        raise ConfigError("Nothing was answered that could be recorded; send requests first.", param="acceptance")
    try:
        write_atomically(path, "".join(lines_of(record)))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.", param="out") from None


def _hear(path: Path, recorder: AcceptanceRecorder) -> None:
    try:
        with path.open(encoding="utf8") as file:
            config, entries = read_journal(file)
            for entry in entries:
                recorder(entry)
            recorder.end()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", param="journals") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no journal of tokenmill serve --journal: {error}", param="journals") from None
    if config.speculation is None:
        told = "was written by an engine that drafts nothing; give --speculative-config beside --journal."
        raise ConfigError(f"{path} {told}", param="journals")

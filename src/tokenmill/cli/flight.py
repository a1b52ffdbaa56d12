"""`flight`: what an engine did last, from the file of its flight recorder."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from ..core.errors import ConfigError
from ..core.flight import FAILED, VOID, Flight, StepRecord, read_flight

_NUM_SHOWN = 5


def flight(args: argparse.Namespace) -> int:
    try:
        found = read_flight(Path(args.file).read_bytes())
    except OSError as error:
        raise ConfigError(f"{args.file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{args.file} cannot be used: {error}.") from error
    for line in describe(found):
        print(line)
    if args.output:
        from ..control.observe.perfetto import trace_of

        try:
            Path(args.output).write_text(json.dumps(trace_of(found)), encoding="utf8")
        except OSError as error:
            raise ConfigError(f"{args.output} cannot be written: {error.strerror}.", param="output") from error
        print(f"wrote {args.output}: open it at https://ui.perfetto.dev")
    return 0


def describe(found: Flight) -> list[str]:
    """Of the engine, its last steps, and the requests that were open."""
    header, steps = found.header, found.steps
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(header.unix_s + header.began_s))
    lines = [f"engine of {header.model}, pid {header.pid}, recorded from {began} on: {len(steps)} steps"]
    if not steps:
        return lines
    names = {each.seq: each.id for each in found.requests}
    in_flight = [step for step in steps if not step.ended_s]
    last_s = max(max(step.planned_s, step.committed_s) for step in steps)
    lines.append(f"last sign of life {last_s - header.began_s:.3f} s after that; {len(in_flight)} steps were in flight")
    lines += [_step_line(step, names, header.began_s) for step in steps[-_NUM_SHOWN:]]
    open_ones = [each for each in found.requests if not each.ended_s]
    lines.append(f"{len(open_ones)} requests were open")
    for each in open_ones[-20:]:
        lines.append(
            f"  {each.id}: {each.num_prompt} prompt tokens ({each.num_cached} cached), arrived "
            f"{each.arrival_s - header.began_s:.3f} s"
            + (f", first token {each.first_token_s - header.began_s:.3f} s" if each.first_token_s else "")
            + (f", tenant {each.tenant}" if each.tenant else "")
        )
    return lines


def _step_line(step: StepRecord, names: dict[int, str], zero_s: float) -> str:
    state = "failed" if step.flags & FAILED else "void" if step.flags & VOID else "" if step.ended_s else "in flight"
    took = f"{1e3 * step.duration_s:.1f} ms" if step.ended_s else ""
    rows = ", ".join(names.get(seq, f"sequence {seq}") for seq in step.seqs[:4])
    more = f" and {step.num_rows - 4} more" if step.num_rows > 4 else ""
    return (
        f"  step {step.number} at {step.planned_s - zero_s:.3f} s {took}{state}: {step.num_rows} rows, "
        f"{step.num_tokens} tokens, {step.num_running} running, {step.num_waiting} waiting ({rows}{more})"
    )

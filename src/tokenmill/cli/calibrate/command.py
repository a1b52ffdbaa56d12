"""`calibrate LOG... --out FILE`: fit a cost model of steps to logs, say how far off it is, and write it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...core.step_records import StepRecords, read_steps
from ...plan.fit.logs import check_same_engine, errors_of, fit, spans_of, speed_factor
from ...plan.fit.observed import observed
from ...sim.calibrated import LEAST_SEEN, Calibrated, Error, Line
from . import black_box

_HEAD = "error                       steps   median   amount: median   90 %   at the span's speed   all seconds"
_STEADY = 1.25
"""By how much spans may differ on a machine that does nothing else."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("logs", nargs="*", metavar="LOG", help="files of tokenmill serve --step-log")
    parser.add_argument(
        "--run",
        dest="runs",
        action="append",
        default=[],
        metavar="FILE",
        help="result of tokenmill bench serve --json of a load that a log is of, made on the same machine: for the time"
        " of front end and clients (repeatable)",
    )
    parser.add_argument("--out", "-o", metavar="FILE", help="write the calibration there (JSON)")
    parser.add_argument(
        "--check", metavar="FILE", help="fit nothing: tell the error of this calibration on the logs, and their speed"
    )
    black_box.add_arguments(parser)


def calibrate(args: argparse.Namespace) -> int:
    if args.black_box:
        return black_box.calibrate(args)
    black_box.refuse_settings(args)
    if not args.logs:
        raise ConfigError("Name step logs, or results of bench serve by --black-box.", param="logs")
    logs = [read_steps(_read(path), path) for path in args.logs]
    if args.check:
        for option, name in ((args.out, "--out"), (args.runs, "--run")):
            if option:
                raise ConfigError(f"--check fits nothing; leave {name} out.", param="check")
        cost_model = Calibrated.from_json(_read(args.check).decode("utf8", "replace"), args.check)
        for line in check(cost_model, logs, args.check):
            print(line)
        return 0
    runs = [(_run(path), path) for path in args.runs]
    cost_model, slowness = fit(logs, runs)
    for line in describe(cost_model, slowness, [len(observed(log)) for log in logs], [log.num_lost for log in logs]):
        print(line)
    if args.out:
        try:
            Path(args.out).write_text(cost_model.to_json(), encoding="utf8")
        except OSError as error:
            raise ConfigError(f"--out {args.out} cannot be written: {error.strerror}.", param="out") from error
        print(f"wrote {args.out}")
    return 0


def check(cost_model: Calibrated, logs: Sequence[StepRecords], name: str) -> list[str]:
    """What a calibration, of file `name`, says of logs that it was not fitted to. Raises ConfigError for those of
    another engine, and for logs without steps."""
    for log in logs:
        check_same_engine(cost_model.machine, log.facts, name)
    spans = [span for log in logs for span in spans_of(observed(log, logs))]
    steps = [each for span in spans for each in span]
    if not steps:
        raise ConfigError("The logs have no steps.", param="log")
    unseen = sum(not cost_model.is_seen(each.step.work) for each in steps)
    lines = [_HEAD, *(_error_line(each) for each in errors_of(cost_model, spans)), ""]
    lines.append(f"{unseen} of {len(steps)} steps are of kinds that the calibration has not seen")
    lines.append(f"speed factor: {speed_factor(cost_model, steps):.4f} (all seconds measured, of those predicted)")
    return lines


def describe(
    cost_model: Calibrated, slowness: Sequence[float], num_steps: Sequence[int], num_lost: Sequence[int]
) -> list[str]:
    machine = cost_model.machine
    lines = [
        f"{machine.model} on {machine.processor or 'an unnamed processor'}, {machine.isa}, threads {machine.threads}:"
        f" {sum(num_steps)} steps of {len(num_steps)} logs"
    ]
    if sum(num_lost):
        lines.append(f"({sum(num_lost)} earlier steps are not in the logs any more)")
    lines.append("")
    lines += ["Steps of spans of time that were held out:", _HEAD]
    lines += [_error_line(each) for each in cost_model.errors]
    slow, fast = max(slowness), min(slowness)
    lines.append(f"spans took {fast:.2f} to {slow:.2f} times as long as by the law")
    if slow > _STEADY * fast:
        lines.append("The machine was not steady: something else ran beside. Calibrate again when it is quiet.")
    if cost_model.experts_s:
        share = f"of which a token chooses {machine.chosen_experts:.1%}"
        lines.append(f"experts: {1e3 * cost_model.experts_s:.3f} ms for a step that reads all of them, {share}")
    lines.append("")
    lines.append(_line("between steps", cost_model.gap, "row"))
    for what, line, number in (
        ("client to engine", cost_model.front, "prompt token"), ("engine to client", cost_model.back, "row"),
    ):  # fmt: skip
        lines.append(_line(what, line, number) if line.num else f"{what}: unknown (no --run, or too few idle moments)")
    beside = cost_model.beside
    if beside.num:
        told = [f"{1e3 * value:.3f} ms" for value in beside[:4]]
        lines.append(
            f"beside steps, of one core: {told[0]} a request that comes, {told[1]} one that ends, {told[2]} a token"
            f"{f', {told[3]} a step' if beside.step_s else ''} ({beside.num} steps seen)"
        )
        if cost_model.crowded_s:
            lines.append(f"beside steps of other engines: {1e3 * cost_model.crowded_s:.3f} ms more")
    else:
        lines.append("beside steps: unknown (no requests in the logs, or cores that steps left free)")
    lines.append("seen, by tokens of a step to rows:")
    seen = [each for each in cost_model.seen if each.num_steps >= LEAST_SEEN]
    for bits in dict.fromkeys(each.token_bits for each in seen):
        rows = [f"{2**each.row_bits} (context to {each.most_context:.0f})" for each in seen if each.token_bits == bits]
        lines.append(f"  {2**bits:>5}: {', '.join(rows)}")
    return lines


def _error_line(error: Error) -> str:
    return (
        f"{error.regime:<26}{error.num_steps:>7}{error.median:>+9.1%}{error.median_abs:>17.1%}{error.p90_abs:>7.1%}"
        f"{error.paced_abs:>22.1%}{error.total:>+14.1%}"
    )


def _line(what: str, line: Line, number: str) -> str:
    return f"{what}: {1e3 * line.base_s:.3f} ms + {1e6 * line.each_s:.2f} us a {number} ({line.num} seen)"


def _run(path: str) -> dict[str, Any]:
    try:
        run = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--run {path} is no JSON.", param="run") from error
    if not isinstance(run, dict):
        raise ConfigError(f"--run {path} is no result of tokenmill bench serve.", param="run")
    return run


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", param="log") from error

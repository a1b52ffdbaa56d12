"""`calibrate --black-box RUN.json...`: a cost model of the steps of a server of which only its clients' times are
known, from results of `bench serve --json`. What its settings are, the command line says: nothing of them can be seen
from outside.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...bench.load.fidelity import Fidelity, runs_in
from ...bench.load.recorded_load import recorded_load
from ...bench.result import SCHEMA
from ...core.errors import ConfigError
from ...core.step_records import Machine
from ...plan.fit.black_box import Live, errors_of, file_of, fit, machine_of, tables_of
from ...plan.fit.token_times import read_run
from ..bench.commands import read_tokenizer

Json = dict[str, Any]

MOST_TOKENS = 2048
"""Of a step, where nobody says: the default of llama-server and of vLLM on processors."""
MOST_IN_TURN = 6
"""Runs of which each is left out in turn."""
HEAD = "error                             TTFT mean   TPOT mean   E2EL mean   E2EL of requests: median   90 %"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("servers without a step log")
    group.add_argument(
        "--black-box",
        nargs="+",
        default=[],
        metavar="RUN.json",
        help="results of tokenmill bench serve --json of any server, instead of logs: fit what its clients saw",
    )
    group.add_argument(
        "--hold-out",
        nargs="+",
        default=[],
        metavar="RUN.json",
        help="runs of the same server to tell the error on, not fitted to (default: each run in turn, of 3 to 6)",
    )
    group.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="requests that the server runs at once (llama-server --parallel)"
    )
    group.add_argument(
        "--max-num-batched-tokens", type=int, default=MOST_TOKENS, metavar="N", help="most tokens of a step of it"
    )
    group.add_argument("--prefix-caching", action="store_true", help="the server keeps KV of equal beginnings")
    group.add_argument("--cluster", metavar="FILE", help="write a file for tokenmill simulate with these settings")


def refuse_settings(args: argparse.Namespace) -> None:
    """Of a calibration by step logs, which say all this. Raises ConfigError."""
    is_given = {
        "--hold-out": args.hold_out,
        "--cluster": args.cluster,
        "--max-num-seqs": args.max_num_seqs is not None,
        "--max-num-batched-tokens": args.max_num_batched_tokens != MOST_TOKENS,
        "--prefix-caching": args.prefix_caching,
    }
    for name, given in is_given.items():
        if given:
            raise ConfigError(f"{name} goes with --black-box.", param=name[2:].replace("-", "_"))


def calibrate(args: argparse.Namespace) -> int:
    for option, name in ((args.logs, "LOG"), (args.runs, "--run"), (args.check, "--check")):
        if option:
            raise ConfigError(f"--black-box is of servers without a step log; leave {name} out.", param="black_box")
    if args.cluster and not args.out:
        raise ConfigError("--cluster names the calibration that --out writes; give both.", param="cluster")
    lives = [live for path in args.black_box for live in read_lives(path)]
    held = [live for path in args.hold_out for live in read_lives(path)]
    machine = machine_of([*lives, *held], args.max_num_seqs, args.max_num_batched_tokens)
    tables = tables_of("calibration", machine, args.prefix_caching)
    found = fit(lives, machine, tables)
    for line in describe(lives, found.errors, machine):
        print(line)
    print("Of runs that were not fitted to:")
    if held:
        for live in held:
            print(error_line(live.name, errors_of(found.cost_model, live, tables)))
    elif 2 < len(lives) <= MOST_IN_TURN:
        for left_out in lives:
            others = fit([live for live in lives if live is not left_out], machine, tables).cost_model
            print(error_line(left_out.name, errors_of(others, left_out, tables)))
    else:
        print(f"none: give --hold-out, or 3 to {MOST_IN_TURN} runs")
    if args.out:
        _write(args.out, found.cost_model.to_json(), "out")
    if args.cluster:
        path = Path(args.cluster)
        _write(args.cluster, file_of(_name_beside(Path(args.out), path), args.prefix_caching), "cluster")
    return 0


def read_lives(path: str) -> list[Live]:
    """The runs of a result, with their loads. Raises ConfigError for what has none that can be simulated."""
    try:
        result = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", param="black_box") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON.", param="black_box") from error
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        told = f"{path} is no result of tokenmill bench serve --json that this version reads."
        raise ConfigError(told, param="black_box")
    try:
        runs = runs_in(result)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", param="black_box") from error
    lives = []
    for number, run in enumerate(runs):
        read_run(run, path)
        try:
            load = recorded_load(run, read_tokenizer)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error.message}", param="black_box") from error
        lives.append(Live(f"{Path(path).name}{f' #{number}' if len(runs) > 1 else ''}", run, load))
    return lives


def describe(lives: Sequence[Live], errors: Sequence[Fidelity], machine: Machine) -> list[str]:
    num = sum(len(read_run(live.result, live.name)) for live in lives)
    told = f"{machine.model}, from outside: {num} requests of {len(lives)} runs; at most {machine.max_num_seqs} at once"
    lines = [
        f"{told} and {machine.max_num_batched_tokens} tokens a step",
        "Not to be seen from outside, and taken for granted: prompts in order of arrival and whole, room for KV, and",
        "whether equal beginnings are computed again (--prefix-caching: they are not).",
        "",
        HEAD,
        "Of the runs that were fitted to:",
    ]
    return [*lines, *(error_line(live.name, each) for live, each in zip(lives, errors, strict=True))]


def error_line(name: str, found: Fidelity) -> str:
    means = [found.figure(f"{each}.mean") for each in ("ttft_s", "tpot_s", "e2el_s")]
    texts = [f"{each.error:>+12.1%}" if each is not None else f"{'-':>12}" for each in means]
    of_requests = found.request("e2el_s")
    sizes = (of_requests.median_size, of_requests.p90_size) if of_requests is not None else (0.0, 0.0)
    return f"  {name:<29}{''.join(texts)}{sizes[0]:>27.1%}{sizes[1]:>7.1%}"


def _name_beside(calibration: Path, cluster: Path) -> str:
    """As the cluster's file names it: from its own folder."""
    same = calibration.resolve().parent == cluster.resolve().parent
    return calibration.name if same else str(calibration.resolve())


def _write(path: str, text: str, param: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf8")
    except OSError as error:
        raise ConfigError(f"--{param} {path} cannot be written: {error.strerror}.", param=param) from error
    print(f"wrote {path}")

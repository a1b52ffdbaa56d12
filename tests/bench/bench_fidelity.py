"""Live runs against simulations of them, and docs/develop/fidelity.md.

    python tests/bench/bench_fidelity.py all OUT --minutes 120           these one after the other:

    python tests/bench/bench_fidelity.py measure OUT --minutes 25 [--only one,two] [--requests 1000] [--slice-s 60]
    python tests/bench/bench_fidelity.py order OUT --minutes 10          ten settings, live, by `bench compare`
    python tests/bench/bench_fidelity.py simulate OUT                    what `measure` and `order` left, simulated
    python tests/bench/bench_fidelity.py report OUT --write docs/develop/fidelity.md

`measure` and `order` need a quiet machine; both go on where they were cut off. `simulate` can come later, anywhere. A
model that is not there is left out (`--qwen3 PATH`: one of Qwen3-0.6B's shape, such as `tests/random_models.py` makes),
and so is a trace (`--trace PATH`: one of those that `bench serve --dataset-name trace` reads).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import fidelity_live as live
import fidelity_page
import fidelity_sim as sim
from fidelity_cases import REPEATS_LIMIT, Case, Setting, cases, settings

from tokenmill.bench.load.recorded_load import RecordedLoad
from tokenmill.plan.config import sources_beside
from tokenmill.plan.fidelity import on_deployment
from tokenmill.sim.calibrated import Calibrated
from tokenmill.sim.cluster_file import read_deployment

Json = dict[str, Any]
ORDER = ("--input-len", "64", "--output-len", "24", "--random-range-ratio", "0.5", "--ignore-eos", "--seed", "77")
ORDER_LOAD = ("--concurrency", "24", "--num-prompts", "120")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("all", "measure", "order", "simulate", "report"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=25.0, help="most that the live part may take")
    parser.add_argument("--only", metavar="CASE,CASE", help="of the cases, in this order")
    parser.add_argument("--requests", type=int, default=1000, help="of a load")
    parser.add_argument("--repeats", type=int, default=3, help="of each load, live")
    parser.add_argument("--slice-s", type=float, default=60.0, help="of each slice between loads")
    parser.add_argument("--qwen3", metavar="PATH", help="a checkpoint of Qwen3-0.6B's shape")
    parser.add_argument("--trace", metavar="PATH", help="a public trace of requests")
    parser.add_argument("--turns", type=int, default=6, help="of the settings that are put in order")
    parser.add_argument("--write", type=Path, default=Path("docs/develop/fidelity.md"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = _cases(args)
    clock = live.Clock(args.minutes)
    if args.what in ("measure", "all"):
        for case in chosen:
            live.calibrate(case, _model(case, args), args.out / case.engine, args.slice_s)
            folder = args.out / case.name
            live.measure(case, _model(case, args), folder, clock, args.repeats, args.requests, args.slice_s)
    if args.what in ("order", "all"):
        for case in (each for each in _all(args) if each.engine in {setting.engine for setting in settings()}):
            live.calibrate(case, _model(case, args), args.out / case.engine, args.slice_s)
        words = (*ORDER_LOAD, *ORDER, "--repeats", str(args.turns))
        live.order(settings(), "smollm2", args.out, clock, words)
    if args.what in ("measure", "order", "all"):
        with (args.out / "command.txt").open("a") as file:
            words = tuple("OUT" if word == str(args.out) else word for word in sys.argv)
            file.write(shlex.join(["python", *words]) + "\n")
    if args.what in ("simulate", "all"):
        _simulate(args, chosen)
    if args.what in ("report", "all"):
        fidelity_page.write(args.out, args.write)


def _cases(args: argparse.Namespace) -> list[Case]:
    by_name = {case.name: case for case in _all(args)}
    names = args.only.split(",") if args.only else list(by_name)
    if unknown := [name for name in names if name not in by_name]:
        raise SystemExit(f"no case {unknown[0]}: there are {', '.join(by_name)}")
    found = [by_name[name] for name in names]
    given = {"qwen3": args.qwen3, "trace": args.trace}
    if args.only is None:
        return [case for case in found if given.get(case.name, "") is not None]
    if missing := [name for name in names if given.get(name, "") is None]:
        raise SystemExit(f"{missing[0]} needs --{missing[0]} PATH")
    return found


def _all(args: argparse.Namespace) -> list[Case]:
    """The trace is named by its whole path, which results repeat."""
    return cases("" if args.trace is None else str(Path(args.trace).resolve()))


def _model(case: Case, args: argparse.Namespace) -> str:
    if case.model == "smollm2":
        return "smollm2"
    return str(args.qwen3)


def _simulate(args: argparse.Namespace, chosen: list[Case]) -> None:
    found = args.out / "found"
    found.mkdir(exist_ok=True)
    facts: Json | None = None
    names = [case.name for case in _all(args)]
    for case in chosen:
        folder = args.out / case.name
        if not sim.turns_of(case, folder):
            print(f"{case.name}: nothing measured")
            continue
        simulate = _simulator(case.cluster, args.out, case.engine)
        cost_model = Calibrated.from_json((args.out / case.engine / "calibration.json").read_text(), case.engine)
        slowness = sim.logged(cost_model, folder)
        for number, load in enumerate(case.loads):
            fidelity = sim.judge(case, load, number, folder, simulate, slowness)
            assert fidelity is not None, case.name
            verdicts = sim.verdicts(case, fidelity) if load.share <= 0.85 else []
            shown = sim.load_shown(fidelity, simulate) if load.share >= 0.85 else []
            if shown:
                verdicts.append(sim.load_verdict(shown))
            for verdict in verdicts:
                mark = "kept" if verdict.is_kept else "MISSED"
                print(f"{case.name} {load.name} %: {verdict.what} {verdict.size:.1%} of {verdict.allowed:.1%} {mark}")
            result = {
                "name": f"{case.name}-{load.name}",
                "place": 100 * names.index(case.name) + number,
                "title": fidelity.name,
                "serve": json.loads((folder / "serve.json").read_text()),
                "verdicts": [asdict(verdict) for verdict in verdicts],
                "load_shown": shown,
                "fidelity": fidelity.to_json(),
            }
            (found / f"{case.name}-{load.name}.json").write_text(json.dumps(result))
            facts = facts or _facts(args, fidelity.live[0]["environment"])
    if (args.out / "order" / "compare.json").exists():
        _simulate_order(args, found)
    if facts is not None:
        (args.out / "facts.json").write_text(json.dumps(facts))


def _simulate_order(args: argparse.Namespace, found: Path) -> None:
    comparison = json.loads((args.out / "order" / "compare.json").read_text())

    def simulate(setting: Setting, load: RecordedLoad) -> Json:
        return _simulator(setting.cluster, args.out, setting.engine)(load, 1.0)

    order = sim.put_in_order(comparison, settings(), simulate)
    words = shlex.join(["tokenmill", "bench", "compare", "...", *ORDER_LOAD, *ORDER, "--repeats", str(args.turns)])
    (found / "order.json").write_text(json.dumps({**asdict(order), "command": words}))


def _simulator(cluster: str, folder: Path, engine: str) -> sim.Simulate:
    text = cluster.format(calibration=folder.resolve() / engine / "calibration.json")
    run = on_deployment(read_deployment(text, sources_beside(folder)), {})

    def simulate(load: RecordedLoad, factor: float) -> Json:
        return run(load, factor).to_json()

    return simulate


def _facts(args: argparse.Namespace, environment: Json) -> Json:
    path = args.out / "command.txt"
    commands = path.read_text().splitlines() if path.exists() else ["python tests/bench/bench_fidelity.py measure OUT"]
    return {
        "processor": environment.get("processor"),
        "cores": environment.get("cores"),
        "system": environment.get("system"),
        "version": environment.get("tokenmill"),
        "commit": environment.get("commit"),
        "command": "\n    ".join(commands),
        "limit": REPEATS_LIMIT,
    }


if __name__ == "__main__":
    main()

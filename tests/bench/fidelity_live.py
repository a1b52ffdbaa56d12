"""The live half of the fidelity measurement: what a server does under calibrating, slicing and held-out loads.

Every run is one file of `bench serve --json`; a file that is there is not measured again, so that a measurement that
was cut off goes on where it was. Only whole turns of a case (all its loads once, a slice before each and after the
last, on a fresh server) are left unbegun when the time is up.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "live"))
from fidelity_cases import CALIBRATION, CALIBRATION_ROUNDS, CALIBRATION_S, Case, Setting
from serving import Server

Json = dict[str, Any]
CAPACITY = ("--concurrency", "48")
CAPACITY_S, WARM_S = 24.0, 4.0
LEAST_S = 10.0
"""A turn is not begun with less than this left, whatever it takes."""


class Clock:
    """What is left of the time that a measurement may take."""

    def __init__(self, minutes: float) -> None:
        self._end_s = time.monotonic() + 60 * minutes

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()


def bench(url: str, words: Sequence[str], path: Path, seed: int) -> Json:
    """One run of `bench serve`, written to `path` once it is whole."""
    part = path.with_suffix(".part")
    command = [sys.executable, "-m", "tokenmill.cli.main", "bench", "serve", "--url", url, "--seed", str(seed)]
    done = subprocess.run([*command, *words, "--json", str(part)], capture_output=True, text=True, timeout=1200)
    if done.returncode:
        raise SystemExit(f"bench serve {' '.join(words)}: {done.stderr[-2000:]}")
    part.rename(path)
    result: Json = json.loads(path.read_text())
    ttft = result["ttft_s"]["mean"]
    print(f"  {path.stem}: {result['requests_per_s']:.2f} requests/s, TTFT {1e3 * ttft:.1f} ms", flush=True)
    return result


def calibrate(case: Case, model: str, folder: Path, slice_s: float) -> None:
    """Step records of an engine by itself, and the runs they come from; `tokenmill calibrate` reads both."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "calibration.json").exists():
        return
    log = folder / "steps.log"
    for path in folder.glob("steps.log*"):
        path.unlink()
    print(f"{case.engine}: calibration", flush=True)
    with Server(*case.calibrated, "--step-log", str(log), model=model) as server:
        bench(server.url, (*case.slice, "--duration", f"{slice_s:g}"), folder / "slice.json", 90)
        for number, words in enumerate(CALIBRATION_ROUNDS * CALIBRATION):
            more = ("--random-range-ratio", "0.6", "--ignore-eos", "--duration", f"{CALIBRATION_S:g}")
            bench(server.url, (*words, *more), folder / f"run-{number}.json", 100 + number)
    runs = [word for path in sorted(folder.glob("run-*.json")) for word in ("--run", str(path))]
    logs = [log] if log.exists() else sorted(folder.glob("steps.log.w*"))
    command = [sys.executable, "-m", "tokenmill.cli.main", "calibrate", *map(str, logs), *runs]
    command += ["--out", str(folder / "calibration.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    (folder / "calibrate.txt").write_text(" ".join(command[3:]) + "\n\n" + done.stdout + done.stderr)
    if done.returncode:
        raise SystemExit(f"tokenmill calibrate: {done.stderr[-2000:]}")


def capacity(case: Case, model: str, folder: Path) -> dict[str, float]:
    """Requests/s of a closed loop, for each kind of load of the case."""
    found: dict[str, float] = {}
    kinds = list(dict.fromkeys(load.words for load in case.loads))
    paths = [folder / f"capacity-{number}.json" for number in range(len(kinds))]
    if not all(path.exists() for path in paths):
        with Server(*case.options, model=model) as server:
            for number, (words, path) in enumerate(zip(kinds, paths, strict=True)):
                # What ends the closed loop is a time: its last answers, with a batch that empties, are cut off.
                more = ("--duration", f"{CAPACITY_S:g}", "--num-prompts", "2000", "--warmup", f"{WARM_S:g}")
                bench(server.url, (*words, *CAPACITY, *more, "--cooldown", "1"), path, 50 + number)
    for words, path in zip(kinds, paths, strict=True):
        found[" ".join(words)] = float(json.loads(path.read_text())["requests_per_s"])
    return found


def measure(case: Case, model: str, folder: Path, clock: Clock, repeats: int, num: int, slice_s: float) -> None:
    """All loads of the case, `repeats` times, as far as the time goes. Each repeat has a fresh server, whose caches
    know nothing, and the same plan. Slices go to another one, which writes a step log, and is idle meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cluster.toml").write_text(case.cluster)
    (folder / "serve.json").write_text(json.dumps(["tokenmill", "serve", model, *case.options]))
    rates = {name: rate for name, rate in capacity(case, model, folder).items()}
    print(f"{case.name}: capacity {', '.join(f'{rate:.1f}' for rate in rates.values())} requests/s", flush=True)
    turn_s = sum(num / (rates[" ".join(load.words)] * load.share) + slice_s for load in case.loads) + slice_s
    for repeat in range(repeats):
        paths = [folder / f"load-{load.name}-r{repeat}.json" for load in case.loads]
        paths += [folder / f"slice-{number}-r{repeat}.json" for number in range(len(case.loads) + 1)]
        if all(path.exists() for path in paths):
            continue
        if clock.left_s < max(LEAST_S, 1.1 * turn_s):
            print(f"{case.name}: turn {repeat} of {turn_s:.0f} s does not fit into {clock.left_s:.0f} s", flush=True)
            return
        # A turn that was cut off begins anew: its prefix cache is gone.
        log = folder / f"steps-r{repeat}.log"
        for path in (*paths, *folder.glob(f"{log.name}*")):
            path.unlink(missing_ok=True)
        print(f"{case.name}: turn {repeat}, about {turn_s:.0f} s", flush=True)
        sliced = Server(*case.options, "--step-log", str(log), model=model)
        with Server(*case.options, model=model) as server, sliced:
            for number, load in enumerate(case.loads):
                _slice(case, sliced, folder, number, repeat, slice_s)
                rate = rates[" ".join(load.words)] * load.share
                words = (*load.words, "--request-rate", f"{rate:.4g}", "--num-prompts", str(num))
                bench(server.url, words, folder / f"load-{load.name}-r{repeat}.json", 1000 + number)
            _slice(case, sliced, folder, len(case.loads), repeat, slice_s)


def _slice(case: Case, server: Server, folder: Path, number: int, repeat: int, slice_s: float) -> None:
    """Its text is new each time."""
    seed = 200 + 20 * repeat + number
    bench(server.url, (*case.slice, "--duration", f"{slice_s:g}"), folder / f"slice-{number}-r{repeat}.json", seed)


def order(settings: Sequence[Setting], model: str, folder: Path, clock: Clock, words: Sequence[str]) -> None:
    """`bench compare` of all settings at once: each has a server of its own, idle while the others are measured."""
    path = folder / "order" / "compare.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for setting in settings:
        (path.parent / f"{setting.name.replace(' ', '-')}.toml").write_text(setting.cluster)
    if path.exists():
        return
    servers: list[Server] = []
    try:
        for setting in settings:
            servers.append(Server(*setting.options, model=model).__enter__())
        ends = [f"{setting.name}={server.url}" for setting, server in zip(settings, servers, strict=True)]
        command = [sys.executable, "-m", "tokenmill.cli.main", "bench", "compare", *ends, *words]
        left_s = max(60.0, clock.left_s)
        subprocess.run([*command, "--json", str(path)], check=True, stdout=subprocess.DEVNULL, timeout=left_s + 600)
    finally:
        for server in servers:
            server.__exit__()

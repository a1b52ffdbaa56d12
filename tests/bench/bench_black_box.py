"""How well a server of which only its clients' times are known is predicted. Prints errors beside the bar of 15 %.

    python tests/bench/bench_black_box.py --url http://127.0.0.1:8080 --max-num-seqs 8
    python tests/bench/bench_black_box.py --max-num-seqs 8 --serve "llama-server -m MODEL.gguf -np 8 --port {port}"
    python tests/bench/bench_black_box.py --max-num-seqs 8 --serve "tests/bench/vllm_box.sh VENV CHECKPOINT {port} 8"

Three closed loops are fitted to; loads of another number of clients, and open loops below what the server can do, are
not: each of these is sent twice, so that what two runs differ by stands beside the error. About four minutes; results
are kept in --out. The server must keep no prefixes: what is sent twice would be there.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shlex
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from tokenmill.bench.load.fidelity import compare
from tokenmill.cli.calibrate.black_box import HEAD, error_line, read_lives
from tokenmill.plan.fit.black_box import errors_of, fit, machine_of, replay, tables_of

WORDS = ("--random-range-ratio", "0.8", "--ignore-eos")
CALIBRATING = ((1, 12), (3, 24), (8, 40))
"""Clients and requests."""
BAR = 0.15
START_S = 300.0
"""Until a server is ready, at most: vLLM compiles when it starts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url")
    where.add_argument("--serve", metavar="COMMAND", help="starts the server; {port} is where it listens")
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--share", type=float, nargs="+", default=[0.5, 0.75], help="rates, of what the server can do")
    parser.add_argument("--out", type=Path, default=Path("black-box"))
    parser.add_argument("--input-len", default="200")
    parser.add_argument("--output-len", default="48")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    lengths = ("--random-input-len", args.input_len, "--random-output-len", args.output_len)
    with ExitStack() as stack:
        url = args.url or started(args.serve, stack)
        fitted = []
        for clients, num in CALIBRATING:
            words = ("--concurrency", str(clients), "--num-prompts", str(round(num * args.scale)), *lengths)
            fitted.append(measured(url, args.out / f"fit-{clients}.json", words, clients))
        most = json.loads(fitted[-1].read_text())["requests_per_s"]
        held = [("closed-5", ("--concurrency", "5", "--num-prompts", str(round(30 * args.scale)), *lengths))]
        for share in args.share:
            rate = ("--request-rate", f"{share * most:.3f}", "--num-prompts", str(round(40 * args.scale)), *lengths)
            held.append((f"open-{share}", rate))
        pairs = [
            [measured(url, args.out / f"{name}-{turn}.json", words, 100 + at) for turn in range(2)]
            for at, (name, words) in enumerate(held)
        ]
    report(args, fitted, pairs)


def started(command: str, stack: ExitStack) -> str:
    """Waits for it; it is ended with the stack."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [word.replace("{port}", str(port)) for word in shlex.split(command)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        assert process.poll() is None, f"it ended with {process.returncode}: {words}"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/v1/models")
            if connection.getresponse().status == 200:
                return f"http://127.0.0.1:{port}"
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    raise AssertionError("the server did not become ready")


def measured(url: str, path: Path, words: tuple[str, ...], seed: int) -> Path:
    command = [sys.executable, "-m", "tokenmill.cli.main", "bench", "serve", "--url", url, *words, *WORDS]
    began_s = time.monotonic()
    subprocess.run([*command, "--seed", str(seed), "--json", str(path)], check=True, stdout=subprocess.DEVNULL)
    print(f"{path.stem}: {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    return path


def report(args: argparse.Namespace, fitted: list[Path], pairs: list[list[Path]]) -> None:
    lives = [live for path in fitted for live in read_lives(str(path))]
    machine = machine_of(lives, args.max_num_seqs, args.max_num_batched_tokens)
    tables = tables_of("c", machine, False)
    found = fit(lives, machine, tables)
    (args.out / "calibration.json").write_text(found.cost_model.to_json())
    print(HEAD)
    for live, errors in zip(lives, found.errors, strict=True):
        print(error_line(live.name, errors))
    print("not fitted to:")
    sizes = []
    for paths in pairs:
        runs = [live for path in paths for live in read_lives(str(path))]
        for live in runs:
            errors = errors_of(found.cost_model, live, tables)
            of_requests = errors.request("e2el_s")
            assert of_requests is not None
            sizes.append(of_requests.median_size)
            print(error_line(live.name, errors))
        one = replay(found.cost_model, runs[0], tables)
        both = compare("both", [live.result for live in runs], [one] * len(runs)).request("e2el_s")
        assert both is not None
        print(f"  two live runs differ by {both.live_to_live or 0.0:.1%} (E2EL of requests, median)")
    worst = max(sizes)
    print(f"E2EL of requests, median, at worst {worst:.1%}: {'within' if worst <= BAR else 'beyond'} {BAR:.0%}")


if __name__ == "__main__":
    main()

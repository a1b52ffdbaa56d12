"""What interactive calls feel of work that can wait: alone, beside a batch, and with an idle command.

    python tests/bench/bench_tidal.py [--rate R] [--duration S] [--repeats N] [--model M]

A script, not a test: timed, for an idle machine. One server of each kind serves the same open-loop load in turn, at
half of what it answers at 16 at once (or --rate). Prints TTFT and TPOT of all rounds together, and what the batch and
the job got done, against the bars: TTFT p99 at most 50 ms above alone, TPOT p99 at most 1.2 times.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "live"))

from serving import Server, wait_until

SPIN = "while :; do :; done & while :; do :; done"
PROMPT, OUTPUT = 256, 64
KINDS = ("batch", "idle command")
MOST_TTFT_S, MOST_TPOT = 0.05, 1.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=0.0, help="calls a second (default: half of the capacity)")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of a round (default: 60)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each kind (default: 3)")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="beside alone (default: both)")
    args = parser.parse_args()
    rate = args.rate or _half_capacity(args.model)
    print(f"{rate:.2f} calls a second of {PROMPT} tokens in and {OUTPUT} out, {args.repeats} x {args.duration:g} s")
    rounds: dict[str, list[dict[str, Any]]] = {kind: [] for kind in ("alone", *args.kinds)}
    for number in range(args.repeats):
        for kind, results in rounds.items():
            flags = ("--idle-command", SPIN) if kind == "idle command" else ()
            with Server(*flags, model=args.model) as server:
                lines = _start_batch(server) if kind == "batch" else ""
                load = _load(server, rate, args.duration, number)
                values = server.metrics()
                load["work"] = (
                    f"{_lines_done(server, lines)} lines" if lines
                    else f"{values['tokenmill:idle_job_stops_total']:g} stops" if flags else ""
                )  # fmt: skip
                results.append(load)
    return _show(rounds)


def _half_capacity(model: str) -> float:
    with Server(model=model) as server:
        result = _bench(server, "--concurrency", "16", "--duration", "20", "--num-prompts", "3000")
    return len(_good(result)) / float(result["duration_s"]) / 2


def _load(server: Server, rate: float, duration_s: float, seed: int) -> dict[str, Any]:
    return _bench(
        server, "--request-rate", str(rate), "--duration", str(duration_s),
        "--num-prompts", str(round(1.5 * rate * duration_s) + 20),
        "--seed", str(seed),
    )  # fmt: skip


def _bench(server: Server, *flags: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [
            sys.executable, "-m", "tokenmill.cli.main", "bench", "serve", "--url", server.url, "--ignore-eos",
            "--dataset-name", "random", "--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT),
            "--random-range-ratio", "0.5", "--num-warmups", "4", "--json", str(path), *flags,
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def _good(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in result["requests"] if each["ok"]]


def _start_batch(server: Server) -> str:
    """A batch of more lines than can be done, of long prompts and answers; its identifier."""
    body = {"prompt": "Say it again. " * 60, "max_tokens": 100, "ignore_eos": True}
    lines = "\n".join(
        json.dumps({"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body | {"seed": n}})
        for n in range(5000)
    )
    head = 'Content-Disposition: form-data; name="{}"'
    parts = [head.format("purpose") + "\r\n\r\nbatch", head.format('file"; filename="lines.jsonl') + "\r\n\r\n" + lines]
    data = "".join(f"--x\r\n{part}\r\n" for part in parts) + "--x--\r\n"
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v1/files", data.encode(), {"content-type": "multipart/form-data; boundary=x"})
    file = json.loads(connection.getresponse().read())["id"]
    connection.close()
    wanted = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    identifier: str = json.loads(server.request("POST", "/v1/batches", wanted)[1])["id"]
    wait_until(lambda: server.metrics()["vllm:num_requests_running"] > 0, "lines run")
    time.sleep(1.0)
    return identifier


def _lines_done(server: Server, identifier: str) -> int:
    batch = json.loads(server.request("GET", f"/v1/batches/{identifier}")[1])
    done: int = batch["request_counts"]["completed"]
    return done


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def _show(rounds: dict[str, list[dict[str, Any]]]) -> int:
    found = {}
    for kind, results in rounds.items():
        requests = [each for result in results for each in _good(result)]
        ttft = [each["first_s"] - each["sent_s"] for each in requests]
        tpot = [
            (each["last_s"] - each["first_s"]) / (each["output_tokens"] - 1)
            for each in requests
            if each["output_tokens"] > 1
        ]
        found[kind] = (_p99(ttft), _p99(tpot))
        work = ", ".join(result["work"] for result in results if result["work"])
        times = " ".join(
            f" {name} p50 {1e3 * statistics.median(values):6.1f} p99 {1e3 * _p99(values):6.1f} ms"
            for name, values in (("TTFT", ttft), ("TPOT", tpot))
        )
        print(f"{kind:13} {len(requests):5} calls {times}  {work}")
    alone, is_good = found["alone"], True
    for kind in list(found)[1:]:
        more_s, times = found[kind][0] - alone[0], found[kind][1] / alone[1]
        is_in = more_s <= MOST_TTFT_S and times <= MOST_TPOT
        is_good &= is_in
        verdict = "within" if is_in else "BEYOND"
        print(f"{kind}: TTFT p99 {1e3 * more_s:+.0f} ms, TPOT p99 x {times:.2f}: {verdict} the bars")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

"""How soon a call stops the job of `--idle-command`: from its sending until each process of the job is stopped.

    python tests/bench/time_idle_command.py [--calls N]

A script, not a test: timed. The job is two busy loops, which have the processors as the call comes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "live"))

from serving import Server, wait_until
from test_idle_command import SMALL, ask, is_stopped, pids_of

JOB = "echo $$ > {0}/leader; (echo $BASHPID > {0}/child; while :; do :; done) & while :; do :; done"
TICK_S = 0.0005
MOST_S = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=60, help="(default: 60)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        script = Path(name) / "job.sh"
        script.write_text(JOB.format(name))
        with Server("--idle-command", f"exec bash {script}", *SMALL) as server:
            return time_calls(server, pids_of(Path(name)), args.calls)


def time_calls(server: Server, pids: tuple[int, int], num_calls: int) -> int:
    took_s = []
    for _ in range(num_calls):
        wait_until(lambda: not any(map(is_stopped, pids)), "the job goes on")
        time.sleep(0.5)
        sent_s = time.monotonic()
        wait_for_answer = ask(server, 4)
        while not all(map(is_stopped, pids)):
            time.sleep(TICK_S)
        took_s.append(time.monotonic() - sent_s)
        wait_for_answer()
    median_ms, most_ms = 1e3 * statistics.median(took_s), 1e3 * max(took_s)
    print(f"stopped after {median_ms:.0f} ms in the median of {num_calls} calls, at most {most_ms:.0f} ms")
    return 0 if max(took_s) <= MOST_S else 1


if __name__ == "__main__":
    sys.exit(main())

"""Records the journals of a few simulated runs in plans.jsonl.gz, one after the other.

Run it only when plans are meant to change: `python tests/sim/make_plans.py`.
"""

from __future__ import annotations

import gzip
from pathlib import Path

from tokenmill.engine.journal import entry_line, header_line
from tokenmill.sim.run import run_seed
from tokenmill.sim.workload import make_scenario

PLANS = Path(__file__).with_name("plans.jsonl.gz")
SEEDS = (0, 3, 13, 18, 22, 23, 27, 28, 29)


def main() -> None:
    lines: list[str] = []
    for seed in SEEDS:
        lines += [header_line(make_scenario(seed).config), *map(entry_line, run_seed(seed).journal)]
    PLANS.write_bytes(gzip.compress("\n".join([*lines, ""]).encode(), 9, mtime=0))


if __name__ == "__main__":
    main()

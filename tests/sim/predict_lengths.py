"""How well lengths of answers are predicted on public traces, and what that gains in placing them.

Each request is predicted before it is served and noted afterwards. Every load is a tenant of its own; the agentic one
has its sessions as tenants. The rival says what all answers before were most often, or on average.

python tests/sim/predict_lengths.py FOLDER [--requests N]      FOLDER: of the traces (tests/sim/traces.py)
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from traces import NAMES, rows_of

from tokenmill.cluster.length_predictor import LengthPredictor, bucket_of
from tokenmill.core.events import FINISH_STOP
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.terms import Terms

_LIMIT = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=5000)
    options = parser.parse_args()
    together = LengthPredictor()
    print("load      requests  bucket right  within one  error  rival: right  error")
    for name in NAMES:
        lengths, seen = LengthPredictor(), Counter[int]()
        hits = near = rival_hits = 0
        error = rival_error = total = 0.0
        rows = rows_of(name, options.folder, options.requests)
        for number, (_, num_prompt, num_answer, who) in enumerate(rows):
            request = Request(
                str(number),
                range(num_prompt),
                SamplingParams(),
                _LIMIT,
                1,
                terms=Terms(tenant=who),  # type: ignore[arg-type]
            )
            num_answer, bucket = min(num_answer, _LIMIT), bucket_of(num_answer)
            guess = lengths.guess(request)
            hits += guess.bucket == bucket
            near += abs(guess.bucket - bucket) <= 1
            error += abs(guess.num_tokens - num_answer)
            if seen:
                rival_hits += seen.most_common(1)[0][0] == bucket
                rival_error += abs(total / number - num_answer)
            lengths.note(request, num_answer, FINISH_STOP, guess)
            together.note(request, num_answer, FINISH_STOP, together.guess(request))
            seen[bucket] += 1
            total += num_answer
        num = len(rows)
        print(
            f"{name:9} {num:8d}  {hits / num:12.3f}  {near / num:10.3f}  {error / total:5.2f}  "
            f"{rival_hits / num:12.3f}  {rival_error / total:5.2f}"
        )
    print(f"all, one after another: bucket right {together.num_hits / together.num_noted:.3f}")


if __name__ == "__main__":
    main()

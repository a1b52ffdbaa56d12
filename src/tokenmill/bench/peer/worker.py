"""Runs another engine for the comparison, as a program of its own: `python worker.py ENGINE MODEL '{"threads": 2}'`.

It answers one JSON line on standard output for each JSON line on standard input:

    at the start                                         -> {"facts": {name: value}, "vocab_size": n}
    {"prompts": [[id, ...], ...], "max_tokens": [n, ...]} -> {"seconds": s, "cpu_seconds": c}

ENGINE names a module beside this file with `start(model, **options) -> runner`; a runner has `facts`, `vocab_size` and
`run(prompts, max_tokens) -> seconds`. The processor time is this process's.
"""

import importlib
import json
import os
import sys
import time


def main() -> None:
    engine, model, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not mix with the replies
    runner = importlib.import_module(f"{engine}_engine").start(model, **options)
    print(json.dumps({"facts": runner.facts, "vocab_size": runner.vocab_size}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start_s = time.process_time()
        seconds = runner.run(request["prompts"], request["max_tokens"])
        reply = {"seconds": seconds, "cpu_seconds": time.process_time() - start_s}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()

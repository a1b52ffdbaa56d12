"""llama-server without a build: the HTTP server of llama.cpp from the package xllamacpp, in an environment of its own.

    python3 -m venv /tmp/box && /tmp/box/bin/pip install xllamacpp
    /tmp/box/bin/python tests/bench/llama_box.py MODEL.gguf PORT SLOTS [THREADS]

Runs until it is killed. Needs nothing of tokenmill.
"""

import importlib
import sys
import threading

CONTEXT = 1024
"""Of each slot."""


def main() -> None:
    model, port, slots = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    package = importlib.import_module("xllamacpp")
    params = package.CommonParams()
    params.model.path = model
    params.port, params.n_parallel, params.n_ctx = port, slots, slots * CONTEXT
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[4]) if sys.argv[4:] else 2
    params.kv_unified, params.warmup = False, True
    params.cache_prompt, params.cache_ram_mib = False, 0  # loads are sent twice
    server = package.Server(params)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()

"""How far a start-up option travels, and a chat request: the stays and the files on its way.

    python tests/stays.py [CHECKOUT] [--way]       a checkout with a .venv of its own (default: this one)

`serve` runs with a profiler in each of its processes. On the way is each call of a function of `src/tokenmill` that is
handed what travels: one of its parameters is the value, is a text with it, or holds it within four dataclasses,
namespaces, lists or dicts. `self` does not count: so the `__post_init__` of a dataclass is no call, as its generated
`__init__` is none; who reads the way sees an expression that makes a value, and goes on below it. A coroutine counts
when it begins, not when it goes on. A *stay* begins where the way enters a file that it was not in:
with each call of a function in another file than that of the call before. `--way` lists all of it.

    option   `--max-num-batched-tokens 7919`, from the command line until `EngineCore` is made. The front end is
             followed until the engine process has read what it was told, then the engine process.
    chat     in the front end, the second of two equal calls of /v1/chat/completions, from `OpenAI.chat` to the
             engine and back until the answer is there. It is known by its seed, 7919, and by the id of its answer.

A way has a handful of calls more or less where threads and processes overtake each other; run it twice.
"""

from __future__ import annotations

import argparse
import dis
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

MARK = 7919
DEPTH = 4
CHATS = ("OpenAI.chat", "Service.chat")
"""The endpoint of chat, by its names in this and earlier checkouts."""
OUT, ROOT, KIND = "STAYS_OUT", "STAYS_ROOT", "STAYS_KIND"


def holds(value: Any, texts: tuple[str, ...], depth: int = DEPTH) -> bool:
    """Whether it is MARK or a text with one of `texts`, or contains such a value."""
    if isinstance(value, bool | float | type) or value is None:
        return False
    if isinstance(value, int):
        return value == MARK
    if isinstance(value, str):
        return any(each in value for each in texts)
    if isinstance(value, bytes | bytearray):
        return any(each.encode() in value for each in texts)
    if depth == 0:
        return False
    if isinstance(value, dict):
        inside = list(value.values())
    elif isinstance(value, tuple | list):
        inside = list(value)
    elif isinstance(value, argparse.Namespace):
        inside = list(vars(value).values())
    else:
        inside = [getattr(value, name, None) for name in getattr(type(value), "__dataclass_fields__", ())]
    return any(holds(each, texts, depth - 1) for each in inside)


def profile(out: str, root: str, kind: str) -> None:
    """In a process of `serve`: write a line for each call that is on the way."""
    import threading

    fd = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    texts = (str(MARK),) if kind == "option" else (str(MARK), "chatcmpl-")
    starts: dict[CodeType, int] = {}
    num_chats = 0

    def begins(frame: FrameType) -> bool:
        code = frame.f_code
        if code not in starts:
            found = (each.offset for each in dis.get_instructions(code) if each.opname == "RESUME")
            starts[code] = next(found, 0)
        return frame.f_lasti <= starts[code]

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal num_chats
        code = frame.f_code
        if not code.co_filename.startswith(root):
            return
        if event == "return" and kind == "option" and code.co_qualname == "EngineCore.__init__":
            os.write(fd, b"end\n")
        if event != "call" or not begins(frame):
            return
        if kind == "chat":
            num_chats += code.co_qualname in CHATS
            if num_chats < 2:
                return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        found = frame.f_locals
        if code.co_qualname in CHATS or any(holds(found.get(name), texts) for name in names if name != "self"):
            os.write(fd, f"{os.getpid()} {code.co_filename[len(root) :]} {code.co_qualname}\n".encode())

    threading.setprofile(note)
    sys.setprofile(note)


def run_serve(checkout: Path, kind: str) -> list[str]:
    """The lines that the processes of one `serve` wrote."""
    with tempfile.TemporaryDirectory() as folder:
        hook = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import stays\n"
        hook += f"stays.profile(*(__import__('os').environ[name] for name in ({OUT!r}, {ROOT!r}, {KIND!r})))\n"
        hook += "sys.path.pop(0)\n"
        Path(folder, "sitecustomize.py").write_text(hook, encoding="utf8")
        out, log = Path(folder, "out"), Path(folder, "log")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        told = {OUT: str(out), ROOT: f"{checkout}/src/tokenmill/", KIND: kind, "TOKENMILL_STATE": f"{folder}/state"}
        flags = ["--max-num-batched-tokens", str(MARK)] if kind == "option" else []
        command = [f"{checkout}/.venv/bin/python", "-P", "-m", "tokenmill.cli.main", "serve", "smollm2"]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, "--port", str(port), *flags],
                env={**os.environ, **told, "PYTHONPATH": f"{folder}:{checkout}/src"},
                stdout=file,
                stderr=file,
            )
        try:
            while b"ready at" not in log.read_bytes():
                if process.poll() is not None:
                    raise SystemExit(log.read_text(encoding="utf8"))
                time.sleep(0.1)
            for _ in range(2 if kind == "chat" else 0):
                ask(port)
            num_bytes = out.stat().st_size
        finally:
            process.terminate()
            process.wait()
        return out.read_bytes()[:num_bytes].decode().splitlines()


def ask(port: int) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "seed": MARK}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=60) as answer:
        answer.read()


def way_of(lines: list[str]) -> list[tuple[str, str]]:
    """(file, function) of each call: of the first process until another begins, then of that one until the end."""
    end = lines.index("end") if "end" in lines else len(lines)
    calls = [line.split(" ", 2) for line in lines[:end]]
    pids = list(dict.fromkeys(pid for pid, _, _ in calls))
    begun = next((at for at, (pid, _, _) in enumerate(calls) if pid != pids[0]), len(calls))
    return [(file, name) for at, (pid, file, name) in enumerate(calls) if pid == pids[int(at >= begun)]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--way", action="store_true")
    args = parser.parse_args()
    for kind in ("option", "chat"):
        way = way_of(run_serve(args.checkout.resolve(), kind))
        num_stays, before = 0, ""
        for file, name in way:
            num_stays += file != before
            if args.way:
                print(f"{num_stays if file != before else '':>4} {file}: {name}")
            before = file
        print(f"{kind}: {num_stays} stays in {len({file for file, _ in way})} files")


if __name__ == "__main__":
    main()

"""Calls made by schemathesis from the document that a server shows: no 5xx, no answer that the document does not have,
nothing left behind.

The server is the real application over a scripted engine, with everything on: files, responses, tenants, usage, the
audit log, the sandbox process. As a program it makes 10,000 calls and more, those of a generator of borderline cases
among them.

    make fuzz ARGS="--examples 40 --seed 7"
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from scripted import Served
from tokenmill.cluster.events import Ended
from tokenmill.control.audit.options import AuditOptions
from tokenmill.control.signing import make_key
from tokenmill.control.tenants.access import Access
from tokenmill.control.usage.accounting import Accounting
from tokenmill.core.masking import Mask
from tokenmill.server.response_store import ResponseStore

ENVIRONMENT = Path(os.environ.get("TOKENMILL_FUZZ_VENV", Path(__file__).parents[2] / ".venv-fuzz"))
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
PHASES = "examples,coverage,fuzzing"
KEY = "fuzz-admin-key"
MOST_MORE_FILES = 8
"""Descriptors that threads and stores may open once, when they are first needed."""


class Outcome(NamedTuple):
    """num_cases: calls made. num_ended: requests that the engine answered. report: what schemathesis says."""

    num_cases: int
    num_ended: int
    is_clean: bool
    taken_s: float
    report: str


class _Count:
    """An Observer that counts the requests that end."""

    num_ended = 0

    def opened(self, requests: Any, client: str) -> None: ...

    def sending(self, outputs: Any, step: Any) -> None: ...

    def ended(self, ended: Ended) -> None:
        self.num_ended += 1


def fuzz(*, examples: int, seed: int = 1, phases: str = PHASES, timeout_s: float = 900) -> Outcome:
    """Raises AssertionError where the server keeps something of the calls when they are over."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-fuzz-") as folder, _served(Path(folder)) as served:
        document = _document(served.url, Path(folder))
        _run(served.url, KEY, document, "--max-examples", "1", "--phases", "examples", timeout_s=timeout_s)
        count = _Count()
        served.call(lambda: served.client.observers.added.append(count))
        before = _held(served)
        start_s = time.monotonic()
        how = ("--max-examples", str(examples), "--phases", phases, "--seed", str(seed))
        done = _run(served.url, KEY, document, *how, timeout_s=timeout_s)
        taken_s = time.monotonic() - start_s
        served.wait_until(lambda: served.client.num_open == 0)
        served.wait_until(lambda: not _task_names() - before[1])
        status, body, _ = served.ask("/health")
        assert status == 200, body
        num_files = _held(served)[0]
        assert num_files <= before[0] + MOST_MORE_FILES, f"{before[0]} descriptors before, {num_files} after"
        found = re.search(r"([\d,]+) generated", done.stdout)
        num_cases = int(found[1].replace(",", "")) if found else 0
        return Outcome(num_cases, count.num_ended, done.returncode == 0, taken_s, done.stdout + done.stderr)


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[Served]:
    (folder / "tokenizer").mkdir()
    (folder / "key").mkdir()
    make_key(folder / "key" / "key.pem")
    store, accounting = ResponseStore(str(folder / "responses.db")), Accounting(folder / "usage")
    access = Access((KEY,), str(folder / "tenants.db"))
    options = AuditOptions(
        audit_log=str(folder / "audit" / "log"), audit_key=str(folder / "key" / "key.pem"), audit_syslog="off"
    )
    audit = options.open(Mask())
    assert audit is not None
    for each in (store, accounting, access):
        each.open()  # type: ignore[attr-defined]
    served = Served(
        store=store, accounting=accounting, access=access, audit=audit, folder=folder / "tokenizer",
        files_dir=str(folder / "files"), reports_dir=str(folder), stall_after_s=120.0,
    )  # fmt: skip
    try:
        with served:
            yield served
    finally:
        audit.close()
        for each in (store, accounting, access):
            each.close()  # type: ignore[attr-defined]


def _document(url: str, folder: Path, key: str = KEY) -> Path:
    """The document that is served, but that model is the one there is: else few calls would come to the engine."""
    with urllib.request.urlopen(f"{url}/openapi.json", timeout=20) as answer:
        document = json.load(answer)
    call = urllib.request.Request(f"{url}/v1/models", headers={"x-api-key": key})
    with urllib.request.urlopen(call, timeout=20) as answer:
        names = [card["id"] for card in json.load(answer)["data"]]
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": names}
    path = folder / "document.json"
    path.write_text(json.dumps(document))
    return path


def _run(url: str, key: str, document: Path, *how: str, timeout_s: float = 3600) -> subprocess.CompletedProcess[str]:
    command = [
        str(ENVIRONMENT / "bin" / "st"), "run", str(document), "--url", url, "--header", f"x-api-key: {key}",
        "--checks", CHECKS, "--continue-on-failure", "--warnings", "off", "--request-timeout", "20", "--no-shrink",
        "--suppress-health-check", "all", *how,
    ]  # fmt: skip
    return subprocess.run(command, cwd=document.parent, capture_output=True, text=True, timeout=timeout_s)


def _held(served: Served) -> tuple[int, Counter[str]]:
    """Descriptors of this process, and tasks of the server's loop."""
    return len(os.listdir("/proc/self/fd")), served.call(_task_names)


def _task_names() -> Counter[str]:
    """How many tasks there are of each coroutine, but for the one that asks."""
    names = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
    return Counter(name for name in names if "Served." not in name and name != "wait_for")


def fuzz_running(url: str, key: str, examples: int, seed: int) -> int:
    """The same calls for a server that is there. What it keeps of them it says itself, under /load and /health."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-fuzz-") as folder:
        document = _document(url, Path(folder), key)
        done = _run(url, key, document, "--max-examples", str(examples), "--seed", str(seed), "--phases", PHASES)
    print(done.stdout, done.stderr)
    for path in ("/health", "/load"):
        call = urllib.request.Request(url + path, headers={"x-api-key": key})
        with urllib.request.urlopen(call, timeout=20) as answer:
            print(path, answer.status, answer.read().decode())
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=10, metavar="N", help="most drawn calls of an operation")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--url", metavar="URL", help="of a running server, instead of one over a scripted engine")
    parser.add_argument("--key", metavar="KEY", default=KEY, help="for --url")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # of fields that nobody knows there are thousands
    if args.url:
        return fuzz_running(args.url.rstrip("/"), args.key, args.examples, args.seed)
    outcome = fuzz(examples=args.examples, seed=args.seed)
    print(outcome.report)
    print(
        f"{outcome.num_cases} calls in {outcome.taken_s:.0f} s, {outcome.num_ended} requests answered by the engine: "
        + ("nothing found, nothing left behind" if outcome.is_clean else "see above")
    )
    return 0 if outcome.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())

"""Programs a model wrote: judged rightly, and unable to leave their corner."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path

import pytest
from quality_cases import CountingSubject, load, write_rows

from tokenmill.bench.quality import run as quality_run
from tokenmill.bench.quality.code import CodeLimits, probe, run_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and Landlock are Linux's")

LIMITS = CodeLimits(cpu_s=1, wall_s=20.0, memory_bytes=1 << 29)


@pytest.mark.parametrize(
    ("program", "status", "detail"),
    [
        ("import math, typing\nassert math.pi > 3", "passed", ""),
        ("assert 1 == 2, 'no'", "failed", "AssertionError: no"),
        ("def f(:", "failed", "SyntaxError"),
        ("import sys; sys.exit(0)", "failed", "SystemExit"),
        ("import os; os._exit(0)", "ended", "exit status 0"),
        ("while True: pass", "killed", "SIG"),
        ("x = bytearray(1 << 30)", "failed", "MemoryError"),
        ("open('big', 'wb').write(bytes(2 << 20))", "failed", "File too large"),
        ("files = [open('f', 'w') for _ in range(99)]", "failed", "Too many open files"),
        ("open('mine', 'w').write('x'); assert open('mine').read() == 'x'", "passed", ""),
        ("import os; os.fork()", "failed", "BlockingIOError"),
        ("import os; assert not os.environ.get('SECRET')", "passed", ""),
        (
            "import sys, os; assert os.environ.get('PYTHONPATH') is None and 'tokenmill' not in sys.modules",
            "passed",
            "",
        ),
    ],
)
def test_verdicts(monkeypatch, program, status, detail) -> None:
    """What passes, what fails and why; leaving early is not passing."""
    monkeypatch.setenv("SECRET", "sesame")
    verdict = run_program(program, LIMITS)
    assert (verdict.status, verdict.passed) == (status, status == "passed"), verdict
    assert detail in verdict.detail


def test_a_sleeper_is_stopped_by_the_wall_clock() -> None:
    assert run_program("import time; time.sleep(60)", CodeLimits(wall_s=1.0)).status == "timeout"


def test_the_protections_that_are_said_to_hold_do_hold(tmp_path) -> None:
    """Each is tried; one that this kernel or container does not give is not claimed."""
    held = probe(LIMITS)
    tmp_path.chmod(0o777)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    victim.chmod(0o666)
    attacks = {
        "writes only in its own folder": [
            f"open({str(victim)!r}, 'w').write('gone')",
            f"import os; os.remove({str(victim)!r})",
            f"import os; os.truncate({str(victim)!r}, 0)",
            f"open({str(tmp_path / 'new')!r}, 'w')",
        ],
        "no network": ["import socket; socket.create_connection(('127.0.0.1', 1), 1)"],
        "signals only to itself": [f"import os; os.kill({os.getpid()}, 0)"],
        "no further processes": ["import threading; threading.Thread(target=print).start()"],
    }
    for protection, programs in attacks.items():
        if not any(protection in name for name in held):
            print(f"not held here: {protection}")
            continue
        for program in programs:
            verdict = run_program(program, LIMITS)
            assert verdict.status == "failed", (protection, program, verdict)
    if any("writes only" in name for name in held):
        assert victim.read_text() == "precious" and not (tmp_path / "new").exists()
    if "no network" in held:
        assert "unreachable" in run_program(attacks["no network"][0], LIMITS).detail


def test_nothing_is_left_behind() -> None:
    before = set(Path("/tmp").glob("tokenmill-code-*"))
    run_program("open('x', 'w').write('y')", LIMITS)
    assert set(Path("/tmp").glob("tokenmill-code-*")) <= before


ROW = {
    "task_id": "T/0",
    "prompt": "from math import pi\n\ndef double(x):\n    '''Twice x.'''\n",
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(4) == 8\n",
}


@pytest.mark.parametrize(
    ("chat", "answer", "passed"),
    [
        (False, "    return 2 * x\n", True),
        (False, "    return x\n", False),
        (True, "```python\ndef double(x):\n    assert pi\n    return x + x\n```", True),
        (True, "I cannot.", False),
    ],
)
def test_humaneval_runs_the_tests_on_the_answer(tmp_path, chat, answer, passed) -> None:
    task = load("humaneval", write_rows(tmp_path / "h.jsonl", [ROW]), chat=chat)
    result = quality_run.run_task(CountingSubject(lambda prompt: answer), task, chat=chat, limits=LIMITS)
    assert result["items"][0]["right"] == {"pass@1": passed} and result["execution"]["held"]


def test_published_solutions_pass_their_published_tests() -> None:
    """The sandbox is not what makes an answer fail."""
    path = Path(__file__).resolve().parents[3] / "shared/data/prompts/humaneval.jsonl.gz"
    if not path.is_file():
        pytest.skip("the HumanEval problems are not here")
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()][::8]
    for row in rows:
        program = f"{row['prompt']}{row['canonical_solution']}\n{row['test']}\ncheck({row['entry_point']})\n"
        verdict = run_program(program)
        assert verdict.passed, (row["task_id"], verdict)

"""Other engines behind the same two methods as ours: today llama.cpp, in a process and an interpreter of its own.

The peer never becomes a dependency: it is found in this interpreter or in one named by the user, and is spoken to in
JSON lines (llama_worker.py). A peer that dies is reported, with the end of what it wrote.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError, TokenmillError

WORKER = Path(__file__).with_name("llama_worker.py")


class PeerDied(TokenmillError):
    kind = "peer_died"


class LlamaCpp:
    """llama.cpp on one GGUF file, in a process that `start_llama` starts."""

    def __init__(self, name: str, process: subprocess.Popen[str], errors: Any) -> None:
        self.name = name
        self.facts: dict[str, str] = {}
        self.vocab_size = 0
        self._process = process
        self._errors = errors

    @property
    def pids(self) -> tuple[int, ...]:
        return (self._process.pid,)

    def greet(self) -> None:
        """Read the process's first line: the model is loaded."""
        hello = self._read()
        self.facts.update(hello["facts"])
        self.vocab_size = hello["vocab_size"]

    def run(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Seconds to read all prompts and extend each by max_tokens tokens."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None
        return float(self._read()["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._errors.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._death()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _death(self) -> PeerDied:
        code = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-1:]
        self.close()
        return PeerDied(f"{self.name} ended with code {code}{': ' + last[0] if last else ''}.")


def find_python(peer_python: str | None) -> str:
    """An interpreter that can import llama_cpp: the one named, else this one. Raises ConfigError."""
    if peer_python is None:
        if importlib.util.find_spec("llama_cpp") is None:
            raise ConfigError(
                "--peers needs llama-cpp-python: install it beside tokenmill, or name an interpreter that has it"
                " with --peer-python.",
                param="peers",
            )
        return sys.executable
    try:
        done = subprocess.run([peer_python, "-c", "import llama_cpp"], capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(
            f"--peer-python {peer_python} cannot be run: {error.strerror}.", param="peer_python"
        ) from None
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ConfigError(f"--peer-python {peer_python} cannot import llama_cpp: {reason[0]}", param="peer_python")
    return peer_python


def start_llama(python: str, model: Path, *, threads: int, flash_attention: bool) -> LlamaCpp:
    """Start llama.cpp and see it run.

    Some builds die in kernels that rearrange weights for wide instruction sets; such a build is started again on the
    weights as the file stores them, and its facts say so. Raises PeerDied if that fails too.
    """
    name = f"llama.cpp{', flash attention' if flash_attention else ''}"
    options = {"threads": threads, "flash_attention": flash_attention}
    try:
        peer = _start(name, python, model, options | {"extra_buffers": True})
        peer.facts["weights"] = "rearranged where llama.cpp knows how"
    except PeerDied as death:
        peer = _start(name, python, model, options | {"extra_buffers": False})
        peer.facts["weights"] = f"as in the file, because with rearranged weights: {death.message}"
    peer.facts["threads"] = str(threads)
    return peer


def _start(name: str, python: str, model: Path, options: dict[str, Any]) -> LlamaCpp:
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - the peer closes it
    process = subprocess.Popen(
        [python, str(WORKER), str(model), json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
    peer = LlamaCpp(name, process, errors)
    peer.greet()
    peer.run([list(range(1, 33))], 2)
    return peer

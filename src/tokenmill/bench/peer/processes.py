"""Other engines behind the same two methods as ours, in processes of their own.

A peer never becomes a dependency. It is found in this interpreter or in one that the user names, which runs
worker.py and is spoken to in JSON lines; or it is a folder of llama.cpp's own programs, for builds that come without
Python. A peer that dies is reported, with the end of what it wrote.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, TokenmillError
from .. import machine

TOOL = "llama-batched-bench"
BATCH_TOKENS, MICRO_BATCH_TOKENS, ROUND_TO = 2048, 512, 256


class LlamaTools:
    """`vocab_size` is no limit: the program makes its own prompts. It has no process between runs."""

    takes_uneven = False
    vocab_size = 1 << 31
    pids: tuple[int, ...] = ()

    def __init__(self, name: str, folder: Path, model: Path, threads: int, flash_attention: bool) -> None:
        self.name = name
        tool = find_tool(folder)
        self.facts = {"version": _version(tool), "model": model.name, "threads": str(threads)}
        self._command = [str(tool), "-m", str(model), "-t", str(threads), "-tb", str(threads)]
        self._command += ["-b", str(BATCH_TOKENS), "-ub", str(MICRO_BATCH_TOKENS)]
        self._command += ["-fa", "on" if flash_attention else "off", "--output-format", "jsonl"]

    def run(self, prompts: list[list[int]], max_tokens: Sequence[int]) -> machine.RunTime:
        """For all prompts and max_tokens tokens of each. The program's processor time is not told: loading is in it."""
        num_prompt, num_new, num_streams = len(prompts[0]), max_tokens[0], len(prompts)
        assert {len(prompt) for prompt in prompts} == {num_prompt} and set(max_tokens) == {num_new}, max_tokens
        # A first token comes with the prompt; the program insists on extending by one at least.
        extended = max(1, num_new - 1)
        room = -(-(num_prompt + extended) // ROUND_TO) * ROUND_TO * num_streams
        shape = {"-c": room, "-npp": num_prompt, "-ntg": extended, "-npl": num_streams}
        command = [*self._command, *(str(word) for pair in shape.items() for word in pair)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        seconds = seconds_of(done.stdout, num_new > 1, f"{self.name} ended with code {done.returncode}")
        return machine.RunTime(seconds, None)

    def peak_bytes(self) -> int | None:
        """Not told: what the system reports of an ended child includes this process at the fork."""
        return None

    def close(self) -> None:
        """Nothing runs between runs."""


def _version(tool: Path) -> str:
    """What the program says of itself, which it does on either stream."""
    done = subprocess.run([str(tool), "--version"], capture_output=True, text=True)
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("version")]
    return f"{TOOL} {said[0].removeprefix('version:').strip()}" if said else TOOL


def seconds_of(text: str, with_extension: bool, complaint: str) -> float:
    """From the program's output: one JSON object a line, of which one has the times."""
    for line in text.splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            return float(found["t_pp"]) + (float(found["t_tg"]) if with_extension else 0.0)
    raise TokenmillError(f"{complaint} and reported no times.")


def find_tool(folder: Path) -> Path:
    """The program in the folder. Raises ConfigError where it is not."""
    path = folder / TOOL
    if not path.is_file():
        raise ConfigError(f"--peer-llama-bin {folder} has no {TOOL}.", param="peer_llama_bin")
    return path


WORKER = Path(__file__).with_name("worker.py")

ENGINES = {"llama_cpp": "llama", "vllm": "vllm", "openvino_genai": "openvino", "tokenmill": "tokenmill"}
"""Python module that shows that an interpreter has the engine -> our name for it, as in --peer-model."""

TITLES = {"llama": "llama.cpp", "vllm": "vLLM", "openvino": "OpenVINO", "tokenmill": "tokenmill"}
TAKES_OWN_MODEL = ("llama", "tokenmill")
"""Those that run the file under test unless they are given models."""

_LOOK = (
    "import importlib.util, json, sys;"
    f"print(json.dumps([sys.prefix, [n for n in {list(ENGINES)!r} if importlib.util.find_spec(n)]]))"
)


class PeerDied(TokenmillError):
    kind = "peer_died"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A peer that was found and can be started. `python`: its interpreter, whose packages lie under `prefix`; None: the
    programs in `folder`. `model`: None for the file under test."""

    engine: str
    model: Path | None
    python: str | None = None
    prefix: str = ""
    folder: Path | None = None

    def name(self, flash_attention: bool = False) -> str:
        title = TITLES[self.engine] + (f" {self.model.name}" if self.model else "")
        title += f" of {self.prefix}" if self.engine == "tokenmill" else ""
        return f"{title}{', flash attention' if flash_attention else ''}"


class Worker:
    """An engine behind worker.py, in a process that `start` starts."""

    takes_uneven = True

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

    def run(self, prompts: list[list[int]], max_tokens: Sequence[int]) -> machine.RunTime:
        """Read all prompts and extend prompt i by max_tokens[i] tokens."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": list(max_tokens)}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None
        found = self._read()
        return machine.RunTime(float(found["seconds"]), float(found["cpu_seconds"]))

    def peak_bytes(self) -> int | None:
        return machine.peak_memory(self._process.pid)

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


def find(pythons: Sequence[str], llama_bin: Path | None, models: Sequence[tuple[str, Path]]) -> list[Wanted]:
    """What can be run with these interpreters, this folder of llama.cpp's programs, and these (engine, path) models.

    llama.cpp and tokenmill run the file under test unless they are given models; the others need theirs named. Raises
    ConfigError.
    """
    homes: dict[str, dict[str, Any]] = {}
    if llama_bin is not None:
        find_tool(llama_bin)
        homes["llama"] = {"folder": llama_bin}
    for python in pythons:
        prefix, engines = _look(python)
        for engine in engines:
            homes.setdefault(engine, {"python": python, "prefix": prefix})
    wanted = []
    for engine, home in homes.items():
        named: list[Path | None] = [path for name, path in models if name == engine]
        if not named and engine not in TAKES_OWN_MODEL:
            raise ConfigError(f"{TITLES[engine]} needs a model: --peer-model {engine}=PATH.", param="peer_model")
        wanted += [Wanted(engine, path, **home) for path in named or [None]]
    for engine, path in models:
        if engine not in homes:
            raise ConfigError(
                f"--peer-model {engine}={path} has no engine: name an interpreter that has it with --peer-python.",
                param="peer_model",
            )
        if not path.exists():
            raise ConfigError(f"--peer-model {engine}={path} does not exist.", param="peer_model")
    return wanted


def _look(python: str) -> tuple[str, list[str]]:
    """Where the interpreter's packages lie, and the engines it has: at least one. A tokenmill is one where there is no
    other, and it is not this interpreter's."""
    is_ours = python == sys.executable
    try:
        done = subprocess.run([python, "-c", _LOOK], capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(f"--peer-python {python} cannot be run: {error.strerror}.", param="peer_python") from None
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ConfigError(f"--peer-python {python} fails: {reason[0]}", param="peer_python")
    prefix, modules = json.loads(done.stdout)
    if is_ours or len(modules) > 1:
        modules = [module for module in modules if module != "tokenmill"]
    if not modules:
        what = "--peers finds none" if is_ours else f"--peer-python {python} has none"
        raise ConfigError(
            f"{what} of {', '.join(ENGINES)}: install one, or name an interpreter that has one with --peer-python.",
            param="peers" if is_ours else "peer_python",
        )
    return prefix, [ENGINES[module] for module in modules]


def start(wanted: Wanted, own_model: Path, threads: int, max_sequences: int) -> list[Worker | LlamaTools]:
    """Start the peer and see it run; llama.cpp with and without flash attention. Raises PeerDied."""
    model = wanted.model or own_model
    if wanted.folder is not None:
        names = {flash: wanted.name(flash) for flash in (False, True)}
        return [LlamaTools(names[flash], wanted.folder, model, threads, flash) for flash in names]
    if wanted.engine == "llama":
        return [_start_llama(wanted, model, threads, flash) for flash in (False, True)]
    return [_start(wanted, wanted.name(), model, {"threads": threads, "max_sequences": max_sequences})]


def _start_llama(wanted: Wanted, model: Path, threads: int, flash_attention: bool) -> Worker:
    """Some builds die in kernels that rearrange weights for wide instruction sets; such a build is started again on the
    weights as the file stores them, and its facts say so. Raises PeerDied if that fails too."""
    name = wanted.name(flash_attention)
    options = {"threads": threads, "flash_attention": flash_attention}
    try:
        peer = _start(wanted, name, model, options | {"extra_buffers": True})
        peer.facts["weights"] = "rearranged where llama.cpp knows how"
    except PeerDied as death:
        peer = _start(wanted, name, model, options | {"extra_buffers": False})
        peer.facts["weights"] = f"as in the file, because with rearranged weights: {death.message}"
    return peer


def _start(wanted: Wanted, name: str, model: Path, options: dict[str, Any]) -> Worker:
    assert wanted.python is not None, wanted
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - the peer closes it
    process = subprocess.Popen(
        [wanted.python, str(WORKER), wanted.engine, str(model), json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment(wanted, options["threads"]),
    )
    peer = Worker(name, process, errors)
    peer.greet()
    peer.run([list(range(1, 33))], [2])
    return peer


def environment(wanted: Wanted, threads: int) -> dict[str, str]:
    """The peer's environment. Ours, without what leads to our packages; vLLM also wants its processor settings, its
    own OpenMP loaded first and its interpreter's programs on the path."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TOKENMILL"))}
    if wanted.engine != "vllm":
        return env
    env |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, machine.usable_cpus()[:threads])),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "PATH": f"{Path(wanted.prefix) / 'bin'}{os.pathsep}{env.get('PATH', '')}",
    }
    openmp = next(Path(wanted.prefix).rglob("libiomp5.so"), None)
    if openmp is not None:
        env["LD_PRELOAD"] = str(openmp)
    return env

"""llama.cpp through its own program `llama-batched-bench`, for builds that come without Python.

One run of ours is one run of the program: it loads the file, warms up, reads B prompts of P tokens (t_pp seconds) and
then extends all of them step by step (t_tg seconds). It draws no tokens and knows equal prompts and lengths only.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import ConfigError, TokenmillError

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

    def run(self, prompts: list[list[int]], max_tokens: Sequence[int]) -> float:
        """Seconds for all prompts and max_tokens tokens of each."""
        num_prompt, num_new, num_streams = len(prompts[0]), max_tokens[0], len(prompts)
        assert {len(prompt) for prompt in prompts} == {num_prompt} and set(max_tokens) == {num_new}, max_tokens
        # A first token comes with the prompt; the program insists on extending by one at least.
        extended = max(1, num_new - 1)
        room = -(-(num_prompt + extended) // ROUND_TO) * ROUND_TO * num_streams
        shape = {"-c": room, "-npp": num_prompt, "-ntg": extended, "-npl": num_streams}
        command = [*self._command, *(str(word) for pair in shape.items() for word in pair)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return seconds_of(done.stdout, num_new > 1, f"{self.name} ended with code {done.returncode}")

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

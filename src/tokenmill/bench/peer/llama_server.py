"""llama.cpp's own server beside ours, for what drafts gain: `llama-server`, or what takes its flags, as a process of
its own that is asked over HTTP. Its clock tells how long an answer took from its first token on, and its counts what
became of drafts."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ..profile import Server
from ..quality.api import ApiSubject
from ..speculation import Given


class LlamaServer:
    """bench.speculation.Peer. flags: those of its command line that say how it drafts. max_tokens: of a prompt and its
    answer. Raises ConfigError, and TokenmillError where it does not start."""

    def __init__(
        self, program: Path, flags: str, model: Path, *, threads: int, streams: int, max_tokens: int, temperature: float
    ) -> None:
        if not (program.is_file() and os.access(program, os.X_OK)):
            raise ConfigError(f"--peer-llama-server {program} is no program.", param="peer_llama_server")
        self.name = " ".join(("llama.cpp", flags)).strip()
        self._temperature = temperature
        command = [str(program), "-m", str(model), "-t", str(threads), "-tb", str(threads), "-np", str(streams)]
        command += ["-c", str(streams * max_tokens), "--host", "127.0.0.1", "-lv", "1", *shlex.split(flags)]
        self._server = Server(command, dict(os.environ))
        self._server.__enter__()
        url = f"http://127.0.0.1:{self._server.port}"
        self._api = ApiSubject(url, model=model.name, concurrency=streams)

    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int, *, ignore_eos: bool) -> Given:
        """All at once. Its cache may know the prompts: what it takes to read them says little."""

        def ask(prompt: Sequence[int]) -> dict[str, Any]:
            body = {"prompt": list(prompt), "n_predict": max_tokens, "temperature": self._temperature, "seed": 1}
            return self._api.post("/completion", body | {"return_tokens": True, "ignore_eos": ignore_eos})

        start_s = time.perf_counter()
        answers = self._api.each(ask, prompts)
        seconds = time.perf_counter() - start_s
        timings = [answer["timings"] for answer in answers]
        return Given(
            seconds,
            sum(timing["predicted_ms"] for timing in timings) / 1e3,
            [answer["tokens"] for answer in answers],
            [answer["content"] for answer in answers],
            sum(timing.get("draft_n", 0) for timing in timings),
            sum(timing.get("draft_n_accepted", 0) for timing in timings),
        )

    def close(self) -> None:
        self._api.close()
        self._server.__exit__(None, None, None)

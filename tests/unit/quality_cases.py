"""A model whose every answer and score is known, and small files of questions."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from tokenmill.bench.quality import tasks as quality_tasks
from tokenmill.bench.quality.run import Completion


def write_rows(path: Path, rows: Sequence[dict]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def load(name: str, path: Path, **changes) -> quality_tasks.Task:
    return quality_tasks.load_task(
        name, path, **({"num_shots": None, "limit": None, "seed": 0, "chat": False} | changes)
    )


class CountingSubject:
    """One token per character. Token t has the log probability -t / 1000, so sums tell which tokens were scored."""

    def __init__(self, answer=lambda prompt: "", head: Sequence[int] = ()) -> None:
        self.facts = {"model": "counting"}
        self.answer = answer
        self.head = list(head)
        self.sent: list[list[int]] = []
        self.is_closed = False

    def complete(self, prompts, *, max_tokens, stop, chat) -> list[Completion]:
        return [Completion(self.answer(prompt), "stop") for prompt in prompts]

    def score(self, sequences) -> list[list[float]]:
        self.sent += [list(sequence) for sequence in sequences]
        return [[-token / 1000 for token in sequence[1:]] for sequence in sequences]

    def tokenize(self, text, *, add_special) -> list[int]:
        return (self.head if add_special else []) + [ord(character) for character in text]

    def detokenize(self, tokens) -> str:
        return "".join(map(chr, tokens))

    def close(self) -> None:
        self.is_closed = True

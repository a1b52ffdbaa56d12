"""Questions of the Berkeley Function Calling Leaderboard, and what is right. Its files are JSON lines with `question`,
`function` and `ground_truth` (https://gorilla.cs.berkeley.edu/leaderboard.html)."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError

_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
"""Its names of types that JSON schema knows by others."""


@dataclass(frozen=True, slots=True)
class Case:
    """answers: of each call, the name and the values that each argument may have; "" among them: it may be left out."""

    id: str
    group: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    answers: list[tuple[str, dict[str, list[Any]]]]

    @property
    def schemas(self) -> dict[str, Any]:
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}


def read_cases(path: Path, limit: int | None, seed: int) -> list[Case]:
    """All, or `limit` that `seed` chooses, in the file's order. Raises ConfigError."""
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        cases = [_case(json.loads(line)) for line in text.decode().splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        what = f"a line has no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} cannot be read as questions with functions: {what}.", param="data") from None
    if not cases:
        raise ConfigError(f"{path} has no questions.", param="data")
    if limit is not None and limit < len(cases):
        kept = random.Random(seed).sample(range(len(cases)), limit)
        cases = [cases[number] for number in sorted(kept)]
    return cases


def _case(row: dict[str, Any]) -> Case:
    tools = [
        {"type": "function", "function": {**function, "parameters": schema_of(function["parameters"])}}
        for function in row["function"]
    ]
    answers = [next(iter(call.items())) for call in row["ground_truth"]]
    return Case(row["id"], row["category"], row["question"][0], tools, answers)


def schema_of(given: Any) -> Any:
    """The parameters as JSON schema has them."""
    if isinstance(given, list):
        return [schema_of(item) for item in given]
    if not isinstance(given, dict):
        return given
    schema = {key: value if key in ("enum", "default") else schema_of(value) for key, value in given.items()}
    kind = schema.get("type")
    if kind == "any":
        del schema["type"]
    elif isinstance(kind, str):
        schema["type"] = _TYPES.get(kind, kind)
    return schema


def is_right(case: Case, calls: Sequence[tuple[str, dict[str, Any]]]) -> bool:
    """Whether the calls are those wanted, in any order, each argument one of the values that it may have."""
    wanted = list(case.answers)
    for name, arguments in calls:
        place = next(
            (at for at, (other, allowed) in enumerate(wanted) if name == other and _fit(arguments, allowed)), -1
        )
        if place < 0:
            return False
        del wanted[place]
    return not wanted


def _fit(arguments: dict[str, Any], allowed: dict[str, list[Any]]) -> bool:
    return all(name in allowed for name in arguments) and all(
        "" in values if name not in arguments else any(_same(arguments[name], value) for value in values)
        for name, values in allowed.items()
    )


def _same(value: Any, wanted: Any) -> bool:
    """Text without regard to case and punctuation; in objects each value is a list of those allowed."""
    if isinstance(value, str) and isinstance(wanted, str):
        return _plain(value) == _plain(wanted)
    if isinstance(value, dict) and isinstance(wanted, dict):
        return all(isinstance(values, list) for values in wanted.values()) and _fit(value, wanted)
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(_same, value, wanted))
    return (type(value) is not bool and type(wanted) is not bool and value == wanted) or value is wanted


def _plain(text: str) -> str:
    return "".join(char for char in text.lower() if char.isalnum())

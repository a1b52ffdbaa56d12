"""Answers of a served model to schemas: whether they fit, what holding them to it costs, and what it costs others.

Cases are JSON lines: a schema, with data that fits it and data that does not. Each schema is put to the model as a
user's message, and again without the constraint. An answer that ended by itself must fit; one that `max_tokens` cut off
is counted apart. Fitting is judged by the jsonschema package, formats included as far as it knows them here.

What exploding grammars cost others are the gaps between the tokens of others' answers, without and with them. The
others stream answers as long as allowed, every second one held to a schema whose mask takes microseconds. Meanwhile
such grammars keep coming until the others have ended: in turns those that explode after some tokens, inside an engine,
and those that do at their beginning, which a server can refuse before. Each pattern is new.
"""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, EngineFailed, InvalidRequest, Unavailable
from ..load.histogram import quantile
from ..quality.api import ApiSubject


@dataclass(frozen=True, slots=True)
class Case:
    """tests: (data, whether it is valid)"""

    name: str
    schema: Any
    tests: tuple[tuple[Any, bool], ...]


def read_cases(path: Path, limit: int | None = None) -> list[Case]:
    """Rows of {"name", "schema", "tests": [{"data", "valid"}]}; `limit`: so many of them, spread evenly. Raises
    ConfigError."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
        cases = [
            Case(
                str(row.get("name") or row.get("description") or number),
                row["schema"],
                tuple((test["data"], bool(test["valid"])) for test in row.get("tests", ())),
            )
            for number, row in enumerate(rows)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"a line has no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} cannot be read as JSON lines with a schema each: {what}.", param="data") from None
    if not cases:
        raise ConfigError(f"{path} has no schemas.", param="data")
    if limit is None or limit >= len(cases):
        return cases
    return [cases[number * len(cases) // limit] for number in range(limit)]


NUM_OTHERS = 8
_NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 10_000}
_BOMB_TOKENS = 30


def measure_gaps(subject: ApiSubject, num_bombs: int, max_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Figures without grammars that explode, and with so many at once. max_tokens: of each of the others."""
    return [_measure(subject, number, max_tokens, seed + place) for place, number in enumerate((0, num_bombs))]


def _measure(subject: ApiSubject, num_bombs: int, max_tokens: int, seed: int) -> dict[str, Any]:
    ends: Counter[str] = Counter()
    began_s = time.monotonic()
    with ThreadPoolExecutor(NUM_OTHERS) as others, ThreadPoolExecutor(max(1, num_bombs)) as pool:
        streams = [others.submit(_stream, subject, place, max_tokens, seed) for place in range(NUM_OTHERS)]
        number = 0
        while num_bombs and not all(stream.done() for stream in streams):
            for end in pool.map(lambda place, number=number: _explode(subject, place, number, seed), range(num_bombs)):
                ends[end] += 1
            number += 1
        gaps_s = sorted(gap_s for stream in streams for gap_s in stream.result())
    if not gaps_s:
        raise ConfigError("The server streamed no tokens one by one.", param="url")
    return {
        "num_bombs": num_bombs,
        "bombs_ended_as": dict(ends.most_common()),
        "num_gaps": len(gaps_s),
        "seconds": time.monotonic() - began_s,
        "p50_s": quantile(gaps_s, 0.5),
        "p99_s": quantile(gaps_s, 0.99),
        "max_s": gaps_s[-1],
    }


def _stream(subject: ApiSubject, place: int, max_tokens: int, seed: int) -> list[float]:
    body: dict[str, Any] = {
        "model": subject.model,
        "prompt": f"Numbers of the list {seed}.{place}:",
        "max_tokens": max_tokens,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
    }
    if place % 2:
        body["guided_json"] = _NUMBERS
    return [after_s - before_s for before_s, after_s in pairwise(subject.stream("/v1/completions", body))]


def _explode(subject: ApiSubject, place: int, number: int, seed: int) -> str:
    """How the call ended."""
    repeated, letter = 1000 + number // 2 + seed, chr(ord("a") + place % 26)
    inner = f"({letter}{{1000}}){{{repeated}}}"
    pattern = inner if number % 2 else f"[{letter}x]{{{9 + place // 26}}}{inner}"
    body = {"model": subject.model, "prompt": "hi", "max_tokens": _BOMB_TOKENS, "guided_regex": pattern}
    try:
        subject.post("/v1/completions", body)
    except InvalidRequest:
        return "refused"
    except (EngineFailed, Unavailable):
        return "failed"
    return "answered"


SCHEMA_CHARS = 2000
"""Of a schema in a prompt; the grammar has all of it."""


@dataclass(frozen=True, slots=True)
class Settings:
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    """finish_reason: "refused" or "failed" where `text` is a message of the server instead."""

    text: str
    finish_reason: str
    num_tokens: int


def ask_all(
    subject: ApiSubject, cases: Sequence[Case], settings: Settings, temperature: float, *, constrained: bool
) -> tuple[list[Answer], float]:
    """(an answer to each case, the seconds that all took)."""

    def ask(case: Case) -> Answer:
        body: dict[str, Any] = {
            "model": subject.model,
            "messages": [{"role": "user", "content": _prompt(case)}],
            "temperature": temperature,
            "seed": settings.seed,
            "max_tokens": settings.max_tokens,
        }
        if constrained:
            form = {"name": "answer", "schema": case.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        try:
            answer = subject.post("/v1/chat/completions", body)
        except InvalidRequest as error:
            return Answer(error.message, "refused", 0)
        except EngineFailed as error:
            return Answer(error.message, "failed", 0)
        choice = answer["choices"][0]
        return Answer(
            choice["message"]["content"] or "",
            choice["finish_reason"] or "unknown",
            (answer.get("usage") or {}).get("completion_tokens") or 0,
        )

    began_s = time.monotonic()
    return subject.each(ask, cases), time.monotonic() - began_s


def judge(cases: Sequence[Case], answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Figures of constrained answers."""
    misfits = []
    for case, answer in zip(cases, answers, strict=True):
        if answer.finish_reason == "stop" and (why := misfit(case.schema, answer.text)):
            misfits.append({"name": case.name, "why": why, "text": answer.text[:2000]})
    failures = [
        {"name": case.name, "why": answer.text[:500]}
        for case, answer in zip(cases, answers, strict=True)
        if answer.finish_reason in ("refused", "failed", "error")
    ]
    return {**speed(answers, seconds), "misfits": misfits, "failures": failures}


def speed(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    num_tokens = sum(answer.num_tokens for answer in answers)
    return {
        "num_answers": len(answers),
        "by_finish_reason": dict(Counter(answer.finish_reason for answer in answers).most_common()),
        "num_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds if seconds > 0 else 0.0,
    }


def misfit(schema: Any, text: str) -> str:
    """Why `text` does not fit; "" where it does."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    validator = _validator(schema)
    found = next(iter(validator.iter_errors(value)), None)
    return "" if found is None else f"{found.validator}: {found.message}"[:500]


def known_formats() -> list[str]:
    """Formats that are judged. Raises ConfigError where there is no jsonschema."""
    return sorted(_jsonschema().Draft202012Validator.FORMAT_CHECKER.checkers)


def _validator(schema: Any) -> Any:
    package = _jsonschema()
    kind = package.validators.validator_for(schema, default=package.Draft202012Validator)
    exact = package.validators.extend(kind, {"multipleOf": _multiple_of})
    return exact(schema, format_checker=kind.FORMAT_CHECKER)


def _multiple_of(_: Any, divisor: Any, value: Any, __: Any) -> Iterator[Any]:
    """By decimal digits: floats would have 0.6 be no multiple of 0.1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if Decimal(repr(value)) % Decimal(repr(divisor)):
        yield _jsonschema().ValidationError(f"{value} is not a multiple of {divisor}")


def _jsonschema() -> Any:
    try:
        import jsonschema
    except ImportError:
        message = "Judging answers needs the jsonschema package: pip install 'jsonschema[format-nongpl]'."
        raise ConfigError(message, param="url") from None
    return jsonschema


def _prompt(case: Case) -> str:
    text = json.dumps(case.schema, ensure_ascii=False)
    return f"Write an example of JSON that fits this JSON schema.\n\n{text[:SCHEMA_CHARS]}"

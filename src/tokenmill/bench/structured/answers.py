"""Answers of a served model to schemas: whether they fit, and what holding them to it costs.

Each schema is put to the model as a user's message, and again without the constraint. An answer that ended by itself
must fit; one that `max_tokens` cut off is counted apart. Fitting is judged by the jsonschema package, formats included
as far as it knows them here.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ...core.errors import ConfigError, EngineFailed, InvalidRequest
from ..quality.api import ApiSubject
from .cases import Case

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

"""What may be asked of the ledger, read from the parameters of a URL as OpenAI's usage API has them, and its answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...core.errors import InvalidRequest

WIDTHS = {"1m": 60, "1h": 3600, "1d": 86400}
LIMITS = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 366)}
"""Buckets of a page, by their width: how many unless the caller says, and the most."""

GROUPS = {"model": "model", "api_key_id": "key", "tenant_id": "tenant"}
FILTERS = {"models": "model", "api_key_ids": "key", "tenant_ids": "tenant"}
_MOST_VALUES = 100
_LATEST_S = 253_402_300_799  # the end of year 9999


class Question(NamedTuple):
    """Sums of [start_s, end_s), both borders of buckets of width_s, apart by the columns `group_by`, over rows that
    have one of the values of each column of `wanted`. next_s: where the next page begins; 0: this is the last."""

    start_s: int
    end_s: int
    width_s: int
    group_by: tuple[str, ...]
    wanted: tuple[tuple[str, tuple[str, ...]], ...]
    next_s: int


class Sum(NamedTuple):
    """tenant, key, model: "" where they are not told apart."""

    bucket_s: int
    tenant: str
    key: str
    model: str
    calls: int
    prompt: int
    cached: int
    output: int


def read_question(values_of: Callable[[str], Sequence[str]], now_s: float, *, all_tenants: bool) -> Question:
    """`values_of`: all values of a parameter, as "name" or "name[]". Raises InvalidRequest naming it."""
    width = _one(values_of, "bucket_width", "1d")
    if width not in WIDTHS:
        raise InvalidRequest(f"bucket_width must be one of {', '.join(WIDTHS)}.", param="bucket_width")
    width_s, (usual, most) = WIDTHS[width], LIMITS[width]
    limit = _number(values_of, "limit", usual, 1, most)
    end_s = _number(values_of, "end_time", 0, 0, _LATEST_S)
    last_s = -(-(end_s or int(now_s) + 1) // width_s) * width_s
    start_s = _number(values_of, "start_time", max(0, last_s - limit * width_s), 0, _LATEST_S)
    if end_s and start_s >= end_s:
        raise InvalidRequest(f"end_time must be after start_time, {start_s}, got {end_s}.", param="end_time")
    page = _one(values_of, "page", "")
    if page and not (re.fullmatch(r"page_[0-9]{1,12}", page)):
        raise InvalidRequest("page must be the next_page of an earlier answer.", param="page")
    start_s = (int(page[5:]) if page else start_s) // width_s * width_s
    stop_s = min(last_s, start_s + limit * width_s)
    known = [name for name in GROUPS if all_tenants or name != "tenant_id"]
    groups = values_of("group_by")
    for name in groups:
        if name not in known:
            raise InvalidRequest(f"group_by must be of {', '.join(known)}.", param="group_by")
    wanted = []
    for name, column in FILTERS.items():
        values = values_of(name)
        if len(values) > _MOST_VALUES:
            raise InvalidRequest(f"{name} may have at most {_MOST_VALUES} values, got {len(values)}.", param=name)
        if values and (all_tenants or column != "tenant"):
            wanted.append((column, tuple(values)))
    group_by = tuple(column for name, column in GROUPS.items() if name in groups)
    return Question(start_s, max(start_s, stop_s), width_s, group_by, tuple(wanted), stop_s if stop_s < last_s else 0)


def page(question: Question, sums: Sequence[Sum]) -> dict[str, object]:
    """OpenAI's page of buckets, the empty ones too."""
    buckets: dict[int, list[dict[str, object]]] = {}
    for each in sums:
        buckets.setdefault(each.bucket_s, []).append(_result(question, each))
    data = [
        {
            "object": "bucket",
            "start_time": start_s,
            "end_time": start_s + question.width_s,
            "results": buckets.get(start_s, []),
        }
        for start_s in range(question.start_s, question.end_s, question.width_s)
    ]
    more = question.next_s
    return {"object": "page", "data": data, "has_more": bool(more), "next_page": f"page_{more}" if more else None}


def _result(question: Question, each: Sum) -> dict[str, object]:
    def told(column: str, value: str) -> str | None:
        return value if column in question.group_by else None

    return {
        "object": "organization.usage.completions.result",
        "input_tokens": each.prompt,
        "input_cached_tokens": each.cached,
        "output_tokens": each.output,
        "num_model_requests": each.calls,
        "model": told("model", each.model),
        "api_key_id": told("key", each.key),
        "tenant_id": told("tenant", each.tenant),
    }


def _one(values_of: Callable[[str], Sequence[str]], name: str, usual: str) -> str:
    values = values_of(name)
    if len(values) > 1:
        raise InvalidRequest(f"{name} may be given once.", param=name)
    return values[0] if values else usual


def _number(values_of: Callable[[str], Sequence[str]], name: str, usual: int, least: int, most: int) -> int:
    text = _one(values_of, name, str(usual))
    if not (text.isascii() and text.isdigit() and len(text) < 13 and least <= int(text) <= most):
        raise InvalidRequest(f"{name} must be an integer from {least} to {most}.", param=name)
    return int(text)

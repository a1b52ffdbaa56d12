"""Granite and Phi-4: a list of objects behind a mark."""

from __future__ import annotations

from .family import Family, Form
from .json_calls import read_calls
from .parser import Calls, Reading


def _read(calls: Calls, marker: str) -> Reading:
    return read_calls(calls)


def _form(before: str, after: str) -> Form:
    return Form(
        opening='{"name": "{name}", "arguments": ',
        closing="}",
        before=before,
        between=", ",
        after=after,
        trigger=before,
    )


GRANITE = Family("granite", ("<|tool_call|>", "<tool_call>"), _read, _form("<|tool_call|>[", "]"))

_PHI_END = "<|/tool_call|>"


def _read_phi(calls: Calls, marker: str) -> Reading:
    return read_calls(calls, _PHI_END, "[" if marker.endswith("[") else "")


PHI = Family(
    "phi4_mini_json",
    ("<|tool_call|>", "functools["),
    _read_phi,
    _form("<|tool_call|>[", "]" + _PHI_END),
    ends=(_PHI_END,),
)

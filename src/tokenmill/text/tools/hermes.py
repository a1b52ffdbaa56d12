"""Hermes and Qwen (2.5, 3), and models that were trained for no form of their own: an object between <tool_call> and
</tool_call> for each call."""

from __future__ import annotations

from .family import Family, Form
from .json_calls import read_calls
from .reading import Calls, Reading

BEGIN, END = "<tool_call>", "</tool_call>"


def _read(calls: Calls, marker: str) -> Reading:
    return read_calls(calls, END if marker else "")


_FORM = Form(opening=BEGIN + '\n{"name": "{name}", "arguments": ', closing="}\n" + END, between="\n", trigger=BEGIN)

HERMES = Family("hermes", (BEGIN,), _read, _FORM, ends=(END,))

GENERIC = Family("json", (BEGIN,), _read, _FORM, bare="{", ends=(END,))
"""The same, and an object without marks where the answer begins with it. For templates that know no tools: these are
told of by `generic.describe`."""

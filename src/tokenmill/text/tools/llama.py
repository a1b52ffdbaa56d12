"""Llama 3: an object with `name` and `parameters` that is the whole answer, or what follows <|python_tag|>, which may
also be a call in Python's form, such as brave_search.call(query="..."). Llama 3.2 and 4 may write a list of calls in
Python's form."""

from __future__ import annotations

from .family import Family, Form
from .json_calls import read_calls
from .parser import Calls, Reading, space
from .pythonic import read_python_call, read_python_list

TAG = "<|python_tag|>"


def _read(calls: Calls, marker: str) -> Reading:
    char = yield from space()
    if char == "{":
        return (yield from read_calls(calls, "", char))
    if char == "[":
        return (yield from read_python_list(calls))
    return (yield from read_python_call(calls, char))


LLAMA3 = Family(
    "llama3_json",
    (TAG,),
    _read,
    Form(opening='{"name": "{name}", "parameters": ', closing="}", between="; ", is_parallel=False),
    bare="{[",
)

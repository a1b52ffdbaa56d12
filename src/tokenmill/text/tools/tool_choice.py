"""The tools that a call offers to the model, and whether it must use one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import msgspec

from ...core.request import SamplingParams


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call, or a tool that takes a text, which to the model is a function of one.

    parameters  JSON schema of its arguments, an object
    is_strict   arguments must fit the schema even where the model calls of its own accord
    is_custom   it takes a text, its argument `TEXT_ARGUMENT`
    grammar     of that text, and its syntax ("lark" or "regex"); None: any
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    is_strict: bool = False
    is_custom: bool = False
    grammar: tuple[str, str] | None = None


TEXT_ARGUMENT = "input"


class ToolUse(msgspec.Struct, frozen=True):
    """choice       "auto": the model decides; "none"; "required": at least one call; "named": one call of `name`
    is_parallel     several calls are allowed in one answer
    """

    tools: tuple[Tool, ...]
    choice: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""
    is_parallel: bool = True

    @property
    def is_forced(self) -> bool:
        return self.choice in ("required", "named")

    @property
    def offered(self) -> tuple[Tool, ...]:
        """Those that the answer may call."""
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.tools if self.choice != "named" or tool.name == self.name)

    def settings(self, given: SamplingParams) -> SamplingParams:
        """Of an answer with these tools. One that must call ends when its calls are whole: stop strings are no part of
        their arguments."""
        return replace(given, stop=()) if self.is_forced and given.stop else given

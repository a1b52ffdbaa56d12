"""How a model speaks: the families of its calls of tools and of its reasoning, and the parser of an answer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable

import msgspec

from ..core.errors import ConfigError
from ..plugins.groups import REASONING_PARSERS, TOOL_PARSERS
from ..plugins.load import are_on, plugin_names
from .parts import Parser
from .reasoning import (
    ALIASES,
    REASONING,
    ReasoningFamily,
    ReasoningParser,
    ReasoningUse,
    reasoning_family,
    reasoning_of,
)
from .tokenizer import Tokenizer
from .tools.families import ALIASES as TOOL_ALIASES
from .tools.families import FAMILIES, family_of, tool_family
from .tools.family import Family
from .tools.harmony import HARMONY, HarmonyParser
from .tools.parser import CallParser, Calls
from .tools.tool_choice import ToolUse

AUTO, NONE = "auto", "none"
_TOOLS = re.compile(r"""(?<![.'"\w])tools\b(?!['"])""")
"""The variable; no key of a message, as in Phi-4-mini's template, where nobody would put them."""
_SEPARATE = ReasoningUse()


class ChatFormat(msgspec.Struct, frozen=True):
    """tools      name of the family in whose form calls are read and demanded
    knows_tools   the chat template lists tools itself
    reasoning     name of the family of reasoning, "" for none
    specials      ids of those marks that are special tokens of the vocabulary
    knows_calls   the chat template writes calls of earlier messages itself
    """

    tools: str = "json"
    knows_tools: bool = False
    reasoning: str = ""
    specials: dict[str, int] = {}
    knows_calls: bool = False

    @property
    def family(self) -> Family:
        found = tool_family(self.tools)
        assert found is not None, self.tools
        return found

    @property
    def reasoning_family(self) -> ReasoningFamily | None:
        return reasoning_family(self.reasoning) if self.reasoning else None

    def parser(
        self,
        use: ToolUse | None,
        request_id: str,
        *,
        is_open: bool = False,
        reasoning: ReasoningUse = _SEPARATE,
    ) -> Parser | None:
        """Of one choice's text; None where all of it is content. `is_open`: the prompt ends within reasoning."""
        offered = use.offered if use is not None else ()
        most = None if use is None or (use.is_parallel and use.choice != "named") else 1
        calls = Calls({tool.name: tool for tool in offered}, call_ids(request_id, self.family.id_size), most)
        family = self.reasoning_family
        if self.family is HARMONY:
            is_separate = family is not None and reasoning.is_separate
            return HarmonyParser(calls, is_open=is_open, is_separate=is_separate, is_shown=reasoning.is_shown)
        is_forced = use is not None and use.is_forced
        inner = CallParser(self.family, calls, is_forced) if offered else None
        if family is None or not reasoning.is_separate:
            return inner
        return ReasoningParser(family, inner, is_open=is_open, is_shown=reasoning.is_shown)

    def shown(self, use: ToolUse | None, reasoning: ReasoningUse = _SEPARATE) -> frozenset[int]:
        """Special tokens that the parser must see in the text."""
        marks: list[str] = []
        if self.family is HARMONY or (use is not None and use.offered):
            marks += self.family.marks
        family = self.reasoning_family
        if family is not None and reasoning.is_separate:
            marks += family.marks
        return frozenset(token for text, token in self.specials.items() if any(text in mark for mark in marks))


def call_ids(request_id: str, size: int = 0) -> Callable[[int], str]:
    """Ids of calls by their number: OpenAI's, or of `size` letters and digits. The same for the same request."""

    def id_of(number: int) -> str:
        digest = hashlib.sha256(f"{request_id} {number}".encode()).hexdigest()
        return digest[:size] if size else f"call_{digest[:24]}"

    return id_of


def find_chat_format(
    template: str | None, tokenizer: Tokenizer, *, tool_parser: str = AUTO, reasoning_parser: str = AUTO
) -> ChatFormat:
    """That of a model with this chat template. The parsers' names choose families whatever the template shows; "none"
    for no reasoning. Raises ConfigError."""
    family = family_of(template)
    if tool_parser != AUTO:
        found = tool_family(TOOL_ALIASES.get(tool_parser, tool_parser))
        if found is None:
            raise _unknown("tool_call_parser", tool_parser, (AUTO, *FAMILIES, *plugin_names(TOOL_PARSERS)))
        family = found
    reasoning = reasoning_of(template)
    if reasoning_parser != AUTO:
        name = ALIASES.get(reasoning_parser, reasoning_parser)
        reasoning = None if name == NONE else reasoning_family(name)
        if reasoning is None and name != NONE:
            known = (AUTO, NONE, *REASONING, *ALIASES, *plugin_names(REASONING_PARSERS))
            raise _unknown("reasoning_parser", reasoning_parser, known)
    if reasoning is not None and (reasoning.name == HARMONY.name) != (family is HARMONY):
        raise ConfigError(
            f"Calls in the form {family.name!r} and reasoning in the form {reasoning.name!r} cannot be told apart: "
            f"{HARMONY.name!r} goes with itself alone. Give --tool-call-parser and --reasoning-parser {HARMONY.name}, "
            f"or --reasoning-parser {NONE}.",
            param="reasoning_parser",
        )
    texts = [*family.marks, *(reasoning.marks if reasoning is not None else ())]
    specials = {}
    for special in tokenizer.special_texts():
        token = tokenizer.token_id(special)
        if token is not None and any(special in text for text in texts):
            specials[special] = token
    knows_tools, knows_calls = known_of(template) if family.name != "json" else (False, False)
    return ChatFormat(family.name, knows_tools, "" if reasoning is None else reasoning.name, specials, knows_calls)


def _unknown(param: str, name: str, known: Iterable[str]) -> ConfigError:
    off = "" if are_on() else "; plug-ins are off"
    return ConfigError(f"--{param.replace('_', '-')} is {name!r}; known are {', '.join(known)}{off}.", param=param)


def known_of(template: str | None) -> tuple[bool, bool]:
    """Whether a template lists tools, and whether it writes calls."""
    if template is None:
        return False, False
    return _TOOLS.search(template) is not None, "tool_calls" in template

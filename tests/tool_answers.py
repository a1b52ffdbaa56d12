"""What models of each family write when they call tools or reason, and what that says."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from tokenmill.text.chat_format import ChatFormat
from tokenmill.text.parts import CallArguments, CallStart, Content, Parser, Part, Reasoning
from tokenmill.text.tools.tool_choice import Tool, ToolUse

WEATHER = Tool(
    "get_weather",
    "Current weather of a city",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"enum": ["C", "F"]}},
        "required": ["city"],
    },
)
SEARCH = Tool("web.search", "Search", {"type": "object", "properties": {"query": {"type": "string"}}})
NOW = Tool("now", "The time", {"type": "object", "properties": {}})
TOOLS = (WEATHER, SEARCH, NOW)
USE = ToolUse(TOOLS)


@dataclass(frozen=True)
class Said:
    """All parts of one kind joined; calls as (name, arguments as written)."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


def said(parts: Iterable[Part]) -> Said:
    content, reasoning, calls = "", "", []
    for part in parts:
        if isinstance(part, Content):
            content += part.text
        elif isinstance(part, Reasoning):
            reasoning += part.text
        elif isinstance(part, CallStart):
            assert part.index == len(calls)
            calls.append([part.name, ""])
        else:
            assert isinstance(part, CallArguments) and part.index == len(calls) - 1
            calls[-1][1] += part.text
    return Said(content, reasoning, tuple((name, text) for name, text in calls))


def read(parser: Parser, *pieces: str) -> Said:
    return said([part for piece in pieces for part in parser.push(piece)] + parser.end())


PARIS = '{"city": "Paris"}'
OSLO = '{"city": "Oslo \\"x\\" {]", "days": 3}'
ARGS = [("get_weather", PARIS), ("get_weather", OSLO)]

ANSWERS: list[tuple[str, str, Said]] = [
    # Hermes, Qwen 2.5 and 3
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>', Said(calls=(ARGS[0],))),
    (
        "hermes",
        f'Let me see.\n\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n<tool_call>\n'
        f'{{"arguments": {OSLO}, "name": "get_weather"}}\n</tool_call>\nDone.',
        Said("Let me see.Done.", calls=tuple(ARGS)),
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', Said(calls=(("now", "{}"),))),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', Said(calls=(("now", "{}"),))),
    (
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "now", "arguments": "{\\"a\\": [1, 2.5e3]}"}}'
        "</tool_call>",
        Said(calls=(("now", '{"a": [1, 2.5e3]}'),)),
    ),
    ("hermes", '<tool_call>[{"name": "now", "arguments": {}}]</tool_call> ', Said(calls=(("now", "{}"),))),
    ("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}', Said(calls=(ARGS[0],))),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"ci', Said(calls=(("get_weather", '{"ci'),))),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>\n<tool_call>\n{"name": "no', Said(calls=(("now", "{}"),))),
    # what only looks like a call
    ("hermes", "a < b <tool_cal", Said("a < b <tool_cal")),
    ("hermes", "<tool_call>", Said("<tool_call>")),
    ("hermes", "<tool_call> not JSON </tool_call> \n", Said("<tool_call> not JSON </tool_call> \n")),
    ("hermes", '<tool_call>{"name": "fly", "arguments": {}}</tool_call>', None),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', None),
    ("hermes", '<tool_call>{"arguments": {"a": 1,}}</tool_call>', None),
    ("hermes", '{"name": "now", "arguments": {}}', None),
    (
        "hermes",
        '<tool_call><tool_call>{"name": "now", "arguments": {}}</tool_call>',
        Said("<tool_call>", calls=(("now", "{}"),)),
    ),
    (
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": oops}}</tool_call> ok',
        Said("ok", calls=(("now", '{"a": oops}}'),)),
    ),
    # the generic form
    ("json", '{"name": "now", "arguments": {}}', Said(calls=(("now", "{}"),))),
    ("json", f' \n{{"name": "get_weather", "parameters": {OSLO}}}', Said(calls=(ARGS[1],))),
    ("json", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', Said(calls=(("now", "{}"),))),
    ("json", '{"city": "Paris", "name": "now"}', None),
    ("json", '{"name": "Ann"}', None),
    # Llama 3
    ("llama3_json", f'{{"name": "get_weather", "parameters": {PARIS}}}', Said(calls=(ARGS[0],))),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}; '
        f'{{"name": "get_weather", "parameters": {OSLO}}}',
        Said(calls=tuple(ARGS)),
    ),
    (
        "llama3_json",
        '<|python_tag|>web.search.call(query="a \\"b\\" (c")',
        Said(calls=(("web.search", '{"query": "a \\"b\\" (c"}'),)),
    ),
    (
        "llama3_json",
        "[get_weather(city='Oslo', days=-3, units=[True, null]), now()]",
        Said(calls=(("get_weather", '{"city": "Oslo", "days": -3, "units": [true, null]}'), ("now", "{}"))),
    ),
    ("llama3_json", "[1, 2, 3] is a list", None),
    ("llama3_json", "<|python_tag|>print(1)", None),
    ("llama3_json", "now() is a call", None),
    # Mistral
    (
        "mistral_list",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}, '
        f'{{"name": "get_weather", "arguments": {OSLO}, "id": "123456789"}}]',
        Said(calls=tuple(ARGS)),
    ),
    ("mistral_list", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}]', Said(calls=(ARGS[0],))),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]get_weather[ARGS]{OSLO}", Said(calls=tuple(ARGS))),
    ("mistral", f"Hm. [TOOL_CALLS]get_weather[CALL_ID]abc123XYZ[ARGS]{PARIS}", Said("Hm.", calls=(ARGS[0],))),
    ("mistral", f"[TOOL_CALLS]get_weather{PARIS}", Said(calls=(ARGS[0],))),
    ("mistral", "[TOOL_CALLS]fly[ARGS]{}", None),
    ("mistral", "[TOOL", None),
    # Granite, Phi-4
    (
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}, '
        f'{{"name": "get_weather", "arguments": {OSLO}}}]',
        Said(calls=tuple(ARGS)),
    ),
    ("granite", f'<tool_call>[{{"name": "get_weather", "arguments": {PARIS}}}]', Said(calls=(ARGS[0],))),
    (
        "phi4_mini_json",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}]<|/tool_call|>',
        Said(calls=(ARGS[0],)),
    ),
    ("phi4_mini_json", f'functools[{{"name": "get_weather", "arguments": {PARIS}}}]', Said(calls=(ARGS[0],))),
    ("phi4_mini_json", "import functools[1] ", None),
    # DeepSeek
    (
        "deepseek_v3",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n" + PARIS
        + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n" + OSLO + "\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Said("I look.", calls=tuple(ARGS)),
    ),
    (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{OSLO}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Said(calls=tuple(ARGS)),
    ),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", None),
    # Qwen3-Coder
    (
        "qwen3_coder",
        "On it.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo \"x\"\nline 2 </p\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n"
        "</tool_call>",
        Said(
            "On it.",
            calls=(("get_weather", '{"city": "Oslo \\"x\\"\\nline 2 </p", "days": 3}'), ("now", "{}")),
        ),
    ),
    (
        "qwen3_coder",
        "<function=get_weather><parameter=units>C</parameter><parameter=days>soon</parameter>"
        "<parameter=list>[1, {'a': True}]</parameter></function>",
        Said(calls=(("get_weather", '{"units": "C", "days": "soon", "list": [1, {"a": true}]}'),)),
    ),
    ("qwen3_coder", f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>', Said(calls=(ARGS[0],))),
    ("qwen3_coder", "<tool_call>\n<function=fly>\n</function>\n</tool_call>", None),
    # GPT-OSS
    (
        "harmony",
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{OSLO}<|call|>",
        Said(calls=(ARGS[1],)),
    ),
    ("harmony", "<|channel|>final<|message|>Paris.\n\n", Said("Paris.\n\n")),
    ("harmony", "<|channel|>final<|message|>Par<|return|>", Said("Par")),
    (
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.get_weather<|channel|>"
        f"commentary json<|message|> {PARIS}\n<|call|>",
        Said("I look.", calls=(ARGS[0],)),
    ),
    ("harmony", " to=functions.now<|channel|>analysis code<|message|>{}", Said(calls=(("now", "{}"),))),
    ("harmony", "<|channel|>commentary to=functions.now<|message|><|call|>", Said(calls=(("now", "{}"),))),
    (
        "harmony",
        "<|channel|>commentary to=functions.now<|message|>{oops<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather<|message|>{PARIS}<|call|><|start|>assistant<|channel|>final<|message|>Done.",
        Said("Done.", calls=(("now", "{oops"), ARGS[0])),
    ),
    ("harmony", "<|channel|>commentary<|message|>One.<|channel|>final<|message|>Two.", Said("One.\nTwo.")),
    ("harmony", "Plain <|start words", None),
    ("harmony", " \n", None),
    ("harmony", "to=Paris", None),
    ("harmony", "<|channel|>commentary to=functions.fly <|constrain|>json<|message|>{}<|call|>", None),
    ("harmony", "<|channel|>final<|end|>", None),
    ("harmony", "<|start|>functions.now to=assistant<|channel|>commentary<|message|>noon<|end|>", None),
    ("harmony", "<|channel|>" + "x" * 2000, None),
    ("harmony", "<|channel|>final", Said()),
    ("harmony", "<|channel|>final<|message|>Paris.<|end|><|start|>assi", Said("Paris.")),
]  # fmt: skip
"""(family, what is written, what it says); None: all of it is content."""

REASONED: list[tuple[str, bool, str, Said]] = [
    ("think", False, "<think>\nhm\n\nyes\n</think>\n\nParis.", Said("Paris.", "hm\n\nyes")),
    ("think", True, "\nhm\n</think>\n\nParis. \n", Said("Paris. \n", "hm")),
    ("think", False, "\n\n<think>hm</think>", Said("", "hm")),
    ("think", False, "<think>hm </thin", Said("", "hm </thin")),
    ("think", True, "hm", Said("", "hm")),
    ("think", False, "<think>\n\n</think>\n\nParis.", Said("Paris.")),
    ("think", False, "No <think>thoughts</think>", Said("No <think>thoughts</think>")),
    ("think", False, "  <thin", Said("  <thin")),
    (
        "think",
        True,
        'I <tool_call>{"name": "now"}</tool_call>\n</think>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        Said("", 'I <tool_call>{"name": "now"}</tool_call>', (("now", "{}"),)),
    ),
    ("mistral", False, "[THINK]hm[/THINK]Paris.", Said("Paris.", "hm")),
    ("granite", False, "Here is my thought process: hm\n\nHere is my response: Paris.", Said("Paris.", "hm")),
    ("seed_oss", False, "<seed:think>hm</seed:think>Paris.", Said("Paris.", "hm")),
]
"""(family, whether the prompt opens it, what is written, what it says), calls being those of Hermes."""


def arguments(calls: Said) -> list[tuple[str, object]]:
    return [(name, json.loads(text)) for name, text in calls.calls]


def chat_format(tools: str = "hermes", reasoning: str = "") -> ChatFormat:
    return ChatFormat(tools, True, reasoning)

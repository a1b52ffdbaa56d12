"""Calls and reasoning are read from what models write: each family's form, however the text is cut, and nothing that
only looks like one."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.core.errors import ConfigError
from tokenmill.text.chat_format import ChatFormat, find_chat_format
from tokenmill.text.parts import CallArguments, CallStart, Content, Parser
from tokenmill.text.reasoning import REASONING, ReasoningUse, is_open
from tokenmill.text.tools.families import FAMILIES, family_of
from tokenmill.text.tools.tool_choice import ToolUse
from tool_answers import ANSWERS, REASONED, TOOLS, USE, Said, chat_format, read
from unit.tiny_tokenizer import byte_tokenizer


def parser(family: str, use: ToolUse = USE) -> Parser:
    made = chat_format(family).parser(use, "r")
    assert made is not None
    return made


CASES = [(family, text, Said(text) if wanted is None else wanted) for family, text, wanted in ANSWERS]


@pytest.mark.parametrize(("family", "text", "wanted"), CASES)
def test_each_family_is_read(family: str, text: str, wanted: Said) -> None:
    assert read(parser(family), text) == wanted


@pytest.mark.parametrize(("family", "text", "wanted"), CASES)
def test_every_cut_gives_the_same(family: str, text: str, wanted: Said) -> None:
    """In two at every place, and into single characters."""
    for at in range(len(text)):
        assert read(parser(family), text[:at], text[at:]) == wanted, text[:at]
    assert read(parser(family), *text) == wanted
    assert read(parser(family), *(text[at : at + 3] for at in range(0, len(text), 3))) == wanted


@pytest.mark.parametrize(
    ("family", "text"),
    [(family, text) for family, text, wanted in CASES if wanted.calls and not wanted.content and family != "harmony"],
)
def test_of_forced_calls_nothing_is_text_wherever_they_are_cut(family: str, text: str) -> None:
    """Harmony's marks are tokens of their own, which no cut divides."""
    forced = msgspec.structs.replace(USE, choice="required")
    assert all(not read(parser(family, forced), text[:at]).content for at in range(len(text)))


@pytest.mark.parametrize(("family", "is_open", "text", "wanted"), REASONED)
def test_reasoning_is_told_from_the_answer_however_it_is_cut(
    family: str, is_open: bool, text: str, wanted: Said
) -> None:
    def fresh() -> Parser:
        made = chat_format("hermes", family).parser(USE, "r", is_open=is_open)
        assert made is not None
        return made

    assert read(fresh(), text) == wanted
    assert read(fresh(), *text) == wanted
    for at in range(len(text)):
        assert read(fresh(), text[:at], text[at:]) == wanted, text[:at]


CODER = "<tool_call>\n<function=now>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
_MARKS = sorted({mark for family in FAMILIES.values() for mark in (*family.marks, *family.ends)})
_PIECES = st.lists(
    st.sampled_from(
        [*_MARKS, "{", "}", "[", "]", '"', ",", ":", "\n", " ", "\\", "1", "now", "get_weather", '{"name": "now"',
         '"arguments": {', '"a": ', "text", "é", "(", ")", "function", "<parameter=city>", "</parameter>", "<", ">",
         "<think>", "</think>"]
    ),
    max_size=25,
)  # fmt: skip


@given(st.sampled_from(sorted(FAMILIES)), _PIECES, st.randoms(use_true_random=False))
def test_no_text_is_read_in_two_ways(family: str, pieces: list[str], random: Any) -> None:
    """Any mixture of marks and JSON, cut anywhere, says the same as whole, and in the end nothing is left to say."""
    text = "".join(pieces)
    cuts = sorted(random.randrange(len(text) + 1) for _ in range(5))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    made = chat_format(family, "think")
    whole, cut = made.parser(USE, "r"), made.parser(USE, "r")
    assert whole is not None and cut is not None
    assert read(whole, text) == read(cut, *parts)
    assert whole.end() == cut.end() == []


@given(_PIECES)
def test_without_marks_all_text_is_content(pieces: list[str]) -> None:
    text = "".join(piece for piece in pieces if piece not in _MARKS).replace("<", "").replace("functools", "")
    assert read(parser("hermes"), text) == Said(text)


def test_a_name_comes_at_once_and_arguments_as_they_form() -> None:
    subject = parser("hermes")
    assert subject.push('ok <tool_call>\n{"name": "now", "argum') == [Content("ok")]
    (start,) = subject.push('ents": ')[:1] or subject.push("{")[:1]
    assert isinstance(start, CallStart) and start.name == "now" and start.index == 0
    assert subject.push('"a": [1,') == [CallArguments(0, '"a": [1,')]
    assert subject.push(" 2]}") == [CallArguments(0, " 2]}")]
    assert subject.push("}\n</tool_call>") == subject.end() == []


def test_partial_marks_are_never_shown() -> None:
    subject = parser("hermes")
    assert subject.push("a <tool") == [Content("a")]
    assert subject.push("_call") == []
    assert subject.push("x>") == [Content(" <tool_callx>")]


def test_text_of_an_answer_in_json_is_not_held_back() -> None:
    """An object that is no call is passed on at its first key."""
    subject = parser("json")
    assert subject.push('{"city": ') == [Content('{"city":')]


def test_at_most_one_call_where_parallel_calls_are_forbidden() -> None:
    two = '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "now"}</tool_call>'
    assert read(parser("hermes", ToolUse(TOOLS, is_parallel=False)), two) == Said(calls=(("now", "{}"),))
    assert len(read(parser("hermes"), two).calls) == 2
    named = ToolUse(TOOLS, "named", "now")
    assert len(read(parser("hermes", named), two).calls) == 1


def test_ids_differ_by_call_and_request_and_are_the_same_again() -> None:
    def ids(family: str, request: str) -> list[str]:
        made = chat_format(family).parser(USE, request)
        assert made is not None
        mark = FAMILIES[family].markers[0]
        parts = made.push(f'{mark}[{{"name": "now", "arguments": {{}}}}, {{"name": "now", "arguments": {{}}}}]')
        return [part.id for part in parts if isinstance(part, CallStart)]

    assert ids("granite", "r") == ids("granite", "r") and len({*ids("granite", "r"), *ids("granite", "s")}) == 4
    assert all(one.startswith("call_") for one in ids("granite", "r"))
    assert all(len(one) == 9 and one.isalnum() for one in ids("mistral_list", "r"))


def test_no_parser_where_there_is_nothing_to_take_apart() -> None:
    assert chat_format().parser(None, "r") is None
    assert chat_format().parser(ToolUse(TOOLS, "none"), "r") is None
    assert chat_format("hermes", "think").parser(None, "r", reasoning=ReasoningUse(is_separate=False)) is None


@pytest.mark.parametrize(
    ("family", "text", "wanted"),
    [
        ("llama3_json", '[now(a="\\ud800é")]', {"a": "\ud800é"}),
        ("llama3_json", "[now(a=1e999)]", None),
        ("llama3_json", f"[now(a=0x{'f' * 4000})]", None),
        ("llama3_json", f"[now(a={'-' * 2000}1)]", None),
        ("llama3_json", f"[now(a={'-' * 985}1)]", None),
        ("llama3_json", f"[now(a=[{'1,' * 40_000}])]", None),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>', {"a": "\ud800"}),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": NaN}"}</tool_call>', None),
        ("hermes", "<tool_call>" + '{"function": ' * 2000, None),
        ("qwen3_coder", CODER.format('["\\ud800"]'), {"a": ["\ud800"]}),
        ("qwen3_coder", CODER.format("1e999"), {"a": "1e999"}),
        ("qwen3_coder", CODER.format("[" + "1, " * 40_000 + "1]"), {"a": [1] * 40_001}),
    ],
)
def test_values_that_cannot_be_sent_or_are_too_costly_end_no_answer(family: str, text: str, wanted: Any) -> None:
    """Halves of characters stay escaped; what no JSON number can say, or takes long to read, is no call."""
    found = read(parser(family), *text)
    if wanted is None:
        assert found == Said(text)
    else:
        ((_, arguments),) = found.calls
        assert arguments.encode() and json.loads(arguments) == wanted


def test_long_arguments_take_time_in_proportion() -> None:
    """Half a million characters in one piece are read in a moment."""
    text = '<tool_call>{"name": "now", "arguments": {"a": "' + "x" * 500_000 + '"}}</tool_call>'
    assert len(read(parser("hermes"), text).calls[0][1]) == 500_009


@pytest.mark.parametrize(
    ("template", "family", "reasoning"),
    [
        (None, "json", ""),
        ("{{ messages }}", "json", ""),
        ("{% if tools %}<tools>{% endif %}<tool_call>", "hermes", ""),
        ("<tool_call>{{ tools }}<think>", "hermes", "think"),
        ("<tool_call>\n<function={{ tools }}", "qwen3_coder", ""),
        ("{{ tools }}[TOOL_CALLS][", "mistral_list", ""),
        ("{{ tools }}[TOOL_CALLS]x[ARGS][THINK]", "mistral", "mistral"),
        ("<｜tool▁calls▁begin｜>```json</think>", "deepseek_v3", "think"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31", ""),
        ("<|tool|>{{ tools }}", "phi4_mini_json", ""),
        ("<|tool_call|>Here is my thought process:", "granite", "granite"),
        ("<|start_header_id|>{{ tools }}", "llama3_json", ""),
        ("<|start_header_id|>", "json", ""),
        ("<|start|>{{ tools }}<|channel|>analysis<|message|>", "harmony", "harmony"),
    ],
)
def test_families_are_known_by_the_template(template: str | None, family: str, reasoning: str) -> None:
    assert family_of(template).name == family
    found = find_chat_format(template, byte_tokenizer())
    assert (found.tools, found.reasoning) == (family, reasoning)


@pytest.mark.parametrize(
    ("template", "tools", "calls"),
    [
        ("{{ tools }}{{ m.tool_calls }}<tool_call>", True, True),
        ("{{ m['tool_calls'] }}<｜tool▁calls▁begin｜>", False, True),  # as DeepSeek V3.1
        ("{{ tools }}<tool_call>", True, False),
        ("{{ m['tools'] }}{{ m.tools }}{% if 'tools' in m %}<|tool|>", False, False),  # as Phi-4-mini
        ("{{ tools }}{{ m.tool_calls }}", False, False),  # in a form that is not known
    ],
)
def test_what_a_template_knows_of_tools_is_found_in_it(template: str, tools: bool, calls: bool) -> None:
    found = find_chat_format(template, byte_tokenizer())
    assert (found.knows_tools, found.knows_calls) == (tools, calls)


def test_families_may_be_named() -> None:
    tokenizer = byte_tokenizer()
    found = find_chat_format("{{ tools }}", tokenizer, tool_parser="mistral", reasoning_parser="qwen3")
    assert found == ChatFormat("mistral", True, "think")
    assert find_chat_format("<think>", tokenizer, reasoning_parser="none").reasoning == ""
    assert find_chat_format(None, tokenizer, tool_parser="openai", reasoning_parser="openai_gptoss").tools == "harmony"
    with pytest.raises(ConfigError, match=r"goes with itself alone"):
        find_chat_format("<|channel|>", tokenizer, tool_parser="hermes")
    for wrong in ({"tool_parser": "x"}, {"reasoning_parser": "x"}):
        with pytest.raises(ConfigError, match=r"known are auto, "):
            find_chat_format(None, tokenizer, **wrong)


def test_whether_a_prompt_opens_reasoning() -> None:
    think = REASONING["think"]
    assert is_open(think, "hi<|im_end|>\n<|im_start|>assistant\n<think>\n")
    assert not is_open(think, "what is <think>?<|im_end|>\n<|im_start|>assistant\n")
    assert not is_open(think, "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert is_open(think, "", continued="<think> and so") and not is_open(think, "", continued="<think>a</think> b")

"""Answers that a grammar of calls allows are calls that fit, in every family's form, whatever is drawn."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from scripted import EOS, make_text_model
from tokenmill.core.errors import InvalidRequest
from tokenmill.text.chat_format import ChatFormat, find_chat_format
from tokenmill.text.grammar.build import to_grammar
from tokenmill.text.grammar.constraint import Constraint, Thinking
from tokenmill.text.grammar.matcher import GrammarFailed, Vocabulary
from tokenmill.text.tools.call_grammar import ToolConstraint
from tokenmill.text.tools.families import FAMILIES
from tokenmill.text.tools.family import VALUE_END
from tokenmill.text.tools.tool_choice import Tool, ToolUse
from tool_answers import ANSWERS, NOW, SEARCH, TOOLS, WEATHER, Said, arguments, read

TOKENIZER = make_text_model().tokenizer
STRICT = ToolUse((Tool(WEATHER.name, "", WEATHER.parameters, True), SEARCH, NOW))
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
QUOTE = TOKENIZER.encode('"')[0]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENIZER, TOKENIZER.vocab_size, (EOS,))


def grammar(family: str, use: ToolUse, answer: Any = None) -> str:
    value = ToolConstraint(family, use, "tools[{}].function.parameters", answer).as_json()
    return to_grammar(Constraint("tools", value, "tools"), TOKENIZER)


def going_on(text: str) -> int:
    """The token with which the end of a value in XML begins, or goes on."""
    size = next(size for size in range(len(VALUE_END) - 1, -1, -1) if text.endswith(VALUE_END[:size]))
    return TOKENIZER.encode(VALUE_END[size], add_special=False)[0]


def draw(vocabulary: Vocabulary, text: str, seed: int, most: int = 400) -> str | None:
    """A text that ends by itself, drawn at random from what the grammar allows, ends sooner than not; None where it
    grows too long."""
    rng = random.Random(seed)
    matcher = vocabulary.matcher(text)
    words = np.zeros((vocabulary.vocab_size + 31) // 32, np.uint32)
    tokens: list[int] = []
    while len(tokens) < most:
        matcher.fill(words.ctypes.data, words.nbytes)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        ends = [token for token in (EOS, going_on(TOKENIZER.decode(tokens)), QUOTE) if token in allowed]
        token = ends[0] if ends and rng.random() < 0.7 else rng.choice(allowed)
        if token == EOS:
            return TOKENIZER.decode(tokens)
        tokens.append(token)
        matcher.follow([token])
    return None


def calls_of(family: str, use: ToolUse, text: str) -> Said:
    parser = ChatFormat(family, True).parser(use, "r")
    assert parser is not None
    return read(parser, text)


def fits(said: Said) -> bool:
    for name, value in arguments(said):
        jsonschema.validate(value, SCHEMAS[name])
    return True


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_fit(vocabulary: Vocabulary, family: str, parallel: bool) -> None:
    use = ToolUse(TOOLS, "required", is_parallel=parallel)
    text = grammar(family, use)
    drawn = [answer for seed in range(12) if (answer := draw(vocabulary, text, seed)) is not None]
    assert len(drawn) >= 3
    for answer in drawn:
        said = calls_of(family, use, answer)
        assert said.calls and not said.content and fits(said), answer
        assert parallel or len(said.calls) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_named_call_is_one_of_that_tool(vocabulary: Vocabulary, family: str) -> None:
    use = ToolUse(TOOLS, "named", "get_weather", is_parallel=False)
    text = grammar(family, use)
    drawn = [answer for seed in range(12) if (answer := draw(vocabulary, text, seed)) is not None]
    assert len(drawn) >= 3
    for answer in drawn:
        said = calls_of(family, use, answer)
        assert [name for name, _ in said.calls] == ["get_weather"] and not said.content and fits(said), answer


def is_taken(vocabulary: Vocabulary, text: str, answer: str) -> bool:
    matcher = vocabulary.matcher(text)
    try:
        matcher.follow(TOKENIZER.encode(answer, add_special=False, parse_special=False))
    except GrammarFailed:
        return False
    return matcher.is_whole


FREE = [family for family in FAMILIES if FAMILIES[family].form.trigger]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_strict_tool_must_fit_where_the_model_calls_of_its_own_accord(vocabulary: Vocabulary, family: str) -> None:
    """Plain words stay free; what the family's mark begins goes on as a call that fits."""
    text = grammar(family, STRICT)
    form = FAMILIES[family].form

    def call(name: str, value: str) -> str:
        if form.arguments is not None:
            keys = json.loads(value)
            value = "".join(f"<parameter={key}>\n{keys[key]}\n</parameter>\n" for key in keys)
        return form.before + form.opening.replace("{name}", name) + value + form.closing + form.after

    assert is_taken(vocabulary, text, form.lead + "Plain words.\nAnd more.") and is_taken(vocabulary, text, form.lead)
    assert is_taken(vocabulary, text, call("get_weather", '{"city": "Oslo", "days": 3}'))
    assert not is_taken(vocabulary, text, call("get_weather", '{"town": "Oslo"}'))
    assert not is_taken(vocabulary, text, call("get_weather", '{"city": "Oslo", "days": "x"}'))
    assert not is_taken(vocabulary, text, call("fly", "{}"))
    if form.lead:
        words = "I look.".join(form.preamble)
        assert is_taken(vocabulary, text, words + call("get_weather", '{"city": "Oslo"}'))
        assert not is_taken(vocabulary, text, words) and not is_taken(vocabulary, text, "Plain words.")
    if form.trigger:
        assert is_taken(vocabulary, text, "I look. " + call("get_weather", '{"city": "Oslo"}'))
        assert not is_taken(vocabulary, text, f"I look. {form.trigger} and so on")


def test_an_answer_that_calls_nothing_may_have_a_schema(vocabulary: Vocabulary) -> None:
    text = grammar("hermes", ToolUse(TOOLS), ({"type": "object", "properties": {"a": {"type": "integer"}}}, "x"))
    assert is_taken(vocabulary, text, '{"a": 3}') and not is_taken(vocabulary, text, '{"a": "x"}')
    assert is_taken(vocabulary, text, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not is_taken(vocabulary, text, "Plain words.")


def test_values_that_only_json_can_hold_make_a_call_in_json(vocabulary: Vocabulary) -> None:
    """Qwen3-Coder's form cannot keep text to a pattern; what it reads as well can."""
    tool = Tool("f", "", {"type": "object", "properties": {"id": {"type": "string", "pattern": "^[0-9]+$"}}})
    use = ToolUse((tool,), "required")
    text = grammar("qwen3_coder", use)
    assert is_taken(vocabulary, text, '<tool_call>\n{"name": "f", "arguments": {"id": "12"}}\n</tool_call>')
    assert not is_taken(vocabulary, text, '<tool_call>\n{"name": "f", "arguments": {"id": "x"}}\n</tool_call>')


@pytest.mark.parametrize("family", FREE)
def test_what_models_write_is_what_is_demanded(vocabulary: Vocabulary, family: str) -> None:
    """At least one of the family's own answers is allowed by its grammar, white space and all."""
    free = grammar(family, ToolUse(TOOLS))
    texts = [text for name, text, wanted in ANSWERS if name == family and wanted is not None and wanted.calls]
    assert any(is_taken(vocabulary, free, text) for text in texts)


def test_a_schema_that_cannot_be_kept_is_refused_by_the_tools_place() -> None:
    tool = Tool("f", "", {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})
    with pytest.raises(InvalidRequest, match=r"uniqueItems") as caught:
        grammar("hermes", ToolUse((NOW, tool), "required"))
    assert caught.value.param == "tools[1].function.parameters"
    grammar("hermes", ToolUse((NOW, tool)))  # nothing is demanded of it


def test_marks_that_are_special_tokens_are_demanded_as_such() -> None:
    """Their text would be no such token, and models do not write it."""
    text = make_text_model(specials=("[TOOL_CALLS]", "[ARGS]")).tokenizer
    value = ToolConstraint("mistral", ToolUse((NOW,), "required"), "tools[{}]").as_json()
    made = to_grammar(Constraint("tools", value, "tools"), text)
    ids = [text.token_id("[TOOL_CALLS]"), text.token_id("[ARGS]")]
    assert all(f"<[{token}]>" in made for token in ids)
    tokens = [ids[0], *text.encode("now", add_special=False), ids[1], *text.encode("{}", add_special=False)]
    matcher = Vocabulary(text, text.vocab_size, (EOS,)).matcher(made)
    matcher.follow([token for token in tokens if token is not None])
    assert matcher.is_whole
    parser = find_chat_format("[TOOL_CALLS][ARGS]", text)
    assert parser.shown(ToolUse((NOW,))) == frozenset(ids) and not parser.shown(None)
    assert calls_of("mistral", ToolUse((NOW,)), text.decode(tokens, skip_special=False)).calls == (("now", "{}"),)


def test_reasoning_may_come_before_calls_and_words(vocabulary: Vocabulary) -> None:
    """Where the model has to begin it, it may also leave it out; where the prompt has begun it, it must end."""
    value = ToolConstraint("hermes", ToolUse((NOW,), "required"), "tools[{}]").as_json()
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'

    def takes(answer: str, thinking: Thinking) -> bool:
        return is_taken(vocabulary, to_grammar(Constraint("tools", value, thinking=thinking), TOKENIZER), answer)

    may = Thinking("<think>", "</think>", may_skip=True)
    assert takes(call, may) and takes(f"<think>\nHm.\n</think>\n\n{call}", may) and not takes("<think>Hm.", may)
    begun = Thinking("<think>", "</think>", is_open=True, may_skip=True)
    assert takes(f"Hm.</think>{call}", begun) and not takes(call, begun)
    said = ChatFormat("hermes", True, "think").parser(ToolUse((NOW,)), "r", is_open=True)
    assert said is not None and read(said, f"Hm.</think>{call}") == Said("", "Hm.", (("now", "{}"),))


def test_a_budget_ends_reasoning_and_leaves_the_answer_free() -> None:
    """After so many tokens nothing but the closing mark may come; the answer behind it may still call."""
    text = make_text_model(specials=("<think>", "</think>")).tokenizer
    begin, end = text.token_id("<think>"), text.token_id("</think>")
    assert begin is not None and end is not None
    value = ToolConstraint("hermes", ToolUse((NOW,)), "tools[{}]").as_json()
    thinking = Thinking("<think>", "</think>", budget=3)
    vocabulary = Vocabulary(text, text.vocab_size, (EOS,))

    def takes(*tokens: int) -> bool:
        matcher = vocabulary.matcher(to_grammar(Constraint("tools", value, thinking=thinking), text))
        try:
            matcher.follow(list(tokens))
        except GrammarFailed:
            return False
        return matcher.is_whole

    words = text.encode("Paris.", add_special=False)
    thought = text.encode("abcd", add_special=False)
    call = text.encode('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', add_special=False)
    assert takes(begin, end, *words) and takes(begin, *thought[:3], end, *words, *call)
    assert not takes(begin, *thought, end, *words) and not takes(*words) and not takes(begin, *thought[:3])

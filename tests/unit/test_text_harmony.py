"""Harmony: reasoning, calls and content are told apart however the text is cut, constraints come in the right channel,
histories are as its template reads them, and only its own end tokens end an answer."""

from __future__ import annotations

from typing import Any

import pytest

from scripted import EOS, make_text_model
from tokenmill.core.events import FINISH_STOP, Output
from tokenmill.core.request import Request, SamplingParams
from tokenmill.text.chat_format import ChatFormat, find_chat_format
from tokenmill.text.choice import Choice
from tokenmill.text.grammar.build import to_grammar
from tokenmill.text.grammar.constraint import Constraint, Thinking
from tokenmill.text.grammar.matcher import GrammarFailed, Vocabulary
from tokenmill.text.parts import CallStart, Content, Parser, Reasoning
from tokenmill.text.reasoning import REASONING, ReasoningUse
from tokenmill.text.text_model import _load_gguf
from tokenmill.text.tools.call_grammar import ToolConstraint
from tokenmill.text.tools.harmony import ANALYSIS, CALL, END, FINAL, NEXT, PREAMBLE, RETURN, arrange, describe_all
from tokenmill.text.tools.tool_choice import ToolUse
from tool_answers import NOW, PARIS, TOOLS, USE, Said, read
from unit.tiny_tokenizer import byte_metadata

HARMONY = ChatFormat("harmony", True, "harmony", knows_calls=True)
MARKS = ("<|channel|>", "<|end|>", "<|message|>", "<|start|>", "<|constrain|>", "<|return|>", "<|call|>")
THOUGHT = f"{ANALYSIS}Hm.{END}{NEXT}"
TO_WEATHER = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}{CALL}"

ANSWERS = [
    (False, f"{THOUGHT}{FINAL}Paris.{RETURN}", Said("Paris.", "Hm.")),
    (True, f"Hm.{END}{NEXT}{FINAL}Paris.", Said("Paris.", "Hm.")),
    (False, f"{THOUGHT}{TO_WEATHER}", Said("", "Hm.", (("get_weather", PARIS),))),
    (
        False,
        f"{THOUGHT}{PREAMBLE}I look.{END}{NEXT}{ANALYSIS}So.{END}{NEXT}{TO_WEATHER}",
        Said("I look.", "Hm.\nSo.", (("get_weather", PARIS),)),
    ),
    (False, f"{ANALYSIS}Hm.{FINAL}Paris.", Said("Paris.", "Hm.")),  # the end mark forgotten
    (False, f"{ANALYSIS}a <|end", Said("", "a <|end")),
    (False, f"<|channel|>analysis to=python code<|message|>1{CALL}", Said("", "1")),
    (False, "Paris.", Said("Paris.")),
    (True, "", Said()),
]
"""(whether the prompt opens reasoning, what is written, what it says)"""


def parser(use: ToolUse | None = USE, **more: Any) -> Parser:
    made = HARMONY.parser(use, "r", **more)
    assert made is not None
    return made


@pytest.mark.parametrize(("is_open", "text", "wanted"), ANSWERS)
def test_reasoning_is_told_from_the_answer_however_it_is_cut(is_open: bool, text: str, wanted: Said) -> None:
    assert read(parser(is_open=is_open), text) == wanted
    assert read(parser(is_open=is_open), *text) == wanted
    for at in range(len(text)):
        assert read(parser(is_open=is_open), text[:at], text[at:]) == wanted, text[:at]


def test_parts_come_as_they_form() -> None:
    subject = parser()
    assert subject.push("<|chan") == subject.push("nel|>analysis<|message|>") == []
    assert subject.push("Hm. <") == [Reasoning("Hm. ")]
    assert subject.push(f"b{END}{NEXT}") == [Reasoning("<b")]
    (start,) = subject.push("<|channel|>commentary to=functions.now <|constrain|>json<|message|>")
    assert isinstance(start, CallStart) and start.name == "now"
    assert subject.push(f"{{}}{CALL}{NEXT}{FINAL}noon")[-1] == Content("noon")


def test_reasoning_left_out_or_left_in() -> None:
    text = f"{THOUGHT}{FINAL}Paris."
    assert read(parser(reasoning=ReasoningUse(is_shown=False)), text) == Said("Paris.")
    assert read(parser(reasoning=ReasoningUse(is_separate=False)), text) == Said(f"{ANALYSIS}Hm.{END}Paris.")
    assert read(parser(None), TO_WEATHER) == Said(TO_WEATHER)


def test_tokens_of_reasoning_are_counted_with_their_end_in_whatever_pieces_they_come() -> None:
    """Marks are special tokens, which are not shown and yet read; the rest is a token for each byte."""
    text = make_text_model(specials=MARKS)
    chat_format = find_chat_format("<|channel|>", text.tokenizer)
    tokens = text.tokenizer.encode(f"{THOUGHT}{PREAMBLE}Well.{END}{NEXT}{THOUGHT}{FINAL}Paris.", add_special=False)
    for size in (1, 3, len(tokens)):
        sampling = SamplingParams(max_tokens=400)
        request = Request("r", (1,), sampling, max_tokens=400, seed=1, eos_token_ids=(EOS,))
        choice = Choice(0, request, text.tokenizer, chat_format.parser(None, "r"), chat_format.shown(None))
        pieces = [choice.push(Output("r", tuple(tokens[at : at + size]))) for at in range(0, len(tokens), size)]
        pieces.append(choice.push(Output("r", finish_reason=FINISH_STOP)))
        parts = [part for piece in pieces for part in piece.parts]
        assert "".join(part.text for part in parts if isinstance(part, Content)) == "Well.\nParis."
        assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == "Hm.\nHm."
        assert choice.reasons and choice.num_reasoning_tokens == 2 * len("Hm.E")


@pytest.mark.parametrize("specials", [(), MARKS])
def test_what_is_constrained_stands_in_its_channel(specials: tuple[str, ...]) -> None:
    text = make_text_model(specials=specials).tokenizer
    vocabulary = Vocabulary(text, text.vocab_size, (EOS,))
    family = REASONING["harmony"]

    def takes(answer: str, constraint: Constraint, is_open: bool = False) -> bool:
        calls = constraint.kind == "tools"
        thinking = Thinking(
            family.begin, family.end, is_open, may_skip=True, after=family.after, lead="" if calls else family.lead
        )
        grammar = to_grammar(Constraint(constraint.kind, constraint.value, thinking=thinking), text)
        matcher = vocabulary.matcher(grammar)
        try:
            matcher.follow(text.encode(answer, add_special=False, parse_special=bool(specials)))
        except GrammarFailed:
            return False
        return matcher.is_whole

    json = Constraint("json_object")
    assert takes(f'{FINAL}{{"a": 1}}', json) and takes(f"{THOUGHT}{FINAL}{{}}", json)
    assert takes(f"Hm.{END}{NEXT}{FINAL}{{}}", json, is_open=True)
    assert not takes("{}", json) and not takes(f"{FINAL}oops", json) and not takes(f"{THOUGHT}{{}}", json)
    call = TO_WEATHER.removesuffix(CALL)
    required = Constraint("tools", ToolConstraint("harmony", ToolUse(TOOLS, "required"), "tools[{}]").as_json())
    assert takes(call, required) and takes(THOUGHT + call, required) and not takes(f"{FINAL}No.", required)
    assert not takes(call + call, required)
    words = ToolConstraint("harmony", ToolUse((NOW,)), "tools[{}]", ({"type": "object"}, "x"))
    free = Constraint("tools", words.as_json())
    assert takes(f"{THOUGHT}{FINAL}{{}}", free) and not takes(f"{THOUGHT}{FINAL}No.", free)


def test_a_history_has_a_call_a_message_and_reasoning_where_the_template_looks() -> None:
    one, two = ({"id": name, "type": "function", "function": {"name": "now", "arguments": {}}} for name in "ab")
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "ab"]
    asked = {"role": "user", "content": "x"}
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [one, two]}
    assert arrange([asked, said, *results]) == [
        asked,
        {"role": "assistant", "content": "", "thinking": "Hm.\nI look.", "tool_calls": [one]},
        results[0],
        {"role": "assistant", "content": "", "tool_calls": [two]},
        results[1],
    ]
    plain = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert arrange([plain]) == [{"role": "assistant", "content": "Yes.", "thinking": "Hm."}]
    (tool,) = describe_all([{"type": "function", "function": {"name": "now"}}])
    assert tool["function"] == {"name": "now", "description": ""}


def test_only_its_own_marks_end_an_answer() -> None:
    """<|end|> closes a message, though files name it as an end of turns; elsewhere it ends an answer."""
    metadata = byte_metadata()
    tokens = [*metadata["tokenizer.ggml.tokens"], RETURN, CALL]
    known: dict[str, Any] = {"general.architecture": "gpt-oss", "gpt-oss.context_length": 64}
    end, returned = tokens.index(END), tokens.index(RETURN)
    named = byte_metadata(tokens=tokens, token_type=[*metadata["tokenizer.ggml.token_type"], 3, 3], eot_token_id=end)
    named["tokenizer.ggml.eos_token_id"] = returned
    assert _load_gguf({**named, **known}, None).eos_token_ids == (returned, returned + 1)
    assert _load_gguf({**metadata, **known}, None).eos_token_ids == (end,)

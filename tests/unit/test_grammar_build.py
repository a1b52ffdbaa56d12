"""Constraints of every kind as grammars."""

from __future__ import annotations

from typing import Any

import pytest
from tests.grammars import takes
from tests.unit.tiny_tokenizer import SPECIAL, byte_tokenizer

from tokenmill.core.errors import InvalidRequest
from tokenmill.text.grammar.build import to_grammar
from tokenmill.text.grammar.constraint import Constraint, Thinking
from tokenmill.text.grammar.gbnf import to_lark
from tokenmill.text.grammar.matcher import GrammarFailed, Vocabulary

TAGS = {
    "structures": [
        {
            "begin": "<f=a>",
            "schema": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
            "end": "</f>",
        },
        {"begin": "<f=b>", "schema": {"type": "null"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}

NESTED = {
    "structures": [{"begin": "<ab>", "schema": {"type": "null"}}, {"begin": "<a>", "schema": {"type": "integer"}}],
    "triggers": ["<ab", "<a"],
}
"""A trigger that begins with another."""

KINDS: list[tuple[Constraint, list[str], list[str]]] = [
    (Constraint("json_object"), ['{"a":[1]}', "{}", '{\n  "a": 1\n}'], ["[]", "1", '{"a":}', "{" + " " * 9 + "}"]),
    (Constraint("json_schema", {"type": "integer"}), ["1", "-20"], ["a", "1.5", " 1"]),
    (Constraint("json_object", whitespace=""), ['{"a":1}'], ['{"a": 1}']),
    (Constraint("json_object", whitespace=" "), ['{"a": 1}'], ['{"a":  1}', '{"a":\n1}']),
    (Constraint("regex", r"\d{3}/[a-z]+\n?"), ["123/ab", "123/a\n"], ["12/ab", "123", "x123/a"]),
    (Constraint("regex", "^abc$"), ["abc"], ["abcd", "^abc$"]),
    (
        Constraint("regex", r"\d[\w-]\D[^]/]\/[^\d]"),
        ["1--x/a"],
        ["٣--x/a", "1é-x/a", "1-1x/a", "1--]/a", "1--//a", "1--x/1"],
    ),
    (Constraint("regex", r"[\W_][^\D][[:alpha:]]"), ["é1a", "_1Z"], ["a1a", "_٣a", "_1["]),
    (Constraint("regex", " "), [" "], ["", "  "]),
    (
        Constraint("choice", ["a", "ab", 'q"\\', "n\n\0\x7f", "é😀", "a"]),
        ["a", "ab", 'q"\\', "n\n\0\x7f", "é😀"],
        ["b", ""],
    ),
    (Constraint("gbnf", 'root ::= "a" item+\nitem ::= [0-9] | "-"'), ["a1", "a-2"], ["a", "1"]),
    (Constraint("gbnf", 'root ::= ([0-9]+)? ("a"{2}){1,2} "."'), ["aa.", "12aaaa."], ["a.", "aaa.", "1aaaaaa."]),
    (Constraint("gbnf", 'start: "a" NUM\nNUM: /[0-9]+/'), ["a12"], ["a"]),
    (Constraint("lark", 'start: "x" | "y"'), ["x"], ["z"]),
    (
        Constraint("structural_tag", TAGS),
        ["hello", 'ok <f=a>{"x": 1}</f> and <f=b>null</f> so', ""],
        ["<f=c>", '<f=a>{"x": "s"}</f>', "<f=b>null"],
    ),
    (
        Constraint("structural_tag", NESTED),
        ["a <b", "x<a>1 y<ab>null z"],
        ["<a", "<ab", "<ac", "<ab>1", "<a>null", "x<a>1<a"],
    ),
]


@pytest.mark.parametrize(("constraint", "good", "bad"), KINDS, ids=[f"{c[0].kind}-{i}" for i, c in enumerate(KINDS)])
def test_a_kind_takes_what_it_says(constraint: Constraint, good: list[str], bad: list[str]) -> None:
    """Each kind of constraint, with texts that fit and texts that do not."""
    grammar = to_grammar(constraint)
    for text in good:
        assert takes(grammar, text), text
    for text in bad:
        assert not takes(grammar, text), text


GBNF = [
    ('root ::= "\\x41" "\\u00e9" [\\u00e9-\\u00ff] "\\U0001F600"', ["Aéé😀"], ["Aee😀"]),
    ('root ::= a-x A_x a-X\na-x ::= "1"\nA_x ::= "2"\na-X ::= "3"', ["123"], ["111"]),
    ('root ::= start\nstart ::= "a"', ["a"], ["b"]),
    ('# one "\nroot ::= "#" # two\n  | "b"\n  | [#"] "c"?', ["#", "b", '"c'], ["c"]),
    ("root ::= [0-9&&3]+ [+--]", ["&3-", "3,"], ["a-", "3."]),
    ("root ::= .{2}", ["a\n", 'é"'], ["a"]),
    ('root ::= ("x" | y)+\ny ::= "y" root?', ["xyx"], ["", "z"]),
    ('root ::= (num "=" num "\\n")+\nnum ::= [0-9]+ ws\nws ::= [ \\n]*', ["1=2\n", "1 =2 \n\n3=4\n"], ["1=2", "=1\n"]),
    ('root ::= a "ab"\na ::= "a"*', ["ab", "aaab"], ["aa", "b"]),
]


@pytest.mark.parametrize(("text", "good", "bad"), GBNF)
def test_gbnf_means_what_llama_cpp_means(text: str, good: list[str], bad: list[str]) -> None:
    """Code points, names, line breaks, sets and comments, where the converter would misread them."""
    grammar = to_grammar(Constraint("gbnf", text, "grammar"))
    assert all(takes(grammar, answer) for answer in good) and not any(takes(grammar, answer) for answer in bad)


def test_what_can_be_a_lexeme_is_one() -> None:
    """Strings and numbers of JSON, as llama.cpp's grammars write them, are matched quickly."""
    text = (
        'root ::= "{" ws string ":" ws num ("," ws string ":" ws num)* "}" ws\n'
        'string ::= "\\"" ([^"\\\\] | "\\\\" ["\\\\nt])* "\\"" ws\n'
        'num ::= "-"? [0-9]+ ("." [0-9]+)? ws\n'
        'ws ::= | " " | "\\n" [ \\t]{0,20}\n'
    )
    lark = to_lark(text, "grammar")
    assert "STRING:" in lark and "NUM:" in lark and "WS:" in lark
    grammar = to_grammar(Constraint("gbnf", text, "grammar"))
    assert takes(grammar, '{"a": -1.5,"\\"b" :2\n}') and not takes(grammar, '{"a": 1.}')


BAD: list[tuple[str, Any, str]] = [
    ("regex", "", "not empty"),
    ("regex", 3, "must be a string"),
    ("regex", "a" * 300_000, "characters"),
    ("choice", [], "at least one"),
    ("choice", ["a", 1], "at least one string"),
    ("gbnf", 'root ::= "a', "Unexpected end of input"),
    ("gbnf", "root ::= nope", "'nope' not found"),
    ("gbnf", 'root ::= "\\ud800"', "no character"),
    ("structural_tag", {"structures": []}, "structures"),
    ("structural_tag", {**TAGS, "triggers": ["<g"]}, "structures[0].begin must begin"),
    ("structural_tag", {**TAGS, "structures": [{"begin": "<f=", "schema": {"contains": 1}}]}, "'contains' at #"),
    ("structural_tag", {**TAGS, "triggers": ["<f=", "<g"]}, "no structure begins with '<g'"),
    ("structural_tag", {**TAGS, "structures": [{"begin": "<f=", "shema": {}}]}, "structures[0].shema is not known"),
]


@pytest.mark.parametrize(("kind", "value", "words"), BAD)
def test_a_bad_constraint_says_what_is_wrong(kind: Any, value: Any, words: str) -> None:
    """The message names the field that gave it and what it wants."""
    with pytest.raises(InvalidRequest) as caught:
        to_grammar(Constraint(kind, value, "structured_outputs.x"))
    assert words in caught.value.message
    assert (caught.value.param or "").startswith("structured_outputs.x")


def test_reasoning_comes_before_the_answer() -> None:
    """Text up to the marker is free, then the answer follows; before the marker none is taken."""
    grammar = to_grammar(Constraint("choice", ["yes"], thinking=Thinking("<think>", "</think>", is_open=True)))
    assert takes(grammar, "hm {</thi yes</think>\n\nyes")
    assert takes(grammar, "</think>yes")
    assert not takes(grammar, "yes")
    assert not takes(grammar, "hm</think>no")
    closed = to_grammar(Constraint("choice", ["yes"], thinking=Thinking("<think>", "</think>")))
    assert takes(closed, "<think>hm</think>yes")
    assert not takes(closed, "hm</think>yes")


def test_a_budget_needs_a_marker_that_is_a_token() -> None:
    """Tokens are counted by the grammar, which must then be able to name the one that ends reasoning."""
    thinking = Thinking("<think>", "</think>", is_open=True, budget=3)
    with pytest.raises(InvalidRequest, match="token of its own"):
        to_grammar(Constraint("choice", ["yes"], thinking=thinking), byte_tokenizer())


def is_drawn(grammar: str, *parts: str | int) -> bool:
    """Whether an answer may begin with these texts and tokens, one by one."""
    tokenizer = byte_tokenizer()
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, (tokenizer.encode_byte(0),))
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else tokenizer.encode(part, add_special=False, parse_special=False)
    try:
        vocabulary.matcher(grammar).follow(ids)
    except GrammarFailed:
        return False
    return True


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 3, 2**31 - 1])
def test_a_budget_is_the_most_tokens_before_the_marker(budget: int, is_open: bool) -> None:
    """None at all where it is 0; and behind the marker comes what is constrained."""
    tokenizer = byte_tokenizer()
    mark = tokenizer.token_id(SPECIAL)
    assert mark is not None
    thinking = Thinking("<t>", SPECIAL, is_open, budget)
    grammar = to_grammar(Constraint("choice", ["yes"], "p", thinking=thinking), tokenizer)
    begin = "" if is_open else "<t>"
    for length in (0, 1, 2, 3, 4, 500):
        assert is_drawn(grammar, begin, "x" * length, mark, "yes") == (length <= budget), length
    assert not is_drawn(grammar, begin, mark, "no") and not is_drawn(grammar, begin, mark, mark)


def test_a_trigger_that_is_a_special_token_is_that_token() -> None:
    """Its name written out as text triggers nothing; the token does, and what follows must then fit."""
    tokenizer = byte_tokenizer()
    mark = tokenizer.token_id(SPECIAL)
    assert mark is not None
    tags = {"structures": [{"begin": f"{SPECIAL}a", "schema": {"type": "integer"}, "end": "!"}], "triggers": [SPECIAL]}
    grammar = to_grammar(Constraint("structural_tag", tags, "p"), tokenizer)

    assert is_drawn(grammar, "x ", mark, "a12! y") and is_drawn(grammar, f"x {SPECIAL}b")
    assert not is_drawn(grammar, "x ", mark, "b") and not is_drawn(grammar, "x ", mark, "a!")

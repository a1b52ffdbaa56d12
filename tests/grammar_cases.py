"""A vocabulary of characters, and grammars for it: for tests of structured answers on tiny models."""

from __future__ import annotations

import json
import random
import re

from tokenmill.text.grammar.matcher import Vocabulary

VOCAB_SIZE = 96
SPECIAL, END = 94, 95


class Characters:
    """Token i is the character of code 32 + i, but for a special token and the end token."""

    def token_bytes(self, token: int) -> bytes:
        return b"<|special|>" if token == SPECIAL else b"<|end|>" if token == END else bytes([32 + token])

    def is_special(self, token: int) -> bool:
        return token >= SPECIAL

    def encode(self, text: str, **_: object) -> list[int]:
        return [ord(char) - 32 for char in text]

    def decode(self, tokens) -> str:
        return "".join(chr(32 + token) for token in tokens)


def vocabulary() -> Vocabulary:
    return Vocabulary(Characters(), VOCAB_SIZE, (END,))  # type: ignore[arg-type]


def regex(pattern: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": f"start: /{pattern}/"}]})


def schema(value: object) -> str:
    return json.dumps({"grammars": [{"json_schema": value}]})


PATTERNS = ("[a-c]{3}", "(yes|no|maybe)", "[0-9]+([.][0-9]{1,2})?", "a*b", "[ -}]{0,30}!")
PERSON = {
    "type": "object",
    "properties": {"n": {"type": "string", "maxLength": 6}, "a": {"type": "integer"}, "t": {"type": "boolean"}},
    "required": ["n", "t"],
    "additionalProperties": False,
}
GRAMMARS = (*map(regex, PATTERNS), schema(PERSON))


def random_grammar(rng: random.Random) -> str:
    return rng.choice(GRAMMARS)


def follows(grammar: str, text: str) -> bool:
    """By another library's reading of the grammar."""
    if grammar == schema(PERSON):
        value = json.loads(text)
        return set(value) <= {"n", "a", "t"} and isinstance(value["n"], str) and isinstance(value["t"], bool)
    return re.fullmatch(PATTERNS[GRAMMARS.index(grammar)], text) is not None

"""Bodies of /tokenize and /detokenize as validated calls. Pure: no model, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.errors import InvalidRequest
from .conversations import Conversation, parse_conversation
from .fields import Fields
from .prompts import Prompt, token_ids
from .rules import Rules
from .tooling import read_tools

MAX_TOKENIZE_CHARS = 1 << 22
MAX_DETOKENIZE_TOKENS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeCall:
    """`prompts`: the text, or none where there is a conversation."""

    model: str | None
    prompts: tuple[Prompt, ...] = ()
    conversation: Conversation | None = None
    add_special: bool = True
    with_strings: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeCall:
    """`prompts`: the token ids."""

    model: str | None
    prompts: tuple[Prompt, ...]


def parse_tokenize(body: dict[str, Any], rules: Rules) -> tuple[TokenizeCall, list[str]]:
    """vLLM's: {"prompt"} or {"messages"}, "add_special_tokens", "return_token_strs". What to do and the names of
    unknown fields. Raises InvalidRequest naming the field."""
    fields = Fields(body)
    conversation = (
        None if fields.any("messages") is None else parse_conversation(fields, rules, read_tools(fields).shown)
    )
    prompt = None if conversation else fields.text("prompt")
    if conversation is None and prompt is None:
        raise fields.wrong("prompt", "a string")
    if prompt is not None and len(prompt) > MAX_TOKENIZE_CHARS:
        raise InvalidRequest(
            f"prompt has {len(prompt)} characters; at most {MAX_TOKENIZE_CHARS} are encoded at once.", param="prompt"
        )
    add_special = fields.flag("add_special_tokens")
    call = TokenizeCall(
        model=fields.text("model"),
        prompts=() if prompt is None else (prompt,),
        conversation=conversation,
        add_special=conversation is None if add_special is None else add_special,
        with_strings=bool(fields.flag("return_token_strs")),
    )
    return call, fields.unread()


def parse_detokenize(body: dict[str, Any], rules: Rules) -> tuple[DetokenizeCall, list[str]]:
    fields = Fields(body)
    tokens = fields.array("tokens")
    if tokens is None:
        raise fields.wrong("tokens", "an array of token ids")
    if len(tokens) > MAX_DETOKENIZE_TOKENS:
        raise InvalidRequest(
            f"tokens holds {len(tokens)} ids; at most {MAX_DETOKENIZE_TOKENS} are decoded at once.", param="tokens"
        )
    ids = token_ids("tokens", tokens, rules.vocab_size) if tokens else ()
    call = DetokenizeCall(model=fields.text("model"), prompts=(ids,))
    return call, fields.unread()

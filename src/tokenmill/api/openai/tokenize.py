"""Bodies of /tokenize and /detokenize as validated calls, the answers of /tokenize and of /tokenizer_info. Pure: no
clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...core.errors import InvalidRequest
from ...text.text_model import TextModel
from ...text.tokenizer import Tokenizer
from ..conversations import Conversation, parse_conversation
from ..fields import Fields
from ..json_encoder import encode_json
from ..logprobs import TokenNames
from ..prompts import Prompt, token_ids
from ..rules import Rules
from ..tools import read_tools

MAX_TOKENIZE_CHARS = 1 << 22
MAX_DETOKENIZE_TOKENS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeCall:
    """`prompts`: the text, or none where there is a conversation. `form`: of the answer, a key of
    FORMS. `parse_special`: special tokens that the text
    spells count as such."""

    model: str | None
    prompts: tuple[Prompt, ...] = ()
    conversation: Conversation | None = None
    add_special: bool = True
    form: str = "count"
    parse_special: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeCall:
    """`prompts`: the token ids."""

    model: str | None
    prompts: tuple[Prompt, ...]


def parse_tokenize(body: dict[str, Any], rules: Rules) -> tuple[TokenizeCall, list[str]]:
    """vLLM's: {"prompt"} or {"messages"}, "add_special_tokens", "return_token_strs". llama-server's: {"content"},
    "add_special", "parse_special", "with_pieces". What to do and the names of unknown fields. Raises InvalidRequest
    naming the field."""
    fields = Fields(body)
    if fields.any("content") is not None:
        return _parse_content(fields), fields.unread()
    conversation = (
        None if fields.any("messages") is None else parse_conversation(fields, rules, read_tools(fields).shown)
    )
    prompt = None if conversation else fields.text("prompt")
    if conversation is None and prompt is None:
        raise fields.wrong("prompt", "a string")
    if prompt is not None:
        _check_length("prompt", prompt)
    add_special = fields.flag("add_special_tokens")
    call = TokenizeCall(
        model=fields.text("model"),
        prompts=() if prompt is None else (prompt,),
        conversation=conversation,
        add_special=conversation is None if add_special is None else add_special,
        form="strings" if fields.flag("return_token_strs") else "count",
    )
    return call, fields.unread()


def _parse_content(fields: Fields) -> TokenizeCall:
    content = fields.text("content") or ""
    _check_length("content", content)
    parse_special = fields.flag("parse_special")
    return TokenizeCall(
        model=fields.text("model"),
        prompts=(content,),
        add_special=bool(fields.flag("add_special")),
        form="pieces" if fields.flag("with_pieces") else "ids",
        parse_special=parse_special is None or parse_special,
    )


def _check_length(name: str, text: str) -> None:
    if len(text) > MAX_TOKENIZE_CHARS:
        raise InvalidRequest(
            f"{name} has {len(text)} characters; at most {MAX_TOKENIZE_CHARS} are encoded at once.", param=name
        )


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


def _counted(tokens: list[int], names: TokenNames, max_model_len: int) -> dict[str, Any]:
    return {"count": len(tokens), "max_model_len": max_model_len, "tokens": tokens, "token_strs": None}


def _with_strings(tokens: list[int], names: TokenNames, max_model_len: int) -> dict[str, Any]:
    return _counted(tokens, names, max_model_len) | {"token_strs": [names.text(token) for token in tokens]}


def _with_pieces(tokens: list[int], names: TokenNames, max_model_len: int) -> dict[str, Any]:
    return {"tokens": [{"id": token, "piece": _piece(names.raw(token))} for token in tokens]}


def _piece(raw: bytes) -> str | list[int]:
    """As text, or as bytes where it is none."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


FORMS: Mapping[str, Callable[[list[int], TokenNames, int], dict[str, Any]]] = {
    "count": _counted,
    "strings": _with_strings,
    "ids": lambda tokens, names, max_model_len: {"tokens": tokens},
    "pieces": _with_pieces,
}
"""Answers of /tokenize: vLLM's, without what each token stands for and with it, and llama-server's two."""


def tokenize_body(tokenizer: Tokenizer, ids: Iterable[int], form: str, max_model_len: int) -> bytes:
    return encode_json(FORMS[form](list(ids), TokenNames(tokenizer), max_model_len))


def tokenizer_info(text: TextModel, max_model_len: int) -> dict[str, Any]:
    """What a client needs to render conversations itself, under the names of tokenizer_config.json, as vLLM has them.
    The class is that which transformers gives to any tokenizer.json: how text is split is not told, /tokenize does it.
    """
    tokenizer, chat = text.tokenizer, text.chat
    eos = next((name for each in text.eos_token_ids if (name := tokenizer.token_text(each))), None)
    bos = None if text.bos_token_id is None else tokenizer.token_text(text.bos_token_id)
    added = {
        str(number): {name: getattr(token, name) for name in _ADDED}
        for number, token in tokenizer.added_tokens().items()
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": None if chat is None else chat.source,
        "bos_token": bos,
        "eos_token": (chat.eos_token if chat is not None else "") or eos,
        "pad_token": None,
        "added_tokens_decoder": added,
        "model_max_length": max_model_len,
    }


_ADDED = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
"""What is told of an added token."""

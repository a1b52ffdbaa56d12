"""Log probabilities as JSON, in the three shapes that clients know: OpenAI's for chat, OpenAI's older one for
completions, and vLLM's for prompts.

There may be twenty alternatives to each token of each choice, so the JSON is joined from parts: what it says of a token
is written once in an answer, and the work comes in pieces.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

import msgspec

from ..core.step import TokenLogprob
from ..text.tokenizer import Tokenizer
from .json_encoder import encode_json
from .pieces import Work

ENTRIES_AT_ONCE = 1024
"""Tokens and alternatives of one piece of work: about a millisecond."""

_REPLACED = "\ufffd".encode()

_LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

_MAX_KEPT = 4096
_new_decoder = codecs.getincrementaldecoder("utf-8")


class TokenNames:
    """What a token is called in JSON: its own text, or "token_id:N". Bytes that are no character show as U+FFFD, and
    where names tell tokens apart as OpenAI's completions write them: "bytes:\\xNN"."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._names: dict[int, bytes] = {}
        self._chat: dict[int, tuple[bytes, bytes]] = {}

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self.text(token)

    def text(self, token: int) -> str:
        return self.raw(token).decode("utf-8", "replace")

    def raw(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token)

    def json_key(self, token: int) -> bytes:
        """The name as a JSON string that tells byte tokens apart."""
        name = self.json_name(token)
        if self._as_ids or _REPLACED not in name:
            return name
        raw = self.raw(token)
        try:
            raw.decode()
        except UnicodeDecodeError:
            return encode_json("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw))
        return name

    def json_name(self, token: int) -> bytes:
        """The name as a JSON string."""
        known = self._names.get(token)
        if known is None:
            if len(self._names) >= _MAX_KEPT:
                self._names.clear()
            known = self._names[token] = encode_json(self.name(token))
        return known

    def chat_entry(self, token: int) -> tuple[bytes, bytes]:
        """What of its entry in chat comes before and after the number."""
        known = self._chat.get(token)
        if known is None:
            if len(self._chat) >= _MAX_KEPT:
                self._chat.clear()
            head = b'{"token":' + self.json_name(token) + b',"logprob":'
            known = self._chat[token] = head, b',"bytes":' + encode_json(list(self.raw(token)))
        return known


def chat_logprobs(entries: Sequence[TokenLogprob], names: TokenNames, num_top: int) -> Work[msgspec.Raw]:
    """choices[].logprobs of chat."""
    shaped = yield from chat_entries(entries, names, num_top)
    return msgspec.Raw(b'{"content":' + bytes(shaped) + b"}")


def chat_entries(entries: Sequence[TokenLogprob], names: TokenNames, num_top: int) -> Work[msgspec.Raw]:
    """What chat says of each token, as an array."""
    parts, entry_of = [], names.chat_entry
    step = max(1, ENTRIES_AT_ONCE // (num_top + 1))
    for start in range(0, len(entries), step):
        if start:
            yield
        for entry in entries[start : start + step]:
            tops = []
            for token, logprob in entry.top[:num_top]:
                head, tail = entry_of(token)
                tops.append(b"%s%s%s}" % (head, _number(logprob), tail))
            head, tail = entry_of(entry.token)
            parts.append(b'%s%s%s,"top_logprobs":[%s]}' % (head, _number(entry.logprob), tail, b",".join(tops)))
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


class TextOffsets:
    """Where tokens begin in the text of one choice, as they come. A token within a character begins where that does;
    special tokens that are not shown have no width. `echo`: the prompt's text that comes first, of `num_echoed` tokens:
    what the tokenizer has put around it, or a space before it, is not in it."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool, echo: str = "", num_echoed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._table = tokenizer.bytes_table(skip_special=skip_special)
        self._echo = echo
        self._num_echoed = num_echoed
        self._decoder = _new_decoder("replace")
        self._offset = 0

    def push(self, token: int) -> int:
        """The next token's place."""
        if not self._num_echoed:
            return self._place(self._table[token])
        raw = self._tokenizer.token_bytes(token)
        if self._tokenizer.is_special(token) and not self._echo.startswith(
            raw.decode("utf-8", "replace"), self._offset
        ):
            raw = b""
        elif not self._offset and raw.startswith(b" ") and not self._echo.startswith(" "):
            raw = raw[1:]
        place = min(self._place(raw), len(self._echo))
        self._num_echoed -= 1
        if not self._num_echoed:
            self._offset = len(self._echo)
            self._decoder.reset()
        return place

    def _place(self, raw: bytes) -> int:
        place, (pending, _) = self._offset, self._decoder.getstate()
        first = self._decoder.decode(raw[:1]) if pending else ""
        if first and (len(first) > 1 or self._decoder.getstate()[0]):
            place += 1  # what was pending has become U+FFFD, and this begins behind it
        self._offset += len(first) + len(self._decoder.decode(raw[1:] if pending else raw))
        return place


def completion_logprobs(
    entries: Sequence[TokenLogprob | int], names: TokenNames, num_top: int, places: TextOffsets
) -> Work[msgspec.Raw]:
    """choices[].logprobs of completions. `places`: of the tokens, the first of which comes next. A bare int is a token
    that nothing predicts: the first of an echoed prompt. Two tokens may have one text: the second is "token_id:N"."""
    tokens: list[bytes] = []
    values: list[bytes] = []
    tops: list[bytes] = []
    offsets: list[int] = []
    name_of = names.json_key
    step = max(1, ENTRIES_AT_ONCE // (num_top + 1))
    for start in range(0, len(entries), step):
        if start:
            yield
        for entry in entries[start : start + step]:
            token = entry if isinstance(entry, int) else entry.token
            tokens.append(name_of(token))
            offsets.append(places.push(token))
            if isinstance(entry, int):
                values.append(b"null")
                tops.append(b"null")
                continue
            values.append(_number(entry.logprob))
            ranked = {token: values[-1]} | {other: _number(logprob) for other, logprob in entry.top[:num_top]}
            named: dict[bytes, bytes] = {}
            for other, value in ranked.items():
                name = name_of(other)
                named[name if name not in named else encode_json(f"token_id:{other}")] = value
            tops.append(b"{%s}" % b",".join([b"%s:%s" % pair for pair in named.items()]))
    shaped = b'{"tokens":[%s],"token_logprobs":[%s],"top_logprobs":[%s],"text_offset":%s}' % (
        b",".join(tokens), b",".join(values), b",".join(tops), encode_json(offsets),
    )  # fmt: skip
    return msgspec.Raw(shaped)


def prompt_logprobs(entries: Sequence[TokenLogprob], names: TokenNames, num_top: int) -> Work[msgspec.Raw]:
    """vLLM's prompt_logprobs: null for the first token, then for each one a map from token id to what is known."""
    parts = [b"null"]
    step = max(1, ENTRIES_AT_ONCE // (num_top + 1))
    for start in range(0, len(entries), step):
        if start:
            yield
        for entry in entries[start : start + step]:
            ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
            ranked = {entry.token: entry.logprob, **dict(entry.top[:num_top])}
            known = []
            for token, logprob in ranked.items():
                rank = entry.rank if token == entry.token else ranks[token]
                text = encode_json(names.text(token))
                line = b'"%d":{"logprob":%s,"rank":%d,"decoded_token":%s}'
                known.append(line % (token, _number(logprob), rank, text))
            parts.append(b"{%s}" % b",".join(known))
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def _number(logprob: float) -> bytes:
    return b"%r" % (logprob if _LEAST <= logprob < math.inf else _LEAST)

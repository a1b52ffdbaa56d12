"""How vLLM's /inference/v1/generate and SGLang's /generate tell what was generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...core.errors import TokenmillError
from ...core.step import TokenLogprob
from ...text.choice import Choice, Piece
from ..answer import Answer
from ..errors import describe
from ..json_encoder import encode_json
from ..logprobs import ENTRIES_AT_ONCE, chat_logprobs, prompt_logprobs
from ..openai.shape import DONE
from ..pieces import Work

_PREFIX, _END = b"data: ", b"\n\n"


class IdsShape:
    """vLLM's."""

    prefix = "generate-tokens-"
    media_type = "text/event-stream; charset=utf-8"

    def whole(self, answer: Answer, pieces: Sequence[Sequence[Piece]]) -> Work[bytes]:
        choices = []
        for choice in answer.choices:
            said = pieces[choice.index]
            entries = [entry for piece in said for entry in piece.logprobs]
            choices.append((yield from _ids_choice(answer, choice, said, entries)))
        body: dict[str, Any] = {"request_id": answer.id, "choices": choices, "prompt_logprobs": None}
        if answer.call.prompt_logprobs is not None:
            scores = answer.choices[0].prompt_logprobs
            body["prompt_logprobs"] = yield from prompt_logprobs(scores, answer.names, answer.call.prompt_logprobs)
        return encode_json(body | {"usage": answer.usage()})

    def chunks(self, answer: Answer) -> _Chunks:
        def event(choice: Choice, piece: Piece) -> Work[Any]:
            told = yield from _ids_choice(answer, choice, [piece], piece.logprobs)
            return {"request_id": answer.id, "choices": [told]}

        last = {"request_id": answer.id, "choices": [], "usage": answer.usage} if answer.call.include_usage else None
        return _Chunks(event, last)


def _ids_choice(
    answer: Answer, choice: Choice, pieces: Sequence[Piece], entries: Sequence[TokenLogprob]
) -> Work[dict[str, Any]]:
    num_top = answer.call.sampling.logprobs
    shaped = None if num_top is None else (yield from chat_logprobs(entries, answer.names, num_top))
    return {
        "index": choice.index,
        "logprobs": shaped,
        "finish_reason": pieces[-1].finish_reason,
        "token_ids": [token for piece in pieces for token in piece.tokens],
    }


class SGLangShape:
    """SGLang's: an object for each answer, a list where several prompts or answers were asked for. A stream tells all
    that was said so far, again and again."""

    prefix = "gen-"
    media_type = "text/event-stream; charset=utf-8"

    def whole(self, answer: Answer, pieces: Sequence[Sequence[Piece]]) -> Work[bytes]:
        bodies = []
        for choice in answer.choices:
            told = _Told(answer, choice)
            for piece in pieces[choice.index]:
                yield from told.add(piece)
            bodies.append(told.body())
            yield
        is_list = answer.call.extras["is_list"] or len(bodies) > 1
        return encode_json(bodies if is_list else bodies[0])

    def chunks(self, answer: Answer) -> _Chunks:
        told = _Told(answer, answer.choices[0])

        def event(choice: Choice, piece: Piece) -> Work[Any]:
            yield from told.add(piece)
            return told.body()

        return _Chunks(event, None)


class _Told:
    """What one choice has said so far. Its lists are kept as the JSON that they are, so that telling all again costs a
    copy of it and no more."""

    def __init__(self, answer: Answer, choice: Choice) -> None:
        self._answer = answer
        self._choice = choice
        self._text = ""
        self._ids, self._entries, self._tops = _GrowingList(), _GrowingList(), _GrowingList()
        self._last: Piece | None = None

    def add(self, piece: Piece) -> Work[None]:
        num_top = self._answer.call.sampling.logprobs
        self._text += piece.text
        self._ids.add(piece.tokens)
        for number, each in enumerate(piece.logprobs if num_top is not None else (), 1):
            self._entries.add([self._entry(each.token, each.logprob)])
            if num_top:
                self._tops.add([[self._entry(*pair) for pair in each.top[:num_top]]])
            if number * (1 + (num_top or 0)) % ENTRIES_AT_ONCE < 1 + (num_top or 0):
                yield
        self._last = piece

    def body(self) -> dict[str, Any]:
        answer, choice, last = self._answer, self._choice, self._last
        assert last is not None
        reason: dict[str, Any] | None = None
        if last.finish_reason == "length":
            reason = {"type": "length", "length": choice.num_tokens}
        elif last.finish_reason is not None:
            tokens = last.tokens
            matched = tokens[-1] if last.stop_reason is None and tokens else last.stop_reason
            reason = {"type": last.finish_reason, "matched": matched}
        meta: dict[str, Any] = {
            "id": answer.id,
            "finish_reason": reason,
            "prompt_tokens": len(answer.prompts[answer.prompt_of(choice)].tokens),
            "completion_tokens": choice.num_tokens,
            "cached_tokens": max(0, choice.num_cached),
        }
        if answer.call.sampling.logprobs is not None:
            meta["output_token_logprobs"] = self._entries.whole()
        if answer.call.sampling.logprobs:
            meta["output_top_logprobs"] = self._tops.whole()
        return {"text": self._text, "output_ids": self._ids.whole(), "meta_info": meta | last.warning}

    def _entry(self, token: int, logprob: float) -> list[Any]:
        return [logprob, token, self._answer.names.text(token) if self._answer.call.extras["with_text"] else None]


class _GrowingList:
    """A list as JSON."""

    def __init__(self) -> None:
        self._json = bytearray(b"[")

    def add(self, items: Sequence[Any]) -> None:
        if items:
            self._json += (b"," if len(self._json) > 1 else b"") + encode_json(items)[1:-1]

    def whole(self) -> msgspec.Raw:
        return msgspec.Raw(bytes(self._json) + b"]")


class _Chunks:
    """Server-sent events. `event`: the JSON of a piece; `last`: of a further one behind all, None: there is none."""

    is_plain = False

    def __init__(self, event: Callable[[Choice, Piece], Work[Any]], last: dict[str, Any] | None) -> None:
        self._event = event
        self._last = last

    def start(self) -> bytes:
        return b""

    def text(self, choice: Choice, piece: Piece) -> bytes:
        raise AssertionError("nothing here is plain text")

    def piece(self, choice: Choice, piece: Piece) -> Work[bytes]:
        if not (piece.tokens or piece.text or piece.finish_reason):
            return b""
        return _PREFIX + encode_json((yield from self._event(choice, piece))) + _END

    def end(self) -> bytes:
        if self._last is None:
            return DONE
        return _PREFIX + encode_json({**self._last, "usage": self._last["usage"]()}) + _END + DONE

    def failure(self, error: TokenmillError) -> bytes:
        return _PREFIX + encode_json(describe(error)) + _END

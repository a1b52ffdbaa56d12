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
from ..logprobs import chat_logprobs, prompt_logprobs
from ..pieces import Work
from ..replies import DONE

_encode = msgspec.json.Encoder().encode
_PREFIX, _END = b"data: ", b"\n\n"


class IdsShape:
    """vLLM's."""

    prefix = "generate-tokens"
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
        return _encode(body | {"usage": answer.usage()})

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

    prefix = "gen"
    media_type = "text/event-stream; charset=utf-8"

    def whole(self, answer: Answer, pieces: Sequence[Sequence[Piece]]) -> Work[bytes]:
        told = []
        for choice in answer.choices:
            told.append(_sglang_answer(answer, choice, pieces[choice.index]))
            yield
        is_list = answer.call.extras["is_list"] or len(told) > 1
        return _encode(told if is_list else told[0])

    def chunks(self, answer: Answer) -> _Chunks:
        said: list[Piece] = []

        def event(choice: Choice, piece: Piece) -> Work[Any]:
            said.append(piece)
            yield
            return _sglang_answer(answer, choice, said)

        return _Chunks(event, None)


def _sglang_answer(answer: Answer, choice: Choice, pieces: Sequence[Piece]) -> dict[str, Any]:
    call, last = answer.call, pieces[-1]
    reason: dict[str, Any] | None = None
    if last.finish_reason == "length":
        reason = {"type": "length", "length": choice.num_tokens}
    elif last.finish_reason is not None:
        tokens = last.tokens
        matched = tokens[-1] if last.stop_reason is None and tokens else last.stop_reason
        reason = {"type": last.finish_reason, "matched": matched}
    prompt = answer.prompt_of(choice)
    meta: dict[str, Any] = {
        "id": answer.id,
        "finish_reason": reason,
        "prompt_tokens": len(answer.prompts[prompt].tokens),
        "completion_tokens": choice.num_tokens,
        "cached_tokens": max(0, choice.num_cached),
    }
    if call.sampling.logprobs is not None:

        def entry(token: int, logprob: float) -> list[Any]:
            return [logprob, token, answer.names.text(token) if call.extras["with_text"] else None]

        entries = [each for piece in pieces for each in piece.logprobs]
        meta["output_token_logprobs"] = [entry(each.token, each.logprob) for each in entries]
        if call.sampling.logprobs:
            tops = [each.top[: call.sampling.logprobs] for each in entries]
            meta["output_top_logprobs"] = [[entry(*pair) for pair in top] for top in tops]
    return {
        "text": "".join(piece.text for piece in pieces),
        "output_ids": [token for piece in pieces for token in piece.tokens],
        "meta_info": meta,
    }


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
        return _PREFIX + _encode((yield from self._event(choice, piece))) + _END

    def end(self) -> bytes:
        if self._last is None:
            return DONE
        return _PREFIX + _encode({**self._last, "usage": self._last["usage"]()}) + _END + DONE

    def failure(self, error: TokenmillError) -> bytes:
        return _PREFIX + _encode(describe(error)) + _END

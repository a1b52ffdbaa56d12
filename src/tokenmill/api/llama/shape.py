"""llama-server's shape of answers: an object for each choice, or server-sent events with a last one that sums up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...core.errors import TokenmillError
from ...core.step import TokenLogprob
from ...text.choice import Choice, Piece
from ..answer import Answer
from ..errors import describe, llama_style
from ..json_encoder import encode_json
from ..llama_cpp import durations
from ..logprobs import ENTRIES_AT_ONCE, TokenNames
from ..pieces import Work
from .settings import settings

_PREFIX, _END = b"data: ", b"\n\n"
_NO_SLOT = -1


class LlamaShape:
    """A `Shape`. `now`: the clock of the requests' times."""

    prefix = "llama-"
    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    def whole(self, answer: Answer, pieces: Sequence[Sequence[Piece]]) -> Work[bytes]:
        events = Events(answer, self._now)
        bodies = []
        for choice in answer.choices:
            mine = [answer.shown(piece) for piece in pieces[choice.index]]
            tokens = [token for piece in mine for token in piece.tokens] if answer.call.extras["return_tokens"] else []
            entries = [entry for piece in mine for entry in piece.logprobs]
            text = "".join(piece.text for piece in mine)
            body = events.last(choice, mine[-1], text) | {"content": text, "tokens": tokens}
            bodies.append(events.chosen(body | (yield from events.probabilities(entries))))
            yield
        return encode_json(bodies if len(bodies) > 1 else bodies[0])

    def chunks(self, answer: Answer) -> Events:
        return Events(answer, self._now)


class Events:
    """The `Chunks` of one answer. Tokens whose text is not certain yet come with the text that completes it, or at the
    end."""

    def __init__(self, answer: Answer, now: Callable[[], float]) -> None:
        self._answer = answer
        self._now = now
        self._has_timings = bool(answer.call.extras["timings_per_token"])
        self._pending: list[list[int]] = [[] for _ in answer.choices]
        self._has_new_line = [False] * len(answer.choices)
        self._prompt_texts: dict[int, str] = {}
        self.is_plain = not (answer.call.sampling.logprobs is not None or self._has_timings or answer.call.score_only)

    def start(self) -> bytes:
        return b""

    def text(self, choice: Choice, piece: Piece) -> bytes:
        return self._event(self._part(choice, piece)) if self._take(choice, piece) else b""

    def piece(self, choice: Choice, piece: Piece) -> Work[bytes]:
        piece = self._answer.shown(piece)
        events = b""
        if self._take(choice, piece):
            probabilities = yield from self.probabilities(piece.logprobs)
            timings = {"timings": self._timings(choice)} if self._has_timings else {}
            events = self._event(self._part(choice, piece) | probabilities | timings)
        if piece.finish_reason is None:
            return events
        last = self.last(choice, piece, "") | {"tokens": self._pending[choice.index]}
        return events + self._event(self.chosen(last))

    def end(self) -> bytes:
        return b""

    def failure(self, error: TokenmillError) -> bytes:
        return self._event(describe(error, llama_style))

    def _take(self, choice: Choice, piece: Piece) -> bool:
        """Whether there is something to tell now."""
        self._pending[choice.index].extend(piece.tokens)
        self._has_new_line[choice.index] |= "\n" in piece.text
        return bool(piece.text or piece.logprobs)

    def _part(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        tokens, self._pending[choice.index] = self._pending[choice.index], []
        return {
            "index": choice.index,
            "content": piece.text,
            "tokens": tokens,
            "stop": False,
            "id_slot": _NO_SLOT,
            "tokens_predicted": choice.num_tokens,
            "tokens_evaluated": len(self._prompt(choice)),
        }

    def last(self, choice: Choice, piece: Piece, text: str) -> dict[str, Any]:
        """All that the end of a choice tells but what it said. `text`: of it, if it was not streamed."""
        call, request, prompt = self._answer.call, choice.request, self._prompt(choice)
        num_tokens = 0 if call.score_only else choice.num_tokens
        is_limit = piece.finish_reason == "length"
        is_word = not is_limit and isinstance(piece.stop_reason, str)
        given = call.sampling.max_tokens
        shown = settings(call.sampling, seed=request.seed, max_tokens=0 if call.score_only else given)
        return {
            "index": choice.index,
            "content": "",
            "tokens": [],
            "id_slot": _NO_SLOT,
            "stop": True,
            "model": self._answer.model,
            "tokens_predicted": num_tokens,
            "tokens_evaluated": len(prompt),
            "generation_settings": shown | {"stream": call.stream},
            "prompt": self._prompt_text(choice),
            "has_new_line": self._has_new_line[choice.index] or "\n" in text,
            "truncated": is_limit and not call.score_only and (given is None or num_tokens < given),
            "stop_type": "limit" if is_limit else "word" if is_word else "eos",
            "stopping_word": piece.stop_reason if is_word else "",
            "tokens_cached": choice.num_cached,
            "timings": self._timings(choice),
            **piece.warning,
        }

    def chosen(self, body: dict[str, Any]) -> dict[str, Any]:
        """The fields that the caller wants. "a/b" is field b of field a, and stands in the body as b."""
        wanted = self._answer.call.extras["response_fields"]
        if not wanted:
            return body
        found = {}
        for path in wanted:
            value: Any = body
            for name in path.split("/"):
                value = value.get(name, msgspec.UNSET) if isinstance(value, dict) else msgspec.UNSET
            if value is not msgspec.UNSET:
                found[path.rpartition("/")[2]] = value
        return found

    def probabilities(self, entries: Sequence[TokenLogprob]) -> Work[dict[str, Any]]:
        num_top = self._answer.call.sampling.logprobs
        if num_top is None or not entries:
            return {}
        found = []
        for number, entry in enumerate(entries, 1):
            named = _entry(self._answer.names, entry.token, entry.logprob)
            tops = [_entry(self._answer.names, token, logprob) for token, logprob in entry.top[:num_top]]
            found.append(named | {"top_logprobs": tops})
            if number * (1 + num_top) % ENTRIES_AT_ONCE < 1 + num_top:
                yield
        return {"completion_probabilities": found}

    def _prompt(self, choice: Choice) -> Sequence[int]:
        return self._answer.prompts[self._answer.prompt_of(choice)].tokens

    def _prompt_text(self, choice: Choice) -> str:
        """Decoded once for all choices of a prompt, which may be long."""
        number = self._answer.prompt_of(choice)
        if number not in self._prompt_texts:
            self._prompt_texts[number] = choice.tokenizer.decode(self._prompt(choice), skip_special=False)
        return self._prompt_texts[number]

    def _timings(self, choice: Choice) -> dict[str, float]:
        took = durations(choice, self._now())
        num_prompt = len(self._prompt(choice)) - choice.num_cached
        return (
            {"cache_n": choice.num_cached}
            | _rates("prompt", num_prompt, took.prompt_s)
            | _rates("predicted", choice.num_tokens, took.output_s)
        )

    def _event(self, body: dict[str, Any]) -> bytes:
        return _PREFIX + encode_json(body) + _END


def _rates(what: str, number: int, seconds: float) -> dict[str, float]:
    return {
        f"{what}_n": number,
        f"{what}_ms": seconds * 1e3,
        f"{what}_per_token_ms": seconds * 1e3 / number if number else 0.0,
        f"{what}_per_second": number / seconds if seconds > 0 else 0.0,
    }


def _entry(names: TokenNames, token: int, logprob: float) -> dict[str, Any]:
    raw = names.raw(token)
    shown = max(logprob, -9999.0)
    return {"id": token, "token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": shown}

"""From prompts and settings to engine requests, and the same for vectors: what the server and `LLM` do alike.

What was left open is resolved here: how many tokens fit, the seed, and the tokens of words that must not be written
(vLLM's `bad_words`) or over which DRY sees no repetition (`dry_sequence_breakers`). Pure: what is encoded, rendered or
sent is up to the callers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.errors import ContextTooLong, InvalidRequest
from ..core.events import Ready
from ..core.request import PoolingParams, Request, SamplingParams
from ..core.sampling import CHAT_TOKENS
from ..core.terms import USUAL, Terms
from .text_model import TextModel
from .tokenizer import Tokenizer

Input = tuple[Sequence[int], int]
"""Token ids, and where the second text of a pair begins in them, or 0."""

NO_BOUND = 2**31 - 1

_MASK64 = 2**64 - 1
_NO_SAMPLING = SamplingParams(max_tokens=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCall:
    """What the requests of one call have in common.

    default_max_tokens  what is produced where sampling.max_tokens is None; None: what the context has room for
    adapter             digest, "" for none
    terms, handoff, bad_words, dry_breakers, prediction  as Request has them
    fits_room           an answer that the context has no room for is cut there, not refused
    prompt_field        what the caller calls a prompt, and limit_field what gave max_tokens, for messages
    """

    sampling: SamplingParams
    default_max_tokens: int | None = None
    priority: int = 0
    terms: Terms = USUAL
    cache_salt: str = ""
    adapter: str = ""
    handoff: str = ""
    bad_words: tuple[tuple[int, ...], ...] = ()
    dry_breakers: tuple[int, ...] = ()
    prediction: tuple[int, ...] = ()
    fits_room: bool = False
    prompt_field: str = "prompt"
    limit_field: str = "max_tokens"


def default_max_tokens(defaults: Mapping[str, Any], usual: int | None) -> int | None:
    """Most tokens of an answer whose caller names no number; None: what the context has room for. The operator's or
    model's `max_tokens` among the defaults comes first; None there takes the bound from what has no usual number.
    usual: of the endpoint, or None."""
    given = defaults.get("max_tokens", CHAT_TOKENS if usual is None else usual)
    return usual if given is None else given


def context_limit(ready: Ready) -> int:
    """Most tokens, prompt and output together, that one request of this engine may have."""
    return ready.max_model_len


def make_requests(
    call: TextCall,
    prompts: Iterable[tuple[int, ...]],
    ready: Ready,
    *,
    root_id: str,
    arrival_s: float,
    new_seed: Callable[[], int],
) -> list[Request]:
    """One request per choice, prompt by prompt. Raises ContextTooLong, and InvalidRequest for a prompt without tokens.

    Without a seed each prompt gets its own, so that equal prompts may differ; with one, equal prompts give equal
    answers. The choices of one prompt share its seed and differ by their index.
    """
    require_tokens(ready)
    requests: list[Request] = []
    samplings: dict[int, SamplingParams] = {}  # by max_tokens: what many choices ask for alike is held once
    for tokens in prompts:
        max_tokens = _max_tokens(call, len(tokens), context_limit(ready))
        sampling = samplings.get(max_tokens)
        if sampling is None:
            sampling = samplings[max_tokens] = replace(call.sampling, max_tokens=max_tokens)
        seed = new_seed() if sampling.seed is None else sampling.seed & _MASK64
        for choice in range(sampling.n):
            requests.append(
                Request(
                    id=f"{root_id}-{len(requests)}",
                    prompt_tokens=tokens,
                    sampling=sampling,
                    max_tokens=max_tokens,
                    seed=seed,
                    choice=choice,
                    eos_token_ids=ready.eos_token_ids,
                    priority=call.priority,
                    terms=call.terms,
                    cache_salt=call.cache_salt,
                    adapter=call.adapter,
                    handoff=call.handoff,
                    arrival_s=arrival_s,
                    bad_words=call.bad_words,
                    dry_breakers=call.dry_breakers,
                    prediction=call.prediction,
                )
            )
    return requests


def _max_tokens(call: TextCall, num_prompt: int, limit: int) -> int:
    """What the caller asked for, which must fit; else the default, cut to what fits."""
    room = limit - num_prompt
    if not num_prompt:
        raise InvalidRequest(f"{call.prompt_field} must give at least one token.", param=call.prompt_field)
    if room < 1:
        raise ContextTooLong(
            f"This model's context is {limit} tokens, but {call.prompt_field} has {num_prompt}; at most {limit - 1} "
            "leave room for an answer.",
            param=call.prompt_field,
        )
    wanted = call.sampling.max_tokens
    if wanted is None:
        default = room if call.default_max_tokens is None else call.default_max_tokens
        return min(max(default, call.sampling.min_tokens), room)
    if wanted > room and not call.fits_room:
        raise ContextTooLong(
            f"This model's context is {limit} tokens; {call.prompt_field} has {num_prompt} and {call.limit_field} is "
            f"{wanted}. Ask for at most {room}.",
            param=call.limit_field,
        )
    return min(wanted, room)


def require_tokens(ready: Ready) -> None:
    """Raises InvalidRequest where the model gives vectors."""
    if ready.pooling is not None:
        gives = "scores: use /v1/score or /v1/rerank" if ready.pooling.how == "score" else "vectors: use /v1/embeddings"
        raise InvalidRequest(f"The model {ready.model!r} generates no text. It gives {gives}.", param="model")


def require_vectors(ready: Ready, *, scores: bool = False) -> PoolingParams:
    """How the model pools. Raises InvalidRequest where it gives tokens, or scores where vectors are wanted."""
    if ready.pooling is None:
        raise InvalidRequest(
            f"The model {ready.model!r} is served to generate text. To have vectors of it, serve it with "
            "--runner pooling.",
            param="model",
        )
    if ready.pooling.how == "score" and not scores:
        raise InvalidRequest(
            f"The model {ready.model!r} scores pairs and gives no vectors: use /v1/score or /v1/rerank.", param="model"
        )
    return ready.pooling


def make_pooling_requests(
    inputs: Iterable[Input],
    params: PoolingParams,
    ready: Ready,
    *,
    root_id: str,
    arrival_s: float,
    priority: int = 0,
    terms: Terms = USUAL,
    cache_salt: str = "",
    name_of: Callable[[int], str] = "input[{}]".format,
) -> list[Request]:
    """One request for each input. `name_of`: what the caller calls an input, by its number: a field, or a place in one.
    Raises ContextTooLong, and InvalidRequest for an input without tokens."""
    limit = context_limit(ready)
    requests: list[Request] = []
    for number, (tokens, second_from) in enumerate(inputs):
        name = name_of(number)
        if not tokens:
            raise InvalidRequest(f"{name} gives no token.", param=name.partition("[")[0])
        if len(tokens) > limit:
            raise ContextTooLong(
                f"{name} has {len(tokens)} tokens, but this model takes {limit}. Shorten it, or have it cut by "
                "truncate_prompt_tokens.",
                param=name.partition("[")[0],
            )
        requests.append(
            Request(
                id=f"{root_id}-{number}",
                prompt_tokens=tuple(tokens),
                sampling=_NO_SAMPLING,
                max_tokens=1,
                seed=0,
                priority=priority,
                terms=terms,
                cache_salt=cache_salt,
                arrival_s=arrival_s,
                pooling=replace(params, second_from=second_from),
            )
        )
    return requests


def with_prompt(text: TextModel, name: str | None, inputs: Sequence[str | Sequence[int]]) -> list[str | Sequence[int]]:
    """The texts behind the model's prompt of that name, or behind its default one. Token ids are taken as they are."""
    if name is not None and name not in text.prompts:
        known = f"has the prompts {', '.join(text.prompts)}" if text.prompts else "has no prompts"
        raise InvalidRequest(f"prompt_name is {name[:100]!r}, but this model {known}.", param="prompt_name")
    chosen = text.default_prompt if name is None else name
    prompt = text.prompts[chosen] if chosen else ""
    return [prompt + given if isinstance(given, str) else given for given in inputs]


def pair_messages(text: TextModel, first: str, second: str) -> tuple[dict[str, str], ...]:
    """What a chat template that is made for pairs gets of one, with the model's default prompt if it has one."""
    prompt = text.prompts[text.default_prompt] if text.default_prompt else ""
    messages = (("system", prompt), ("query", first), ("document", second))
    return tuple({"role": role, "content": content} for role, content in messages if content or role != "system")


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelled at the beginning of a text, and, where that is another token sequence of the same
    length, in the middle of one, behind a space. Other ways to spell a word remain. Raises InvalidRequest."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        first, spaced = (tuple(tokenizer.encode(text, add_special=False, shared=False)) for text in (bare, f" {bare}"))
        if not bare or not first:
            raise InvalidRequest(f"bad_words holds {word!r}, which is no word.", param="bad_words")
        found[first] = None
        if len(spaced) == len(first) and spaced[0] != first[0]:
            found[spaced] = None
    return tuple(found)


def breaker_ids(tokenizer: Tokenizer, sampling: SamplingParams) -> tuple[int, ...]:
    """The last token of each text as it is spelled after a letter, as text-generation-webui takes them; none where DRY
    is off."""
    if not sampling.dry_multiplier:
        return ()
    spelled = (tokenizer.encode(f"a{text}", add_special=False, shared=False) for text in sampling.dry_sequence_breakers)
    return tuple(sorted({ids[-1] for ids in spelled}))

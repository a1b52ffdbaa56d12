"""What a client asks for: `SamplingParams` (how to draw: core/sampling.py) or `PoolingParams` (which vector), and
`Request` (one choice of one prompt).

A request never changes after admission. Everything random or defaulted (seed, token limit, stop ids) is resolved before
a `Request` is made, so that the same Request gives the same tokens on any engine, whenever it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from .embeds import Embeds, check_embeds
from .moves import KVSource
from .sampling import SamplingParams as SamplingParams
from .terms import USUAL, Terms

DRAW_VERSION = 3
"""What a seed means: processes whose versions differ draw different tokens. 2: an exponential race over token ids.
3: upper bytes of words have blocks of their own."""

EXPORT = "export"
IMPORT = "import"
IDLE_PRIORITY = 2**31 - 1
"""The lowest there is. The engine computes such a request only in steps that it would not make otherwise."""

POOLINGS = ("last", "cls", "mean", "score")


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Which vector a pooling request wants instead of tokens.

    how          "last", "cls" (the first token) or "mean": that of the prompt's last hidden states; "score": what the
                 model's classifier says of the first
    dimensions   keep the first so many values; 0: all
    activation   then: "unit" scales the vector to length 1, "sigmoid" maps each value; "" leaves it
    second_from  where the second text of a pair begins in the prompt; 0: there is one text
    """

    how: str
    dimensions: int = 0
    activation: str = ""
    second_from: int = 0

    def __post_init__(self) -> None:
        assert self.how in POOLINGS, self.how
        assert self.activation in ("", "unit", "sigmoid"), self.activation

    @property
    def needs_all(self) -> bool:
        """Whether positions are needed that a prefix hit would not compute."""
        return self.how != "last"


@dataclass(frozen=True, slots=True)
class Request:
    """One choice of one prompt, fully resolved. `n` choices are `n` requests that differ in `id` and `choice`. A
    pooling request has one output, which is a vector instead of a token: its max_tokens is 1, its sampling unused.

    prompt_tokens   ids of the prompt, at least one
    max_tokens      most tokens to produce, counted from the original prompt
    seed            64-bit; random words of token ids are made of it, the output position and the choice
    eos_token_ids   the model's end tokens: held back until min_tokens; `end_token_ids` are those that end it
    output_tokens   already produced elsewhere (a resumed stream): limits, penalties and positions count them
    attempt         how often it was given to an engine before; outputs carry it, and those of others are dropped
    is_resumed      another engine had it before: it was let in then, and no bound on a queue keeps it out now
    priority        lower runs earlier, within one class; ties go by arrival
    terms           on whose account it is served, in which class, by when
    cache_salt      requests share cached KV only within one salt
    adapter         digest of the LoRA adapter ("" = base model), never its name
    bad_words       token sequences that must not be produced: the last token of one is never drawn after the others
    handoff         EXPORT: its KV is put in the engine's store before its last output is sent, for other engines to go
                    on from it; IMPORT: another engine has put KV of its prompt there; "": neither
    source          where KV of its tokens can be had; it runs once it is told to go on (core.moves)
    yields          ticket under which its KV is offered: it stops after its first new token, to go on elsewhere
    dry_breakers    tokens over which DRY sees no repetition, in rising order
    session         what its client calls the conversation that it belongs to; "": nothing
    keys            keys of the prompt's full blocks, joined (kv.blocks.hashing); b"": nobody has made them
    arrival_s       when the front end admitted it, on the monotonic clock of whoever holds the request
    pooling         the vector it wants; None: it wants tokens
    prediction      tokens that its caller expects the output to have: they are drafted (core/speculation.py)
    embeds          inputs that are not token ids, in order; `prompt_tokens` have placeholders in their places
    """

    id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    seed: int
    choice: int = 0
    eos_token_ids: tuple[int, ...] = ()
    output_tokens: tuple[int, ...] = ()
    is_resumed: bool = False
    priority: int = 0
    terms: Terms = USUAL
    cache_salt: str = ""
    adapter: str = ""
    arrival_s: float = 0.0
    pooling: PoolingParams | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    dry_breakers: tuple[int, ...] = ()
    handoff: str = ""
    attempt: int = 0
    source: KVSource | None = None
    yields: str = ""
    session: str = ""
    keys: bytes = b""
    embeds: tuple[Embeds, ...] = ()
    prediction: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.handoff in ("", EXPORT, IMPORT), self.handoff
        assert self.prompt_tokens, f"request {self.id} has no prompt tokens"
        assert self.max_tokens >= 1, f"request {self.id} has max_tokens {self.max_tokens}"
        assert self.pooling is None or self.max_tokens == 1, f"request {self.id} wants {self.max_tokens} vectors"
        check_embeds(self.embeds, len(self.prompt_tokens))

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """None where they are ignored; but what has a grammar ends where the grammar allows nothing more."""
        return () if self.sampling.ignore_eos and not self.sampling.grammar else self.eos_token_ids

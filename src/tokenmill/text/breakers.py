"""The tokens over which DRY sees no repetition, from the texts that requests give (`dry_sequence_breakers`)."""

from __future__ import annotations

from ..core.request import SamplingParams
from .tokenizer import Tokenizer


def breaker_ids(tokenizer: Tokenizer, sampling: SamplingParams) -> tuple[int, ...]:
    """The last token of each text as it is spelled after a letter, as text-generation-webui takes them; none where DRY
    is off."""
    if not sampling.dry_multiplier:
        return ()
    spelled = (tokenizer.encode(f"a{text}", add_special=False, shared=False) for text in sampling.dry_sequence_breakers)
    return tuple(sorted({ids[-1] for ids in spelled}))

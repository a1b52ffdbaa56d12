"""What is set of speculative decoding: who drafts, and how much at most.

A draft is accepted only where it equals what is drawn in its place, so nothing of this can change a token
(docs/operate/speculation.md). It changes in how many steps an answer is made. How many tokens are drafted in a step, up
to what is set here, is decided by `engine/speculation.py`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple

from .errors import ConfigError

NGRAM = "ngram"
SUFFIX = "suffix"
DRAFT_MODEL = "draft_model"
EAGLE3 = "eagle3"
MEDUSA = "medusa"
MTP = "mtp"
METHODS = (NGRAM, SUFFIX, DRAFT_MODEL, EAGLE3, MEDUSA, MTP)
"""Drafters, by vLLM's names."""

BY_MODEL = (DRAFT_MODEL, EAGLE3, MEDUSA, MTP)
"""Those that compute: a server has one of them at most."""

BY_FILE = (DRAFT_MODEL, EAGLE3, MEDUSA)
"""Those that are in a file of their own."""

CORPUS = "corpus"
"""What drafts of `suffix` are called that come of a corpus."""

PREDICTION = "prediction"
"""The drafter of a request that says what it expects, beside those that are configured."""

NO_METRICS, SUMMARY, DETAILED = "none", "summary", "detailed"
"""What an answer tells of its drafts."""

MOST_SPECULATIVE_TOKENS = 64

MOST_CORPORA = 16
"""Each is looked up for each token."""

MOST_DRAFTS = 64
"""Verified in a step, of all sequences together: a worker has room for their logits beside those of a token of each
sequence."""


MOST_DRAFT_STATES = 16
"""Verified in a step of a model with states: behind each draft one is kept, to go on from if the next is wrong."""


class DraftStats(NamedTuple):
    """By what the number of drafts is chosen.

    speedup     tokens a second as a multiple of those without drafts, as expected lately
    sources     of each drafter: its name, the share of its tokens that were right lately, and how many of them the
                latest step verifies
    step_costs  what a step of the latest size takes with 1, 2, 4, ... drafts, as a multiple of one without
    """

    speedup: float
    sources: tuple[tuple[str, float, int], ...] = ()
    step_costs: tuple[float, ...] = ()


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("num_speculative_tokens", 1, MOST_SPECULATIVE_TOKENS),
    ("prompt_lookup_max", 1, 64),
    ("prompt_lookup_min", 1, 64),
    ("suffix_decoding_max_tree_depth", 2, 256),
    ("suffix_decoding_max_cached_requests", 0, 1_000_000),
    ("suffix_decoding_max_spec_factor", 0.0, 64.0),
    ("suffix_decoding_min_token_prob", 0.0, 1.0),
    ("n_min", 0, MOST_SPECULATIVE_TOKENS),
    ("p_min", 0.0, 1.0),
)
"""Name, least and most; where both are floats, so may the value be."""


@dataclass(frozen=True, slots=True)
class CorpusConfig:
    """path: of an index (formats/corpus_index.py). tenants: whose requests are drafted from it, by id; None: all, those
    without a tenant, too."""

    path: str
    tenants: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """The fields are called as in vLLM's --speculative-config; n_min and p_min as in a request (core/terms.py). Raises
    ConfigError.

    methods                  drafters, by their names in METHODS
    num_speculative_tokens   most tokens drafted for one sequence in one step
    prompt_lookup_max, _min  ngram: tokens of the longest and of the shortest end of a text that is looked for earlier
                             in it (prompt lookup, also in arXiv 2304.04487)
    suffix_decoding_max_tree_depth       suffix (SuffixDecoding, arXiv 2411.04975): tokens of the longest match
    suffix_decoding_max_cached_requests  outputs of ended requests that are kept, as far as there is room; 0: only a
                                         request's own text is looked at
    suffix_decoding_max_spec_factor      most tokens drafted for each that matches
    suffix_decoding_min_token_prob       least chance that a draft is right to its end, by how often each token followed
    n_min                    where fewer tokens than this are worth it, none is drafted
    p_min                    nor is a token drafted that is right with a probability below this
    adaptive                 False: as many are verified as are drafted and there is room for, whatever it costs
    model                    of those of BY_FILE: its name or path
    quantization             what its dense matrices become at load, as kernels call it; "": they stay as stored
    corpora                  suffix: texts that are looked at, too
    suffix_decoding_store    suffix: file that keeps outputs of ended requests across restarts; "": none does
    """

    methods: tuple[str, ...] = (SUFFIX,)
    num_speculative_tokens: int = 24
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    n_min: int = 0
    p_min: float = 0.0
    adaptive: bool = True
    model: str = ""
    quantization: str = ""
    corpora: tuple[CorpusConfig, ...] = ()
    suffix_decoding_store: str = ""

    def __post_init__(self) -> None:
        if len(both := [name for name in self.methods if name in BY_MODEL]) > 1:
            raise wrong("method", f"one of {', '.join(BY_MODEL)} at most", ", ".join(both))
        if not self.methods or len(set(self.methods)) < len(self.methods) or not set(self.methods) <= set(METHODS):
            raise wrong("method", f"one or several of {', '.join(METHODS)}", ", ".join(self.methods) or "none")
        if self.corpora and SUFFIX not in self.methods:
            raise wrong("method", f"{SUFFIX}, or several with it, where there are corpora", ", ".join(self.methods))
        if self.suffix_decoding_store and (SUFFIX not in self.methods or not self.suffix_decoding_max_cached_requests):
            wanted = f"left out where {SUFFIX} does not draft, or from no earlier answers"
            raise wrong("suffix_decoding_store", wanted, self.suffix_decoding_store)
        if len(self.corpora) > MOST_CORPORA:
            raise wrong("corpora", f"{MOST_CORPORA} at most", len(self.corpora))
        for name, least, most in _RANGES:
            value = getattr(self, name)
            kinds, said = ((int, float), "a number") if isinstance(least, float) else ((int,), "an integer")
            if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
                raise wrong(name, f"{said} from {least:g} to {most:g}", value)
        if not isinstance(self.adaptive, bool):
            raise wrong("adaptive", "true or false", self.adaptive)
        for name, bound in (("prompt_lookup_min", "prompt_lookup_max"), ("n_min", "num_speculative_tokens")):
            least, most = getattr(self, name), getattr(self, bound)
            if least > most:
                raise wrong(name, f"at most {bound} ({most})", least)

    def corpora_for(self, tenant: str) -> tuple[int, ...]:
        """The indices of those that its requests are drafted from."""
        return tuple(index for index, each in enumerate(self.corpora) if each.tenants is None or tenant in each.tenants)


def draft_scope(tenant: str, salt: str) -> str:
    """Of whose outputs a request may have drafts: two digests, of the tenant (`tenant_digest`) and of both, by which
    two pairs can be told apart and nothing else be known of them; "": of callers without either."""
    if not tenant and not salt:
        return ""
    return f"{tenant_digest(tenant)}.{_digest(f'{len(tenant)}:{tenant}{salt}')}"


def tenant_digest(tenant: str) -> str:
    """With what all its scopes begin."""
    return _digest(tenant)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf8", "surrogatepass")).hexdigest()[:32]


def wrong(name: str, wanted: str, value: Any) -> ConfigError:
    return ConfigError(f"{name} of speculative_config must be {wanted}, got {value!r}.", param="speculative_config")

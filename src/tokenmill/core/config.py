"""Frozen settings that several rooms share, and the check that the settings of every room use."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .block import CROSS, STATE, KVGroupSpec
from .errors import ConfigError
from .speculation import MOST_DRAFT_STATES, MOST_DRAFTS, SpeculationConfig

# A policy that somebody has written, under the name by which policies are chosen.
#
# Settings name policies: text, which can be compared, printed and sent. `OwnPolicy` is such a name that brings its
# policy along, so whoever looks a policy up by name takes this one as it is. `node.policy_file` makes them.


class Kind(NamedTuple):
    """name      of the choice that such policies make
    protocol  what they look like
    offered   names of what a new one may be given
    """

    name: str
    protocol: type
    offered: tuple[str, ...] = ()


class OwnPolicy(str):
    """FILE.py:NAME, or the name of a plug-in.

    make  a new policy, of what is offered to its kind, by name
    file  that its code is in; "": not known
    """

    __slots__ = ("file", "make")
    make: Callable[..., Any]
    file: str

    def __new__(cls, name: str, make: Callable[..., Any], file: str = "") -> OwnPolicy:
        self = super().__new__(cls, name)
        self.make, self.file = make, file
        return self

    def __copy__(self) -> OwnPolicy:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnPolicy:
        return self


BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 576
STEPS_IN_FLIGHT = 2
"""One runs while the next is planned."""

QUANTIZATIONS = {name: name for name in ("q8_0", "q4_0", "q4_1", "f16", "bf16")} | {"q8": "q8_0", "q4": "q4_1"}
"""As asked -> as the kernels call it."""

SCHEDULING_POLICY = "short-prompts-first"
EVICTION_POLICY = "lru"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one engine batches and caches.

    groups                  the KV groups, in the order of a sequence's block tables. Without a block in them no KV is
                            kept, and each prompt runs whole in one step
    block_size              token slots per KV block
    max_model_len           most tokens (prompt + output) one sequence may have
    max_num_seqs            most sequences running at once
    max_num_batched_tokens  most tokens of a step
    max_num_waiting         most requests queued; further ones are refused as overload
    enable_prefix_caching   share KV of equal prefixes
    steps_in_flight         steps that may be planned before the oldest is committed
    numerics_id             weights digest, KV dtype and layout, kernel family: part of every block key
    scheduling_policy         order of service, by name (sched.policies)
    eviction_policy         which cached block is given up first, by name (kv.blocks.eviction)
    chosen_experts          the share of a layer's experts that a token chooses; 0: the model has none
    encoder                 the group of what an encoder makes of a request's contents; None: nothing of that is kept
    speculation             who drafts tokens, and how many at most; None: nothing is drafted
    """

    groups: tuple[KVGroupSpec, ...]
    max_model_len: int
    block_size: int = BLOCK_SIZE
    max_num_seqs: int = MAX_NUM_SEQS
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    max_num_waiting: int = 4096
    enable_prefix_caching: bool = True
    steps_in_flight: int = STEPS_IN_FLIGHT
    numerics_id: str = "toy"
    scheduling_policy: str = SCHEDULING_POLICY
    eviction_policy: str = EVICTION_POLICY
    chosen_experts: float = 0.0
    encoder: KVGroupSpec | None = None
    speculation: SpeculationConfig | None = None

    def __post_init__(self) -> None:
        assert all(group.kind != CROSS for group in self.groups), self.groups
        assert self.encoder is None or self.encoder.kind == CROSS, self.encoder
        if self.speculation is not None and not self.keeps_kv:
            raise ConfigError(
                "Nothing can be drafted for this model: it sees a whole input in one step.", param="speculative_config"
            )
        for group in self.groups:
            low = 1 if group.window else 0
            if group.num_blocks < low:
                raise ConfigError(f"num_blocks must be at least {low}, got {group.num_blocks}.", param="num_blocks")
        for name, low in (
            ("max_model_len", 1),
            ("block_size", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_num_waiting", 1),
            ("steps_in_flight", 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < low:
                raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}.", param=name)

    @property
    def keeps_kv(self) -> bool:
        return any(group.num_blocks for group in self.groups)

    @property
    def most_drafts(self) -> int:
        """Drafts that a step verifies at most, of all sequences together."""
        if self.speculation is None:
            return 0
        return MOST_DRAFT_STATES if any(group.kind == STATE for group in self.groups) else MOST_DRAFTS

    def pool_blocks(self, group: KVGroupSpec) -> int:
        """Blocks in the group's pool: those that are handed out, and of states one behind each draft of a step."""
        return group.num_blocks + (self.most_drafts if group.kind == STATE else 0)

    @property
    def caches_prefixes(self) -> bool:
        """Without KV there is nothing to share."""
        return self.enable_prefix_caching and self.keeps_kv


def most_drafted(config: EngineConfig) -> int:
    """Tokens, for a request in a step; 0: none."""
    return 0 if config.speculation is None else config.speculation.num_speculative_tokens


def check_keys(given: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raise ConfigError for the first key of `given` that `known` lacks, naming the nearest known key."""
    known = sorted(known)
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(known)}."
            raise ConfigError(f"Unknown key {key!r} in {where}.{hint}", param=key)


def check_name(name: Any, known: Iterable[Any], param: str, shown: str = "") -> None:
    """Raise ConfigError if `known` lacks `name`, naming the nearest. shown: what the user calls `param`.
    An OwnPolicy has the name that its file or plug-in gives it."""
    listed = list(known)
    if name not in listed and not isinstance(name, OwnPolicy):
        names = [str(each) for each in listed]
        near = difflib.get_close_matches(str(name), names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{shown or param} must be one of {', '.join(names)}, got {name!r}.{hint}", param=param)

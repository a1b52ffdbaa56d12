"""What moves a request, or KV alone, from one engine to another: messages, jobs, and where KV can be had.

    front end      source                                destination
    Offer     ->   its committed blocks, as they grow
    Submit    ->                                         LOADING (`Request.source`): pulls them, block by block
              <-                                         Staged
    Yield     ->   ends with FINISH_MOVED
    Continue  ->                                         pulls the rest, and runs: Moved
    Release   ->   gives its blocks back

With `Request.yields` the source stops by itself after its first new token: a prefill engine and a decode engine are a
move that begins with the request. A fetch from a peer's cache is an Offer of keys, a Submit and a Continue without
tokens. Whatever fails, the destination computes what it did not get. A request with a source runs only after its
Continue, also where nothing can be pulled, because until then its tokens are drawn elsewhere.

Staged copies while the source goes on, then a last one and the switch: Llumnix (Sun et al., 2024). Two pools of engines
for prefill and decode: DistServe (Zhong et al., 2024), Splitwise (Patel et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .block import BlockKey


class KVSource(NamedTuple):
    """Where KV can be had.

    worker       id of the worker
    incarnation  of that life of it; another one has nothing under the ticket
    address      where it serves KV to others
    host         equal host: its memory may be read
    ticket       random; the first that comes with it is the only one
    """

    worker: str
    incarnation: str
    address: str
    host: str
    ticket: str


# ---- front end -> engine ----


@dataclass(frozen=True, slots=True)
class Offer:
    """Let a peer with this ticket have KV: of the running request `request_id`, its committed blocks as they grow; or,
    where that is "", the published blocks with these `keys`, the leading ones of one prefix."""

    ticket: str
    request_id: str = ""
    keys: tuple[BlockKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Yield:
    """Stop the request and keep its KV offered. Draws in flight are committed first, and told as usual; its last output
    has FINISH_MOVED. One that has ended before ends as it did."""

    ticket: str
    request_id: str
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Continue:
    """To the destination: `tokens` came since the request was submitted, and no more will. Pull what is missing, and
    run. The answer is `Moved`."""

    request_id: str
    attempt: int = 0
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Release:
    """The offer is over; also where it is unknown."""

    ticket: str


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Pull the blocks with these keys, the leading ones of one prefix, into the prefix cache; without a source, from
    the tiers of the engine's store. The answer is `Prefetched` with the same `number`."""

    number: int
    keys: tuple[BlockKey, ...]
    source: KVSource | None = None


# ---- engine -> front end ----


@dataclass(frozen=True, slots=True)
class Staged:
    """The destination has KV of `num_tokens` leading tokens, all that was committed when it asked, and waits for
    Continue."""

    request_id: str
    attempt: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Moved:
    """The destination runs the request, with KV of `num_tokens` tokens that it need not compute; the others, all where
    that is 0, are computed. Where it is told before Continue, nothing (more) can be had, for the reason in `error`, and
    the request stays there until Continue or Abort comes."""

    request_id: str
    attempt: int
    num_tokens: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Prefetched:
    """`num_blocks` leading blocks of those asked for are in the prefix cache."""

    number: int
    num_blocks: int
    error: str = ""


# ---- jobs ----


@dataclass(frozen=True, slots=True)
class PullBlocks:
    """Fill these reserved blocks, of each KV group from block `start` of the prefix on, with KV from `source`; -1
    stands where none is wanted. Nobody reads or writes them before the job has ended. It ends once some full blocks are
    in, or with `is_final` once the source has said that no more will come, with all that fits. The result is a `Pulled`
    as JSON; if it fails, the blocks may hold anything."""

    number: int
    source: KVSource
    start: int
    blocks: tuple[tuple[int, ...], ...]
    is_final: bool = False


class Pulled(NamedTuple):
    """num_tokens  leading tokens of the prefix whose KV is in, counted from 0
    num_there   tokens whose KV was committed at the source when it was asked
    is_last     no more will be
    holes       (group, block of the prefix) that was wanted and that the source does not hold any more
    """

    num_tokens: int
    num_there: int
    is_last: bool
    holes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """Let the peer with this ticket have these pinned blocks (group, block of the prefix, id), beside those that were
    sent before: KV of `num_tokens` tokens in all, where a last block that is not full counts only with `is_last`.
    Nobody writes them before the job has ended: when the peer has said that it has them (at once, if there are none and
    more will come), or, with an error, after EndMove or when the peer was silent for too long."""

    number: int
    ticket: str
    moves: tuple[tuple[int, int, int], ...]
    num_tokens: int
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class EndMove:
    """End what goes on under this ticket, sending or pulling; those jobs end soon, with an error."""

    ticket: str

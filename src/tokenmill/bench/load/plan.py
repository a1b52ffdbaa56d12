"""What is to be sent, and when: calls made of parts that are drawn from a seed, quoted, or answered by an earlier call.

A plan is pure data. Calls depend on one another only through `after`: a call with none is a root and is due
`delay_s` after the start (open loop) or when a slot is free (closed loop); any other is due `delay_s` after the last
of the calls it names has ended, which is how conversations, think time and forks are all said. Content is named, not
stored: parts of equal key are equal text, and the longer of two has the shorter as its beginning.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Drawn:
    """num_tokens tokens of text that only the key and the seed decide."""

    key: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Literal:
    text: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What call `index` answered; or, where replies are scripted, num_tokens drawn tokens in its place."""

    index: int
    num_tokens: int


Part = Drawn | Literal | Reply


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Call:
    index: int
    messages: tuple[Message, ...]
    output_tokens: int
    after: tuple[int, ...] = ()
    delay_s: float = 0.0
    session: str = ""
    turn: int = 0
    tenant: str = ""
    group: str = ""

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for message in self.messages for part in message.parts)

    @property
    def input_tokens(self) -> int | None:
        """Tokens of the prompt, template aside; None where text is quoted and nobody has counted it."""
        total = 0
        for part in self.parts:
            if isinstance(part, Literal):
                return None
            total += part.num_tokens
        return total


@dataclass(frozen=True, slots=True)
class Plan:
    """calls[i].index == i and calls only name earlier ones. `facts`: the dataset, for the result. `has_times`: the
    roots' delay_s are the dataset's own; otherwise a schedule sets them. `remarks`: what a reader of the result should
    know of how the plan was made."""

    calls: tuple[Call, ...]
    seed: int
    facts: dict[str, Any]
    has_times: bool = False
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for i, call in enumerate(self.calls):
            assert call.index == i, f"call {i} says it is {call.index}"
            assert all(0 <= other < i for other in call.after), f"call {i} waits for {call.after}"

    @property
    def roots(self) -> list[Call]:
        return [call for call in self.calls if not call.after]

    @property
    def has_literals(self) -> bool:
        return any(isinstance(part, Literal) for call in self.calls for part in call.parts)

    def digest(self) -> str:
        """SHA-256 of what is asked and when, whatever the text is made of: a load on a simulation and the same one on a
        server have equal plans. Cost: a few microseconds a part."""
        whole = hashlib.sha256()
        for call in self.calls:
            facts = call.output_tokens, call.after, call.delay_s, call.session, call.turn, call.tenant, call.group
            messages = [(m.role, [(type(part).__name__, _facts_of(part)) for part in m.parts]) for m in call.messages]
            whole.update(repr((facts, messages)).encode())
        return whole.hexdigest()

    def with_fresh_text(self, label: str) -> Plan:
        """The same calls with other text wherever only one session has it: drawn parts that several sessions share
        keep their keys, and so a server that remembers the plan finds just those again. Quoted text stays."""
        sessions: dict[str, set[str]] = {}
        for call in self.calls:
            for part in call.parts:
                if isinstance(part, Drawn):
                    sessions.setdefault(part.key, set()).add(call.session)
        own = {key for key, users in sessions.items() if len(users) == 1}

        def renew(part: Part) -> Part:
            return replace(part, key=f"{part.key}/{label}") if isinstance(part, Drawn) and part.key in own else part

        def renewed(message: Message) -> Message:
            return replace(message, parts=tuple(map(renew, message.parts)))

        calls = tuple(replace(call, messages=tuple(map(renewed, call.messages))) for call in self.calls)
        return replace(self, calls=calls)

    def shifted(self, by: int) -> tuple[Call, ...]:
        """The calls with `by` added to every index, to be appended to that many others."""

        def moved(part: Part) -> Part:
            return replace(part, index=part.index + by) if isinstance(part, Reply) else part

        def shift(call: Call) -> Call:
            messages = tuple(replace(message, parts=tuple(map(moved, message.parts))) for message in call.messages)
            after = tuple(index + by for index in call.after)
            return replace(call, index=call.index + by, after=after, messages=messages)

        return tuple(map(shift, self.calls))

    def with_delays_scaled(self, factor: float) -> Plan:
        """The same calls, every delay multiplied by factor."""
        return replace(self, calls=tuple(replace(call, delay_s=call.delay_s * factor) for call in self.calls))

    def with_root_times(self, times_s: Sequence[float]) -> Plan:
        """The same calls with the roots due at `times_s`, in their order."""
        roots = self.roots
        assert len(times_s) == len(roots), f"{len(times_s)} times for {len(roots)} roots"
        due = {root.index: time_s for root, time_s in zip(roots, times_s, strict=True)}
        calls = tuple(replace(call, delay_s=due.get(call.index, call.delay_s)) for call in self.calls)
        return replace(self, calls=calls)


def _facts_of(part: Part) -> tuple[object, ...]:
    match part:
        case Drawn(key, num_tokens):
            return key, num_tokens
        case Reply(index, num_tokens):
            return index, num_tokens
        case Literal(text):
            return (text,)


def generator(seed: int, purpose: str) -> random.Random:
    """A generator of its own for each purpose, so that drawing more for one changes no other. The string is hashed by
    SHA-512 inside `random`, so PYTHONHASHSEED has no say."""
    return random.Random(f"{seed}/{purpose}")

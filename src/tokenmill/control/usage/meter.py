"""Counts what calls hand to their clients, and has it in the journal before it goes out.

Counted is what answers tell as usage: a prompt once, however many choices it has; output up to the token that completed
a stop string, the stop token included. A whole answer counts when it is sent, a stream as it grows, so a client that
leaves pays for what was written to it. What an engine computes again after another has died is not handed over again,
and so does not count.

The tokens of a step that go to streams whose readers wait for them are one record, made before they are dealt out.
What that cannot know, a reader notes before it writes: a prompt, an end, tokens that waited, and the difference where a
stop string cut some off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...core.events import Output, StepOutputs
from ...text.choice import Choice
from ..observe.observers import Observer
from .journal import Account, Journal


class Followed(Protocol):
    """A stream whose tokens are counted as they come. is_immediate: its reader gets each output at once. is_awaited: a
    reader waits for what comes next."""

    @property
    def is_immediate(self) -> bool: ...

    @property
    def is_awaited(self) -> bool: ...


class Tab:
    """One call's account. choices: as in `Answer`, n of each prompt. once: a name under which the call counts once,
    however often it is answered; "" for none. counts_output: what is drawn counts.

    account     by its number in the journal
    num_output  output tokens of all choices that are in the journal
    """

    __slots__ = (
        "_cached",
        "_counts_output",
        "_is_deferred",
        "_is_followed",
        "_meter",
        "_n",
        "_once",
        "_prompts",
        "account",
        "choices",
        "num_output",
    )

    def __init__(
        self, meter: Meter, account: Account, choices: Sequence[Choice], n: int, *, counts_output: bool, once: str
    ) -> None:
        self.choices = choices
        self._meter = meter
        self.account = meter.journal.number_of(account)
        self._n = n
        self._once = once
        self._counts_output = counts_output
        self._is_deferred = False
        self._is_followed = False
        self._prompts: set[int] = set()
        self._cached: set[int] = set()
        self.num_output = 0

    def defer(self, once: str) -> None:
        """Count nothing before the end, and then under this name: a call that may be carried out again after this
        process has ended counts once, with what its last life came to."""
        self._is_deferred, self._once = True, once

    def note(self) -> None:
        """Have all that the choices count by now in the journal."""
        if self._is_deferred:
            return
        is_first = not self._prompts
        num_prompt = num_cached = num_output = 0
        for choice in self.choices:
            if not (choice.num_tokens or choice.is_finished):
                continue
            number, place = divmod(choice.index, self._n)
            num_output += choice.num_tokens
            if number not in self._prompts:
                self._prompts.add(number)
                num_prompt += len(choice.request.prompt_tokens)
            if place == 0 and number not in self._cached:
                self._cached.add(number)
                num_cached += choice.num_cached
        num_new = num_output - self.num_output if self._counts_output else 0
        if num_prompt or num_new or num_cached:
            self.num_output = num_output
            is_new = int(is_first and bool(self._prompts))
            self._meter.journal.append([(self.account, is_new, num_prompt, num_cached, num_new, self._once)])

    def follow(self, stream: Followed) -> None:
        """Once all prompts are noted, count what the stream of the call is given when it is given, where its reader
        writes it at once."""
        if self._is_followed or self._is_deferred or not self._counts_output or not stream.is_immediate:
            return
        if len(self._prompts) * self._n == len(self.choices):
            self._is_followed = True
            for choice in self.choices:
                self._meter.followed[choice.request.id] = (self, stream)

    def close(self) -> None:
        """The call is over: count what was handed over, and nothing that was not."""
        if self._is_followed:
            for choice in self.choices:
                self._meter.followed.pop(choice.request.id, None)
        self._is_deferred = False
        self.note()


class Meter(Observer):
    """An Observer. followed: by request id, calls that are counted as a step is dealt out."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.followed: dict[str, tuple[Tab, Followed]] = {}

    def tab(
        self, account: Account, choices: Sequence[Choice], n: int, *, counts_output: bool = True, once: str = ""
    ) -> Tab:
        return Tab(self, account, choices, n, counts_output=counts_output, once=once)

    def charge(self, account: Account, num_prompt: int, once: str = "") -> None:
        """A call whose answer is no text."""
        self.journal.append([(self.journal.number_of(account), 1, num_prompt, 0, 0, once)])

    def sending(self, outputs: Sequence[Output], step: StepOutputs | None) -> None:
        followed = self.followed
        if not followed:
            return
        sums: dict[int, int] = {}
        for output in outputs:
            found = followed.get(output.request_id)
            if found is None or output.finish_reason is not None:
                continue
            tab, stream = found
            if stream.is_awaited:
                num_tokens = len(output.tokens)
                tab.num_output += num_tokens
                account = tab.account
                sums[account] = sums.get(account, 0) + num_tokens
        if sums:
            self.journal.append([(account, 0, 0, 0, num_tokens, "") for account, num_tokens in sums.items()])

"""Fair sharing by token service: virtual token counters (Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024). Pure; the engine's queue and the gateway's places both go by it.

Service is counted in tokens computed for a request: one for a prompt token, two for an output token, as in the paper,
and one for a draft that was not accepted. What a prefix cache serves and what is computed again after preemption are
free. Each account counts the service that it received, divided by its weight, and who has received least goes first.
An account that comes back to wait is lifted to the least of those that wait: nobody saves service up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .request import IDLE_PRIORITY, Request
from .terms import NUM_PRIORITY_CLASSES, Terms

PROMPT_SERVICE = 1
OUTPUT_SERVICE = 2

MASK_SERVICE = 2000
"""Of a second of processor time that a grammar and its slow masks took: what a small model computes in it."""

TOLERANCE_STEPS = 2
"""Accounts within so many full steps of the least served one count as equal, and the order of service decides."""

_FEW = 64
"""So many accounts that have nothing open are remembered in any case; beyond that, no more than have."""


IDLE_CLASS = NUM_PRIORITY_CLASSES
"""Of idle work, whoever's it is: behind all."""


def class_of(request: Request) -> int:
    """The class that a request is served in: shares are kept even within one."""
    return IDLE_CLASS if request.priority >= IDLE_PRIORITY else request.terms.priority_class


def class_of_call(priority: int, terms: Terms) -> int:
    """The same of a call whose requests are yet to come."""
    return IDLE_CLASS if priority >= IDLE_PRIORITY else terms.priority_class


@dataclass(slots=True, eq=False)
class Account:
    """served      service received, divided by the weight
    weight       its share, against that of others
    num_open     requests of it, waiting or not
    num_waiting  of them, those that wait
    """

    served: float = 0.0
    weight: float = 1.0
    num_open: int = 0
    num_waiting: int = 0


class Shares:
    """Accounts by name that share one thing: tenants of one class, or adapters of one tenant.

    tolerance  service, divided by weight, within which two count as equal
    num_open   accounts with requests
    """

    def __init__(self, tolerance: float = 0.0) -> None:
        self.tolerance = tolerance
        self.num_open = 0
        self._accounts: dict[str, Account] = {}
        self._peak = 0.0

    def __contains__(self, name: str) -> bool:
        return name in self._accounts

    def __getitem__(self, name: str) -> Account:
        return self._accounts[name]

    @property
    def weight_open(self) -> float:
        """Of all that have requests, together."""
        return sum(each.weight for each in self._accounts.values() if each.num_open)

    def least_open_beside(self, name: str) -> float:
        """What the least served of all others that have requests has received."""
        others = (each.served for other, each in self._accounts.items() if each.num_open and other != name)
        return min(others, default=math.inf)

    def open(self, name: str, weight: float = 1.0) -> None:
        """A request of the account has come. The last weight that is told counts from now on."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account()
        account.weight = weight
        self.num_open += not account.num_open
        account.num_open += 1

    def close(self, name: str) -> None:
        """A request of the account is over, and no longer waits. Once nothing is open, all begin anew."""
        account = self._accounts[name]
        account.num_open -= 1
        if account.num_open:
            return
        self.num_open -= 1
        if not self.num_open:
            self._accounts.clear()
            self._peak = 0.0
        elif len(self._accounts) > 2 * self.num_open + _FEW:
            least = self.least()
            kept = self._accounts.items()
            self._accounts = {name: each for name, each in kept if each.num_open or each.served > least}

    def wait(self, name: str) -> None:
        """A request of the account waits. One that had none waiting comes with no less than the least of those that
        wait; where nobody does, service is not short, and what others have received counts as received by it too."""
        account = self._accounts[name]
        if not account.num_waiting:
            account.served = max(account.served, self.least())
        account.num_waiting += 1

    def stop_waiting(self, name: str) -> None:
        self._accounts[name].num_waiting -= 1

    def charge(self, name: str, service: float) -> None:
        """Computed for it; less than nothing where too much was charged before."""
        account = self._accounts[name]
        account.served += service / account.weight
        self._peak = max(self._peak, account.served)

    def least(self, beside: Iterable[str] = ()) -> float:
        """What the least served of those that wait, and of those `beside`, has received; the most that anyone has,
        where there are none."""
        accounts = self._accounts
        served = [each.served for each in accounts.values() if each.num_waiting]
        served += [accounts[name].served for name in beside]
        return min(served, default=self._peak)

    def debt(self, name: str, least: float) -> float:
        """By how much the account has received more than `least` and the tolerance: who has less goes first."""
        return max(0.0, self._accounts[name].served - least - self.tolerance)

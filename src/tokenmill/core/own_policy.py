"""A policy that somebody has written, under the name by which policies are chosen.

Settings name policies: text, which can be compared, printed and sent. `OwnPolicy` is such a name that brings its policy
along, so whoever looks a policy up by name takes this one as it is. Files are read by `node.policy_file`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """name      of the choice that such policies make
    protocol  what they look like
    offered   names of what a new one may be given
    """

    name: str
    protocol: type
    offered: tuple[str, ...] = ()


class OwnPolicy(str):
    """FILE.py:NAME. make: a new policy, of what is offered to its kind, by name."""

    __slots__ = ("make",)
    make: Callable[..., Any]

    def __new__(cls, name: str, make: Callable[..., Any]) -> OwnPolicy:
        self = super().__new__(cls, name)
        self.make = make
        return self

    def __copy__(self) -> OwnPolicy:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnPolicy:
        return self

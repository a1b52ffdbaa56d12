"""Scheduling policies by name, each in its own file with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...core.config import EngineConfig, OwnPolicy, check_name
from ...core.policy import Chunks, Order, Preemption
from .fcfs import FirstComeFirstServed
from .latest import Latest
from .lpm import LongestPrefixFirst
from .short_prompts_first import ShortPromptsFirst
from .spare_ends import SpareEnds

ORDERS: Mapping[str, Order] = {
    "short-prompts-first": ShortPromptsFirst(),
    "fcfs": FirstComeFirstServed(),
    "lpm": LongestPrefixFirst(),
}

SCHEDULING_POLICIES = {name: name for name in ORDERS} | {"priority": "fcfs"}
"""As asked, in our words or vLLM's, whose 'priority' is arrival within a priority -> the order of service."""


@dataclass(frozen=True, slots=True)
class Policies:
    order: Order
    chunks: Chunks
    preemption: Preemption


def pick(config: EngineConfig) -> Policies:
    """The policies that `config` names. Raises ConfigError naming the nearest."""
    return Policies(order_named(config.scheduling_policy), SpareEnds(), Latest())


def order_named(name: str) -> Order:
    """One of ORDERS, or one's own. Raises ConfigError naming the nearest."""
    check_name(name, ORDERS, "scheduling_policy")
    order: Order = name.make() if isinstance(name, OwnPolicy) else ORDERS[name]
    return order

"""Policies of tiers by name, each in its own file with its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ....core.config import OwnPolicy, check_name
from ..replacement import Replacement, TierAdmission
from .admissions import AdmitAll, SecondUse
from .cost import RecomputeSeconds
from .lfu import LeastFrequentlyUsed
from .lru import LeastRecentlyUsed
from .s3fifo import S3Fifo

REPLACEMENTS: Mapping[str, Callable[[int], Replacement]] = {
    "cost": RecomputeSeconds,
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "s3-fifo": S3Fifo,
}
ADMISSIONS: Mapping[str, Callable[[int], TierAdmission]] = {"all": AdmitAll, "second-use": SecondUse}

REPLACEMENT = "cost"
ADMISSION = "second-use"


def check(name: str) -> None:
    """Raises ConfigError naming the nearest."""
    check_name(name, REPLACEMENTS, "kv_tier_policy")


def check_admission(name: str) -> None:
    """As `check`."""
    check_name(name, ADMISSIONS, "kv_tier_admission")


def pick(name: str, num_bytes: int) -> Replacement:
    """A new object of the policy of this name, for a tier of so many bytes. Raises ConfigError naming the nearest."""
    check(name)
    made: Replacement = name.make(num_bytes=num_bytes) if isinstance(name, OwnPolicy) else REPLACEMENTS[name](num_bytes)
    return made


def pick_admission(name: str, num_bytes: int) -> TierAdmission:
    """As `pick`."""
    check_admission(name)
    made: TierAdmission = name.make(num_bytes=num_bytes) if isinstance(name, OwnPolicy) else ADMISSIONS[name](num_bytes)
    return made

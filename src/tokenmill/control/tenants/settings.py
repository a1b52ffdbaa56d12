"""What a tenant is granted, declared once for the flags of `tenants`, the fields of /admin/tenants and the store.

A further setting is one line here, and a use of it where `Terms` or `RateLimits` are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ...core.config import check_name
from ...core.errors import ConfigError
from ...core.options import check, option
from ...core.slo import MAX_TARGET_S, PROFILES
from ...core.tenant import RateLimits
from ...core.terms import NUM_PRIORITY_CLASSES, STANDARD_CLASS, Terms

MAX_LIMIT = 10**12
_GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}|")
_MAX_NAME = 200
_NONE_AT_0 = frozenset(
    ("requests_per_minute", "tokens_per_minute", "max_concurrent", "ttft_ms", "tpot_ms", "queue_s", "timeout_s")
) | {"shorten_to"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSettings:
    """Raises ConfigError naming the setting and what it may be."""

    name: str = option("", "what people call the tenant (default: its id)", metavar="TEXT")
    requests_per_minute: int = option(0, "calls a minute; 0: as many as it likes (default: 0)", metavar="N", least=0)
    tokens_per_minute: int = option(
        0, "tokens of prompts and answers a minute; 0: as many as it likes (default: 0)", metavar="N", least=0
    )
    max_concurrent: int = option(
        0, "calls open at once, on all front ends together; 0: as many as it likes (default: 0)", metavar="N", least=0
    )
    priority_class: int = option(
        STANDARD_CLASS,
        "0, 1 or 2: lower classes are served first; its requests may ask for a higher number (default: 1)",
        choices=range(NUM_PRIORITY_CLASSES),
        metavar="N",
    )
    weight: float = option(
        1.0, "its share of the service, against that of other tenants of its class (default: 1)", metavar="X"
    )
    kv_share: float = option(
        1.0, "the share of the KV blocks that its running requests may hold together (default: 1)", metavar="X"
    )
    profile: str = option(
        "", "SLO profile of its requests that name none (default: none)", choices=("", *PROFILES), metavar="NAME"
    )
    ttft_ms: float = option(
        0.0, "its target for the time to the first token; 0: its profile's (default: 0)", metavar="MS", least=0
    )
    tpot_ms: float = option(
        0.0, "its target for the time of each further token; 0: its profile's (default: 0)", metavar="MS", least=0
    )
    queue_s: float = option(
        0.0, "seconds that a request may wait; 0: as the server says (default: 0)", metavar="S", least=0
    )
    timeout_s: float = option(
        0.0, "seconds that a request may take; 0: as the server says (default: 0)", metavar="S", least=0
    )
    shorten_to: int = option(
        0, "tokens to which its answers may be cut under load; 0: none is cut (default: 0)", metavar="N", least=0
    )
    cache_group: str = option(
        "",
        "tenants of one cache group share cached KV; by default nobody shares (default: none)",
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        check(self)
        for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent", "shorten_to"):
            _require(getattr(self, name) <= MAX_LIMIT, name, f"must be at most {MAX_LIMIT}")
        for name in ("ttft_ms", "tpot_ms"):
            most_ms = MAX_TARGET_S * 1000
            _require(getattr(self, name) <= most_ms, name, f"must be at most {most_ms:g}")
        _require(0 < self.weight < math.inf, "weight", "must be positive")
        _require(0 < self.kv_share <= 1, "kv_share", "must be above 0 and at most 1")
        _require(bool(_GROUP.fullmatch(self.cache_group)), "cache_group", "must have letters, digits, . _ and - only")
        _require(len(self.name) <= _MAX_NAME and (not self.name or self.name.isprintable()), "name",
                 f"must be printable, of at most {_MAX_NAME} characters")  # fmt: skip

    @classmethod
    def from_fields(cls, given: Mapping[str, Any], base: TenantSettings | None = None) -> TenantSettings:
        """`base`, or what is usual, with the fields given; None: as usual. Raises ConfigError."""
        known = [each.name for each in fields(cls)]
        for name in given:
            check_name(name, known, name, name)
        usual = USUAL_SETTINGS.to_fields()
        values = {name: usual[name] if value is None else _number(name, value) for name, value in given.items()}
        return replace(base or USUAL_SETTINGS, **values)

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)

    def shown(self) -> dict[str, Any]:
        """The fields, None in place of a number that means that there is none."""
        return {name: None if name in _NONE_AT_0 and value == 0 else value for name, value in self.to_fields().items()}

    def changes(self) -> dict[str, Any]:
        """What is not as usual: what is worth keeping."""
        usual = USUAL_SETTINGS.to_fields()
        return {name: value for name, value in self.to_fields().items() if value != usual[name]}

    @property
    def limits(self) -> RateLimits:
        return RateLimits(self.requests_per_minute, self.tokens_per_minute, self.max_concurrent)

    def terms(self, tenant: str) -> Terms:
        return Terms(
            tenant=tenant,
            priority_class=self.priority_class,
            weight=float(self.weight),
            kv_share=float(self.kv_share),
            profile=self.profile,
            ttft_s=self.ttft_ms / 1e3,
            tpot_s=self.tpot_ms / 1e3,
            queue_s=float(self.queue_s),
            timeout_s=float(self.timeout_s),
            shorten_to=self.shorten_to,
        )


def _require(holds: bool, name: str, what: str) -> None:
    if not holds:
        raise ConfigError(f"{name} {what}.", param=name)


def _number(name: str, value: Any) -> Any:
    """JSON has one kind of number: 2.0 requests are 2."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= MAX_LIMIT
    return int(value) if is_whole and isinstance(getattr(USUAL_SETTINGS, name), int) else value


USUAL_SETTINGS = TenantSettings()

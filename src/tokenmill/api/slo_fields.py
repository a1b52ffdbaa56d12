"""What a request says of its objectives: the field `slo` of its body, and headers.

    "slo": "chat"                                            a profile
    "slo": {"profile": "chat", "ttft_ms": 300, "tpot_ms": 30}   one with targets of its own; each may be left out
    x-slo-profile, x-slo-ttft-ms, x-slo-tpot-ms              the same; also x-llm-d-slo-* and x-gateway-inference-slo-*

A header counts more than the body: gateways set them.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..core.config import check_name
from ..core.errors import ConfigError, InvalidRequest
from ..core.slo import MAX_TARGET_S, PROFILES, Wish
from .fields import Fields

_PREFIXES = (b"x-slo-", b"x-llm-d-slo-", b"x-gateway-inference-slo-")
_MOST_MS = int(MAX_TARGET_S * 1000)


def read_wish(fields: Fields) -> Wish:
    """The field `slo` of a body. Raises InvalidRequest naming the field."""
    given = fields.any("slo")
    if isinstance(given, str):
        return Wish(_profile(given, "slo"))
    if given is not None and not isinstance(given, dict):
        raise fields.wrong("slo", "the name of a profile or an object")
    inner = Fields(given or {}, "slo")
    profile = inner.text("profile")
    ttft_ms, tpot_ms = inner.integer("ttft_ms", 1, _MOST_MS), inner.integer("tpot_ms", 1, _MOST_MS)
    inner.unread()
    return Wish(
        "" if profile is None else _profile(profile, "slo.profile"),
        (ttft_ms or 0) / 1000,
        (tpot_ms or 0) / 1000,
    )


def with_headers(wish: Wish, headers: Iterable[tuple[bytes, bytes]]) -> Wish:
    """The wish, as headers change it. Raises InvalidRequest naming the header."""
    for name, value in headers:
        if b"slo-" in name:
            prefix = next((each for each in _PREFIXES if name.startswith(each)), None)
            if prefix is None:
                continue
            what, told, text = name[len(prefix) :], name.decode("latin-1"), value.decode("latin-1").strip()
            if what == b"profile":
                wish = wish._replace(profile=_profile(text, told))
            elif what == b"ttft-ms":
                wish = wish._replace(ttft_s=_seconds(_number(text, told), told))
            elif what == b"tpot-ms":
                wish = wish._replace(tpot_s=_seconds(_number(text, told), told))
    return wish


def _profile(name: str, param: str) -> str:
    try:
        check_name(name[:100], PROFILES, param)
    except ConfigError as error:
        raise InvalidRequest(error.message, param=param) from None
    return name


def _number(text: str, param: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(f"{param} must be a number of milliseconds, got {text[:40]!r}.", param=param) from None


def _seconds(ms: float, param: str) -> float:
    if not 1 <= ms <= _MOST_MS:
        raise InvalidRequest(f"{param} must be from 1 to {_MOST_MS} milliseconds, got {ms:g}.", param=param)
    return ms / 1000

"""String formats as patterns. A pattern may take less than its format allows (no leap seconds, no rare forms of hosts),
never more: what it takes passes the checkers of formats that callers use.

Source: RFC 3339 (dates), RFC 3986 (URIs), RFC 6901 (JSON pointers), RFC 1123 (host names).
"""

from __future__ import annotations

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:[zZ]|[+-]{_HOUR})"

_END, _MID = "[a-zA-Z0-9]", "[a-zA-Z0-9-]"
_HOST_LABEL = (  # without "--" in the third and fourth place, which only encoded international names may have
    f"(?:{_END}(?:{_MID}?{_END})?"
    f"|{_END}{_MID}{{2}}{_END}"
    f"|{_END}{_MID}(?:{_MID}{_END}|{_END}{_MID}){_MID}{{0,58}}{_END})"
)

_ESCAPED = "%[0-9a-fA-F]{2}"
_CHAR = r"[a-zA-Z0-9\-._~!$&'()*+,;=:@]"
_SEGMENT = f"(?:{_CHAR}|{_ESCAPED})*"
_SEGMENT_NZ = f"(?:{_CHAR}|{_ESCAPED})+"
_SEGMENT_NC = rf"(?:[a-zA-Z0-9\-._~!$&'()*+,;=@]|{_ESCAPED})+"
_REG_NAME = rf"(?:[a-zA-Z0-9\-._~!$&'()*+,;=]|{_ESCAPED})*"
_TAIL = rf"(?:\?(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@/?]|{_ESCAPED})*)?(?:#(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@/?]|{_ESCAPED})*)?"
_AUTHORITY = rf"{_REG_NAME}(?::[0-9]{{0,5}})?"
_PATH = f"//{_AUTHORITY}(?:/{_SEGMENT})*|/(?:{_SEGMENT_NZ}(?:/{_SEGMENT})*)?"
_URI_REFERENCE = (
    rf"(?:[a-zA-Z][a-zA-Z0-9+\-.]*:(?:{_PATH}|{_SEGMENT_NZ}(?:/{_SEGMENT})*|)"
    rf"|(?:{_PATH}|{_SEGMENT_NC}(?:/{_SEGMENT})*|)){_TAIL}"
)

_POINTER = "(?:/(?:[^~/]|~[01])*)*"

PATTERNS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "hostname": rf"{_HOST_LABEL}(?:\.{_HOST_LABEL})*",
    "uri-reference": _URI_REFERENCE,
    "json-pointer": _POINTER,
}
"""Formats that are enforced by a pattern of ours, which matches a whole string."""

BUILT_IN = frozenset({"duration", "email", "ipv4", "ipv6", "uri", "uuid"})
"""Formats that the library enforces."""

FREE = frozenset({"binary", "byte", "password", "unknown"})
"""Formats of strings that say how a text is meant, not what it is, as OpenAPI has them."""

NUMERIC = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float", "double"})
"""Formats that say something of numbers only: hints on how to keep them, as OpenAPI has it."""

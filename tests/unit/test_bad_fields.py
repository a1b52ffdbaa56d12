"""Whatever an endpoint reads, a value of the wrong kind or out of range is refused by the field's name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import api_record
import pytest

from tokenmill.api.endpoints import ENDPOINTS
from tokenmill.api.fields import check_integer
from tokenmill.api.rules import Rules
from tokenmill.core.errors import InvalidRequest
from tokenmill.server.openapi.document import EXAMPLES

RULES = Rules(vocab_size=10, fim=api_record._FIM)
IGNORED = {"request_id": ("response", "continued_response")}
"""Taken whatever it is: an endpoint reads a chat that it has made itself."""
NEEDED = {"stream_options": {"stream": True}}
"""What must be given for a field to be read."""


def wrong_for(kind: str) -> Iterator[Any]:
    """Values that a field of this kind cannot have."""
    if kind.startswith("string or array"):
        yield from (7, True, {"surely": "wrong"})
    elif kind.startswith("string"):
        yield from (7, True, ["surely wrong"], {"surely": "wrong"})
    elif kind == "true or false":
        yield from (7, "true", [True], {"surely": "wrong"})
    elif kind == "object":
        yield from (7, True, "surely wrong", ["surely wrong"])
    elif kind.startswith("array"):
        yield from (7, True, {"surely": "wrong"})
    elif kind.startswith("integer"):
        yield from ("7", 0.5, True, [7], {"surely": "wrong"})
    elif kind.startswith("number"):
        yield from ("7", True, [7], {"surely": "wrong"}, 1e300)
    bounds = re.search(r", (-?[\d^,]+) to (-?[\d^,]+)( - 1)?$", kind)
    if bounds and kind.startswith("integer"):
        low, high = (eval(text.replace("^", "**").replace(",", "")) for text in bounds.groups()[:2])
        yield from (low - 1, high + 1)


def with_value(endpoint: str, body: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    inner = body["body"] if endpoint == "continued_response" else body
    first, _, rest = field.partition(".")
    changed = inner | NEEDED.get(first, {}) | {first: (inner.get(first) or {}) | {rest: value} if rest else value}
    return body | {"body": changed} if inner is not body else changed


def is_refused(endpoint: str, field: str, value: Any) -> bool:
    """By one of the bodies that make the parser read the field, and by its name in the message: not every API has
    another place for it."""
    for body in EXAMPLES[endpoint]:
        try:
            ENDPOINTS[endpoint][0](with_value(endpoint, body, field, value), RULES)
        except InvalidRequest as error:
            if field.partition(".")[0] in error.message and (error.param or "").startswith(field.partition(".")[0]):
                return True
    return False


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(endpoint: str) -> None:
    wrong = [(field, value) for field, kind in api_record.fields_of(endpoint).items() for value in wrong_for(kind)]
    wrong = [(field, value) for field, value in wrong if endpoint not in IGNORED.get(field, ())]
    taken = [f"{field}: {value!r}" for field, value in wrong if not is_refused(endpoint, field, value)]
    assert len(wrong) > 5 and not taken, "\n".join(taken)


def test_whole_numbers_may_have_a_point() -> None:
    """JSON has one kind of number, and many clients write all of them so."""
    assert check_integer("n", 3.0, 1, 8) == 3 and isinstance(check_integer("n", 3.0, 1, 8), int)
    for value in (3.5, 9.0, float("inf"), float("nan"), True):
        with pytest.raises(InvalidRequest, match="n must be"):
            check_integer("n", value, 1, 8)

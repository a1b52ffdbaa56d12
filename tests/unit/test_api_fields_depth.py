"""How deeply a body may be nested does not depend on the interpreter, nor on what is done with it."""

from __future__ import annotations

import pytest

from tokenmill.api.fields import MAX_DEPTH, is_deeper, parse_object
from tokenmill.core.errors import InvalidRequest


@pytest.mark.parametrize(("left", "right"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")])
def test_a_body_may_be_so_deep_and_not_deeper(left: bytes, right: bytes) -> None:
    levels = left.count(b"[") + left.count(b"{")

    def body(num: int) -> bytes:
        rest = b"1" if num % levels == 0 else b"[]"
        inner = left * (num // levels) + rest + right * (num // levels)
        return b'{"a":' + inner + b"}"

    assert parse_object(body(MAX_DEPTH - 2))
    assert parse_object(body((MAX_DEPTH - 2) // levels * levels))
    for num in (MAX_DEPTH + 2, 900, 100_000):
        with pytest.raises(InvalidRequest, match=f"may be {MAX_DEPTH} deep"):
            parse_object(body(num))


def test_many_values_side_by_side_are_not_deep() -> None:
    assert not is_deeper({"a": [[1, {"b": []}]] * 1000}, 5)
    assert is_deeper({"a": [[1, {"b": []}]] * 1000}, 4)
    assert not is_deeper(5, 1)

"""What a parser says of fields, in the words of an API that calls them otherwise.

The bodies of some APIs are rewritten into those of OpenAI's and validated there; what is wrong with them must be told
by the names that the caller used.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

from ..core.errors import InvalidRequest


@contextlib.contextmanager
def said_as(names: Mapping[str, str]) -> Iterator[None]:
    """An InvalidRequest from this block comes out with each field of `names` called what it maps to."""
    try:
        yield
    except InvalidRequest as error:
        if not names:
            raise
        longest_first = sorted(names, key=lambda name: (-len(name), name))
        pattern = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")

        def rename(text: str) -> str:
            return pattern.sub(lambda found: names[found[0]], text)

        param = None if error.param is None else rename(error.param)
        raise type(error)(rename(error.message), param=param) from None

"""Going on with something whose first steps were taken where there was no task yet."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any


class Begun:
    """Something awaited whose first steps have been taken elsewhere, up to where it waits."""

    def __init__(self, steps: Generator[Any, Any, Any], waits_for: Any) -> None:
        self._steps = steps
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            yield self._waits_for
        except BaseException:
            self._steps.close()
            raise
        return (yield from self._steps)

"""How log lines look: text, or a JSON object each, and what never shows in either."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

from ..control.observe.call_context import CALL, names_of
from ..core.masking import Mask


def print_facts(title: str, facts: Sequence[tuple[str, str]]) -> None:
    """A line each, names and values in columns."""
    print(title)
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"  {name:<{width}}  {value}")
    sys.stdout.flush()


FORMATS = ("text", "json")
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_up_logging(level: str, form: str, mask: Mask | None = None) -> None:
    """For this process. `form`: one of FORMATS; `mask`: of what no line shows; None: of keys known by their form."""
    handler = logging.StreamHandler()
    mask = mask or Mask()
    handler.setFormatter(JSONLines(mask) if form == "json" else TextLines(mask))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class TextLines(logging.Formatter):
    def __init__(self, mask: Mask) -> None:
        super().__init__(_TEXT)
        self._mask = mask

    def format(self, record: logging.LogRecord) -> str:
        return self._mask(super().format(record))


class JSONLines(logging.Formatter):
    """{"time", "level", "logger", "message"}, then of the call that it is about "request_id", "tenant" and "trace_id",
    the record's own "facts", and "exception" with the traceback."""

    def __init__(self, mask: Mask) -> None:
        from ..api.json_encoder import IN_TEXT

        super().__init__()
        self._mask = mask
        self._escapes = IN_TEXT

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **names_of(getattr(record, "call", None) or CALL.get()),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        text = json.dumps(self._mask.deep(line), ensure_ascii=False, default=lambda other: self._mask(str(other)))
        return text.translate(self._escapes)

"""How log lines look: text, or a JSON object each, and what never shows in either."""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Any

from ..server.call_context import CALL, names_of
from ..server.json_encoder import IN_TEXT

FORMATS = ("text", "json")
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SECRETS = re.compile(r"\btm-[A-Za-z0-9_-]{20,}|(?<=Bearer )[^\s\"']+|(?<=[?&]key=)[^\s&\"]+")
"""API keys of tokenmill, bearer tokens, keys in addresses."""
_HIDDEN = "***"


def set_up_logging(level: str, form: str) -> None:
    """For this process. `form`: one of FORMATS."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONLines() if form == "json" else TextLines(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def hide_secrets(text: str) -> str:
    return _SECRETS.sub(_HIDDEN, text)


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return hide_secrets(super().format(record))


class JSONLines(logging.Formatter):
    """{"time", "level", "logger", "message"}, then of the call that it is about "request_id", "tenant" and "trace_id",
    the record's own "facts", and "exception" with the traceback."""

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
        return hide_secrets(json.dumps(line, ensure_ascii=False, default=str)).translate(IN_TEXT)

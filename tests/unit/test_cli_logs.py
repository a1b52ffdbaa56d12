"""Log lines: JSON objects that name the call, and no secrets in any form."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from scripted import Served
from tokenmill.cli.logs import JSONLines, TextLines
from tokenmill.control.observe.call_context import CALL
from tokenmill.core.masking import Mask
from tokenmill.core.tenant import Tenant
from tokenmill.server.access_log import ACCESS_LOGGER


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.getLogger("test").makeRecord("test", logging.WARNING, "file", 1, message, args, None, extra=extra)
    made.created, made.msecs = 1_700_000_000.25, 250.0
    return made


def test_a_line_is_one_object_with_the_call_it_is_about() -> None:
    """Request, tenant and trace come from the call's state; facts stand beside the message."""
    line = json.loads(JSONLines(Mask()).format(record("Two\nlines %d", 3, facts={"status": 200})))
    assert line == {
        "time": "2023-11-14T22:13:20.250Z", "level": "warning", "logger": "test", "message": "Two\nlines 3",
        "status": 200,
    }  # fmt: skip
    state = {"told_id": "mine", "tenant": Tenant("t1"), "trace_id": "ab"}
    token = CALL.set(state)
    try:
        line = json.loads(JSONLines(Mask()).format(record("x")))
    finally:
        CALL.reset(token)
    assert (line["request_id"], line["tenant"], line["trace_id"]) == ("mine", "t1", "ab")
    assert "\n" not in JSONLines(Mask()).format(record("a\nb"))
    assert "request_id" not in json.loads(JSONLines(Mask()).format(record("x", call={"request_id": ""})))


def test_a_traceback_is_in_the_object() -> None:
    """Failures are found by their text in one line."""
    made = record("failed")
    try:
        raise KeyError("why")
    except KeyError:
        made.exc_info = sys.exc_info()
    assert "KeyError: 'why'" in json.loads(JSONLines(Mask()).format(made))["exception"]


MASK = Mask(("swordfish-of-flags", 'pass"word\\1', "test"))


@pytest.mark.parametrize("form", [TextLines(MASK), JSONLines(MASK)])
@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("the key tm-abcdefghijklmnopqrstuvwxyz0123 was sent", "tm-abcdefghijklmnopqrstuvwxyz0123"),
        ("Authorization: Bearer s3cret-token!", "s3cret-token!"),
        ("authorization: bearer s3cret-token!", "s3cret-token!"),
        ('GET "/v1/models?a=1&key=s3cret HTTP/1.1"', "s3cret"),
        ("GET /x_tm-abcdefghijklmnopqrstuvwxyz0123", "tm-abcdefghijklmnopqrstuvwxyz0123"),
        ("GET /%74m%2dabcdefghijklmnopqrstuvwxyz0123", "%74m%2dabcdefghijklmnopqrstuvwxyz0123"),
        ("chatcmpl-swordfish-of-flags", "swordfish-of-flags"),
        ("GET /p%61ss%22word%5c1 HTTP/1.1", "p%61ss%22word%5c1"),
        (repr({"user": 'pass"word\\1'}), repr('pass"word\\1')[1:-1]),
        ('pass"word\\1', json.dumps('pass"word\\1')[1:-1]),
    ],
)
def test_secrets_do_not_show(form: logging.Formatter, text: str, secret: str) -> None:
    """Keys by their form and by their values, bearer tokens and keys in addresses are replaced, however they are
    spelled, also in arguments and tracebacks."""
    assert secret not in form.format(record("%s", text)) and "***" in form.format(record("%s", text))
    made = record("failed")
    try:
        raise ValueError(text)
    except ValueError:
        made.exc_info = sys.exc_info()
    assert secret not in form.format(made)


def test_an_access_line_carries_its_facts(caplog: pytest.LogCaptureFixture) -> None:
    """Status, path without query, duration and the caller's own name of the call."""
    with caplog.at_level(logging.INFO, ACCESS_LOGGER), Served() as served:
        served.ask("/v1/models?key=s3cret")
        served.wait_until(lambda: any(each.name == ACCESS_LOGGER for each in caplog.records))
    (found,) = (each for each in caplog.records if each.name == ACCESS_LOGGER)
    line = json.loads(JSONLines(Mask()).format(found))
    assert (line["method"], line["path"], line["status"], line["client"]) == ("GET", "/v1/models", 200, "127.0.0.1")
    assert 0 <= line["duration_s"] < 20 and "s3cret" not in json.dumps(line)


def test_a_short_key_leaves_other_words_alone() -> None:
    """A key of few characters is hidden as a word: everything else has to stay readable, and a line its form."""
    assert MASK("test: latest attestation of test-1") == "***: latest attestation of ***-1"
    assert MASK.deep({"test": ["test", {"b": "the test"}, 7]}) == {"test": ["***", {"b": "the ***"}, 7]}

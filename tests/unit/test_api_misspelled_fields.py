"""A misspelled field is a mistake; an unknown one is somebody else's."""

from __future__ import annotations

import time
from typing import Any

import api_record
import pytest

from make_api_doc import TABLES
from tokenmill.api.endpoints import ENDPOINTS
from tokenmill.api.fields import Fields, nearest
from tokenmill.api.rules import Rules
from tokenmill.api.unsupported_fields import RENAMED
from tokenmill.core.errors import InvalidRequest
from tokenmill.server.openapi.document import EXAMPLES
from tokenmill.text.fim import FimTokens

RULES = Rules(vocab_size=10, fim=FimTokens("<p>", "<s>", "<m>"))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("temparture", "temperature"),
        ("tempreature", "temperature"),
        ("Temperature", "temperature"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("max_token", "max_tokens"),
        ("max_tokns", "max_tokens"),
        ("seeed", "seed"),
        ("sede", "seed"),
        ("stops", "stop"),
        ("topp", "top_p"),
        ("stream_option", "stream_options"),
        ("respones_fromat", "response_format"),
        ("temperature_last", None),
        ("tmpratr", None),
        ("see", None),
        ("top_k", None),
        ("speed", None),
        ("mode", None),
        ("n", None),
        ("", None),
    ],
)
def test_what_a_name_is_meant_for(name: str, meant: str | None) -> None:
    known = ["temperature", "max_tokens", "seed", "stop", "top_p", "stream_options", "response_format", "model", "n"]
    assert nearest(name, known) == meant


def fields_of_others() -> set[str]:
    """Every field that any endpoint here reads or has in a table."""
    names = set(RENAMED) | {name for table in TABLES.values() for name in table}
    return names | {name for endpoint in ENDPOINTS for name in api_record.fields_of(endpoint)}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_no_field_of_another_endpoint_is_taken_for_a_mistake(endpoint: str) -> None:
    """Else it belongs into OTHERS."""
    read = {name for name in api_record.fields_of(endpoint) if "." not in name}
    taken = {name: nearest(name, read) for name in fields_of_others() - read if "." not in name}
    assert not {name: meant for name, meant in taken.items() if meant}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_endpoint_names_a_misspelled_field(endpoint: str) -> None:
    """And takes one that is nobody's."""
    body: dict[str, Any] = EXAMPLES[endpoint][0]
    parse = ENDPOINTS[endpoint][0]
    inner = body["body"] if endpoint == "continued_response" else body

    def with_field(name: str) -> dict[str, Any]:
        changed = inner | {name: 1}
        return body | {"body": changed} if inner is not body else changed

    _, unknown = parse(with_field("zebra_mode"), RULES)
    assert "zebra_mode" in unknown
    with pytest.raises(InvalidRequest) as caught:
        parse(with_field("modle"), RULES)
    assert caught.value.param == "modle" and "model" in caught.value.message


def test_fields_inside_of_others_are_spelled_too() -> None:
    chat = EXAMPLES["chat"][0]
    for body, name in (
        ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        ({"kv_transfer_params": {"do_remote_decodes": True}}, "kv_transfer_params.do_remote_decodes"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            ENDPOINTS["chat"][0](chat | body, RULES)
        assert caught.value.param == name


def test_a_field_that_is_refused_is_so_under_a_misspelled_name() -> None:
    with pytest.raises(InvalidRequest, match="sufix is not known here; suffix is"):
        ENDPOINTS["completion"][0]({"prompt": "hi", "sufix": "x"}, RULES)


def test_many_unknown_fields_cost_little() -> None:
    """Only the first are looked at, however many a hostile body has."""
    fields = Fields({f"{chr(97 + n % 26)}{n:09}_x": 1 for n in range(20_000)})
    for name in fields_of_others():
        fields.any(name)
    start = time.process_time()
    assert len(fields.unread()) == 20_000
    assert time.process_time() - start < 1

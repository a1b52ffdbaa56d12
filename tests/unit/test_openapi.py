"""The OpenAPI document that a server shows is valid, has every route, and takes what the parsers take."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import api_record
import jsonschema
import pytest

from tokenmill.api.endpoints import ENDPOINTS
from tokenmill.api.rules import Rules
from tokenmill.core.errors import InvalidRequest
from tokenmill.server.openapi.document import EXAMPLES, document
from tokenmill.server.openapi.routes import render
from tokenmill.server.openapi.schemas import plain, schema_of

STORED = document()
SCHEMAS = STORED["components"]["schemas"]


def test_every_route_is_in_the_document_and_nothing_else() -> None:
    told = {f"{method.upper()} {path}" for path, methods in STORED["paths"].items() for method in methods}
    assert told == api_record.routes()


def test_the_document_is_openapi() -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(STORED | {"info": STORED["info"] | {"version": "0"}})


@pytest.mark.parametrize("endpoint", [name for name in SCHEMAS if name in ENDPOINTS])
def test_bodies_that_are_taken_fit_the_schema(endpoint: str) -> None:
    """And without a required field they neither fit nor are they taken."""
    schema, bodies = SCHEMAS[endpoint], EXAMPLES[endpoint]
    for body in bodies:
        jsonschema.validate(body, schema, jsonschema.Draft202012Validator)
    for name in schema.get("required", ()):
        less = {field: value for field, value in bodies[0].items() if field != name}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(less, schema)
        with pytest.raises(InvalidRequest):
            ENDPOINTS[endpoint][0](less, Rules(vocab_size=10, fim=api_record._FIM))


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        ("integer, -1 to 2^31 - 1", {"type": "integer", "minimum": -1, "maximum": 2**31 - 1}),
        ("number, above 0, to 1", {"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
        ("0 to 2", {"type": "integer", "minimum": 0, "maximum": 2}),
        ("true, false or string", {"anyOf": [{"type": "boolean"}, {"type": "string"}]}),
        (
            "string or array of strings",
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        ),
    ],
)
def test_kinds_in_words_become_schemas(kind: str, schema: dict[str, Any]) -> None:
    assert schema_of(kind) == schema


def test_summaries_read_well_without_their_links() -> None:
    """The words of docs/use/api.md lead to other pages; the document does not."""
    assert plain("What it does: [here](x.md#y).") == "What it does."
    assert plain("What it does ([here](x.md)), and more.") == "What it does, and more."
    told = [operation["summary"] for methods in STORED["paths"].values() for operation in methods.values()]
    assert not [text for text in told if ":." in text or text[-1] == ":" or "](" in text]


def test_a_kind_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ValueError, match="several things"):
        schema_of("several things")


def test_the_page_has_every_path_and_loads_nothing() -> None:
    page = render(STORED)
    loading: list[tuple[str, str | None]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            loading.extend((tag, value) for name, value in attrs if name in ("src", "href", "style", "onclick"))
            assert tag != "script"

    Reader().feed(page)
    assert loading == [("a", "openapi.json")]
    assert all(path in page for path in STORED["paths"])

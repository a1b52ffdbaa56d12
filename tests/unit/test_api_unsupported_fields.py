"""Fields of other servers: what would change the answer is refused by name, the rest is accepted, nothing is silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tokenmill.api import unsupported_fields as other_fields
from tokenmill.api.fields import Fields
from tokenmill.api.openai.parse import parse_chat, parse_completion
from tokenmill.api.pooling import parse_embedding, parse_rerank, parse_score
from tokenmill.api.rules import Rules
from tokenmill.api.unsupported_fields import RENAMED, Ignored, Refused, Table
from tokenmill.core.errors import InvalidRequest

RULES = Rules(vocab_size=100)
Parse = Callable[[dict[str, Any], Rules], tuple[Any, list[str]]]
ENDPOINTS: dict[str, tuple[Parse, dict[str, Any], Table]] = {
    "chat": (parse_chat, {"messages": [{"role": "user", "content": "hi"}]}, other_fields.CHAT),
    "completion": (parse_completion, {"prompt": "hi"}, other_fields.COMPLETION),
    "embedding": (parse_embedding, {"input": "hi"}, other_fields.EMBEDDING),
    "score": (parse_score, {"text_1": "a", "text_2": "b"}, other_fields.SCORE),
    "rerank": (parse_rerank, {"query": "a", "documents": ["b"]}, other_fields.RERANK),
}
OTHER_VALUE = {"asks for": ["something"]}
FIELDS = [(endpoint, field) for endpoint, (_, _, table) in ENDPOINTS.items() for field in table]


@pytest.mark.parametrize(("endpoint", "field"), FIELDS)
def test_each_field_of_the_tables_does_what_its_entry_says(endpoint: str, field: str) -> None:
    parse, body, table = ENDPOINTS[endpoint]
    plain = parse(body, RULES)
    assert parse(body | {field: None}, RULES) == plain
    entry = table[field]
    if isinstance(entry, Ignored):
        assert entry.why and parse(body | {field: OTHER_VALUE}, RULES) == plain
        return
    for value in entry.neutral:
        assert parse(body | {field: value}, RULES) == plain
    with pytest.raises(InvalidRequest) as caught:
        parse(body | {field: OTHER_VALUE}, RULES)
    assert caught.value.param == field and field in caught.value.message and entry.instead in caught.value.message


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_no_field_is_both_read_and_in_the_table(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse, body, table = ENDPOINTS[endpoint]
    read: set[str] = set()

    def any_field(self: Fields, field: str) -> Any:
        if not self._where:
            read.add(field)
        self._read.add(field)
        return self._body.get(field)

    monkeypatch.setattr(Fields, "any", any_field)
    parse(body, RULES)
    assert {"model", *body} <= read and not read & table.keys()
    if endpoint in ("chat", "completion"):
        assert set(RENAMED.values()) <= read and not read & RENAMED.keys()


CHANGING = [
    ("mirostat", 2), ("format", "json"), ("options", {"temperature": 0}), ("dynatemp_range", 0.5), ("top_a", 0.1),
    ("tfs_z", 0.9), ("samplers", ["top_k"]), ("n_probs", 3), ("do_sample", False),
]  # fmt: skip


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
@pytest.mark.parametrize(("field", "value"), CHANGING)
def test_what_would_change_the_answer_is_not_ignored(endpoint: str, field: str, value: Any) -> None:
    parse, body, _ = ENDPOINTS[endpoint]
    with pytest.raises(InvalidRequest) as caught:
        parse(body | {field: value}, RULES)
    assert caught.value.param == field


def test_clients_that_send_every_setting_with_its_default_are_served() -> None:
    """What llama-server's own page sends with each message."""
    parse, body, _ = ENDPOINTS["chat"]
    sent = {
        "dynatemp_range": 0, "dynatemp_exponent": 1, "xtc_probability": 0, "xtc_threshold": 0.1, "typical_p": 1,
        "repeat_last_n": 64, "repeat_penalty": 1, "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2,
        "dry_penalty_last_n": -1, "timings_per_token": False, "cache_prompt": True,
        "reasoning_format": "auto", "mirostat": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "min_keep": 0, "n_probs": 0,
    }  # fmt: skip
    assert parse(body | sent, RULES) == parse(body, RULES)


def test_other_names_of_our_fields_are_read() -> None:
    parse, body, _ = ENDPOINTS["completion"]
    filters = parse(body | {"typical_p": 0.9, "top_n_sigma": 1}, RULES)
    assert parse(body | {"typ_p": 0.9, "nsigma": 1}, RULES) == filters != parse(body, RULES)
    same = parse(body | {"repetition_penalty": 1.2, "max_tokens": 9, "min_tokens": 2}, RULES)
    assert parse(body | {"repeat_penalty": 1.2, "n_predict": 9, "min_new_tokens": 2}, RULES) == same
    assert parse(body | {"repeat_penalty": 1.2, "max_tokens": 9, "max_new_tokens": 9, "min_tokens": 2}, RULES) == same
    assert parse(body | {"n_predict": -1}, RULES) == parse(body, RULES)
    with pytest.raises(InvalidRequest) as caught:
        parse(body | {"n_predict": 3, "max_tokens": 4}, RULES)
    assert caught.value.param == "n_predict" and "max_tokens" in caught.value.message


def test_the_reach_of_penalties_matters_only_where_there_are_some() -> None:
    parse, body, _ = ENDPOINTS["completion"]
    assert parse(body | {"repeat_last_n": 64}, RULES) == parse(body, RULES)
    parse(body | {"repeat_last_n": -1, "repeat_penalty": 1.1}, RULES)
    with pytest.raises(InvalidRequest) as caught:
        parse(body | {"repeat_last_n": 64, "repeat_penalty": 1.1}, RULES)
    assert caught.value.param == "repeat_last_n"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_nothing_is_recommended_that_the_endpoint_refuses(endpoint: str) -> None:
    _, _, table = ENDPOINTS[endpoint]
    refused = {name for name, entry in table.items() if isinstance(entry, Refused)}
    for name, entry in table.items():
        advice = entry.instead if isinstance(entry, Refused) else ""
        given = advice.removeprefix("give ").split(" ")[0].strip(",") if advice.startswith("give ") else ""
        assert given not in refused, f"{name}: {advice}"


def test_every_entry_is_of_a_known_kind() -> None:
    for _, _, table in ENDPOINTS.values():
        assert all(isinstance(entry, (Refused, Ignored)) for entry in table.values())

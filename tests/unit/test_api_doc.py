"""docs/api.md says what the code takes: of a new route, field or flag it has to say something before tests pass."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import api_flags
import api_record
import api_words as words
import make_api_doc
import pytest
from make_api_doc import PAGE, READ, found, page

from tokenmill.cli import main as cli
from tokenmill.cli.parser import DEFAULT_MODEL
from tokenmill.core import config, errors, sampling
from tokenmill.core.errors import TokenmillError
from tokenmill.core.units import KiB, MiB
from tokenmill.node import options
from tokenmill.server import connection, openai, other_fields, pooling, prompts, service, tokenizing
from tokenmill.server.audit.options import AuditOptions
from tokenmill.server.bounds import HttpBounds
from tokenmill.server.config import ServerConfig
from tokenmill.server.endpoints import ENDPOINTS
from tokenmill.server.fields import Fields


def test_the_page_is_up_to_date() -> None:
    """Else run `python tests/unit/make_api_doc.py`."""
    assert PAGE.read_text(encoding="utf8") == page()


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_field_has_a_meaning_and_every_meaning_a_field(endpoint: str) -> None:
    assert READ.keys() == ENDPOINTS.keys()
    kinds = found(endpoint)
    without = [name for name, kind in kinds.items() if not make_api_doc._kind(name, kind)]
    assert not without, f"fields without a kind: {without}"


def test_every_kind_in_words_is_of_a_field_that_is_read_whole() -> None:
    read = {name for endpoint in ENDPOINTS for name, kind in found(endpoint).items() if kind in ("", "array")}
    assert words.KINDS.keys() == read


def test_every_route_is_told_of() -> None:
    assert api_record.routes() == words.ENDPOINTS.keys() | words.ALIASES.keys()
    for alias, route in words.ALIASES.items():
        assert f"`{alias.split()[1]}`" in words.ENDPOINTS[route]


def test_every_error_is_told_of() -> None:
    not_http = {"ConfigError", "BadCheckpoint", "FetchError", "LinkRefused"}
    failures = {name for name, each in vars(errors).items() if isinstance(each, type)} - {"TokenmillError"}
    assert failures - not_http == words.ERRORS.keys()
    assert all(issubclass(getattr(errors, name), TokenmillError) for name in failures)
    source = Path(connection.__file__).read_text(encoding="utf8")
    assert {int(status) for status in re.findall(r"Refusal\(\s*(\d+)", source)} <= words.HTTP_ERRORS.keys()


@pytest.mark.parametrize(
    ("field", "most"),
    [
        (words.COMPLETION["prompt"], prompts.MAX_PROMPTS),
        (words.EMBEDDING["input"], pooling.MAX_INPUTS),
        (words.SCORE["text_1"], pooling.MAX_INPUTS),
        (words.RERANK["documents"], pooling.MAX_INPUTS),
        (words.TOKENIZE["prompt"], tokenizing.MAX_TOKENIZE_CHARS),
        (words.DETOKENIZE["tokens"], tokenizing.MAX_DETOKENIZE_TOKENS),
        (words.SAMPLING["stop"], sampling.MAX_STOPS),
        (words.SAMPLING["stop"], sampling.MAX_STOP_CHARS),
        (words.SAMPLING["stop_token_ids"], sampling.MAX_STOP_TOKENS),
        (words.SAMPLING["bad_words"], sampling.MAX_BAD_WORDS),
        (words.SAMPLING["bad_words"], sampling.MAX_BAD_WORD_CHARS),
        (words.SAMPLING["logit_bias"], sampling.MAX_LOGIT_BIAS),
        (words.COMPLETION["max_tokens"], openai.MAX_TOKENS_DEFAULT),
        (words.LOAD_ADAPTER["lora_name"], service._MAX_NAME),
        (words.HTTP_ERRORS[414], HttpBounds().max_target_bytes // KiB),
        (words.HTTP_ERRORS[431], HttpBounds().max_head_bytes // KiB),
        (words.HTTP_ERRORS[431], HttpBounds().max_head_lines),
    ],
)
def test_bounds_in_words_are_those_of_the_code(field: str, most: int) -> None:
    assert re.search(rf"\b{most:,}\b", field)


def test_defaults_in_the_help_are_those_of_the_code() -> None:
    told = {
        "max_body_bytes": f"{ServerConfig(('x',)).max_body_bytes // MiB}MiB",
        "resume_bytes": f"{ServerConfig(('x',)).resume_bytes // MiB}MiB",
        "audit_max_bytes": f"{AuditOptions().audit_max_bytes // MiB}MiB",
        "max_num_seqs": config.MAX_NUM_SEQS,
        "max_num_batched_tokens": config.MAX_NUM_BATCHED_TOKENS,
        "block_size": config.BLOCK_SIZE,
        "max_loras": options.MAX_LORAS,
        "max_lora_rank": options.MAX_LORA_RANK,
        "model": DEFAULT_MODEL,
    }
    for action in api_flags.serve_parser()._actions:
        default = told.get(action.dest, action.default)
        is_told = api_flags._is_shown(action) and "-m" not in action.option_strings
        if not is_told or not default or default == argparse.SUPPRESS or isinstance(default, (bool, list)):
            continue
        shown = f"{default:g}" if isinstance(default, float) else "" if default == "auto" else default
        assert f"default: {shown}" in str(action.help), action.dest


def test_a_new_field_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    common = openai._common

    def more(fields: Fields, prompt_logprobs: int | None) -> dict[str, Any]:
        fields.flag("brand_new")
        return common(fields, prompt_logprobs)

    monkeypatch.setattr(openai, "_common", more)
    with pytest.raises(AssertionError, match="brand_new"):
        page()


def test_a_new_field_of_another_server_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(other_fields.CHAT, "brand_new", other_fields.Refused())
    assert "`brand_new`" in page()


@pytest.mark.parametrize("shown", ["as new", None])
def test_a_new_flag_is_missed(monkeypatch: pytest.MonkeyPatch, shown: str | None) -> None:
    add: Callable[[Any], None] = cli.add_foreign_flags

    def more(parser: Any) -> None:
        add(parser)
        parser.add_argument("--brand-new", help=shown)

    monkeypatch.setattr(cli, "add_foreign_flags", more)
    if shown:
        assert "`--brand-new`" in "".join(api_flags.own_flags(api_flags.serve_parser()))
    else:
        with pytest.raises(AssertionError, match="--brand-new"):
            page()

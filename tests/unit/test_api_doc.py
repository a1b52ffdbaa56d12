"""docs/use/api.md says what the code takes: of a new route, field or flag it has to say something before tests pass."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import api_record
import pytest

import api_doc_flags as flags
import api_doc_words as words
from make_api_doc import PAGE, page
from tokenmill.api import pooling, prompts
from tokenmill.api import unsupported_fields as other_fields
from tokenmill.api.endpoints import ENDPOINTS
from tokenmill.api.fields import Fields
from tokenmill.api.openai import parse as openai
from tokenmill.api.openai import tokenize as tokenizing
from tokenmill.cli import main as cli
from tokenmill.cli.parser import DEFAULT_MODEL
from tokenmill.control.audit.options import AuditOptions
from tokenmill.core import config, errors, sampling
from tokenmill.core.errors import TokenmillError
from tokenmill.core.units import KiB, MiB
from tokenmill.node import options
from tokenmill.server import connection, service
from tokenmill.server.config import ServerConfig
from tokenmill.server.connections import HttpBounds
from tokenmill.server.openapi import fields, paths
from tokenmill.server.openapi.document import BODIES, EXAMPLES, READ, told
from tokenmill.server.openapi.fields import Told
from tokenmill.server.openapi.schemas import schema_of


def test_the_page_is_up_to_date() -> None:
    """Else run `python scripts/make_api_doc.py`."""
    assert PAGE.read_text(encoding="utf8") == page()


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_tables_say_of_every_field_what_the_parser_reads(endpoint: str) -> None:
    """Else tell of it in server/openapi/fields*.py. Of what is read whole, and of arrays, a kind is in words."""
    assert READ.keys() == EXAMPLES.keys() == ENDPOINTS.keys()
    _compare(api_record.fields_of(endpoint), told(endpoint))


def test_tables_say_what_loading_an_adapter_reads() -> None:
    _compare(api_record.load_fields(), fields.LOAD_ADAPTER)
    _compare(api_record.unload_fields(), fields.UNLOAD_ADAPTER)


def _compare(read: dict[str, str], said: Told) -> None:
    assert read.keys() == said.keys(), f"fields without words, or the reverse: {sorted(read.keys() ^ said.keys())}"
    for name, kind in read.items():
        schema_of(said[name][0])
        assert kind in ("", said[name][0]) or (kind == "array" and "array" in said[name][0]), (name, kind, said[name])


def test_every_route_is_told_of() -> None:
    """Else tell of it in server/openapi/paths.py."""
    assert api_record.routes() == paths.ENDPOINTS.keys() | paths.ALIASES.keys()
    for alias, route in paths.ALIASES.items():
        assert f"`{alias.split()[1]}`" in paths.ENDPOINTS[route]
    assert BODIES.keys() | paths.QUERIES.keys() <= paths.ENDPOINTS.keys()


def test_every_error_is_told_of() -> None:
    not_http = {"ConfigError", "Infeasible", "BadCheckpoint", "FetchError", "LinkRefused"}
    failures = {name for name, each in vars(errors).items() if isinstance(each, type)} - {"TokenmillError"}
    assert failures - not_http == words.ERRORS.keys()
    assert all(issubclass(getattr(errors, name), TokenmillError) for name in failures)
    source = Path(connection.__file__).read_text(encoding="utf8")
    told = {501, *words.HTTP_ERRORS}  # 501: for a transfer coding that no client's library sends
    assert {int(status) for status in re.findall(r"Refusal\(\s*(\d+)", source)} <= told


@pytest.mark.parametrize(
    ("field", "most"),
    [
        (fields.COMPLETION["prompt"][1], prompts.MAX_PROMPTS),
        (fields.EMBEDDING["input"][1], pooling.MAX_INPUTS),
        (fields.SCORE["text_1"][1], pooling.MAX_INPUTS),
        (fields.RERANK["documents"][1], pooling.MAX_INPUTS),
        (fields.TOKENIZE["prompt"][1], tokenizing.MAX_TOKENIZE_CHARS),
        (fields.DETOKENIZE["tokens"][1], tokenizing.MAX_DETOKENIZE_TOKENS),
        (fields.SAMPLING["stop"][1], sampling.MAX_STOPS),
        (fields.SAMPLING["stop"][1], sampling.MAX_STOP_CHARS),
        (fields.SAMPLING["stop_token_ids"][1], sampling.MAX_STOP_TOKENS),
        (fields.SAMPLING["bad_words"][1], sampling.MAX_BAD_WORDS),
        (fields.SAMPLING["bad_words"][1], sampling.MAX_BAD_WORD_CHARS),
        (fields.SAMPLING["logit_bias"][1], sampling.MAX_LOGIT_BIAS),
        (fields.COMPLETION["max_tokens"][1], openai.MAX_TOKENS_DEFAULT),
        (fields.LOAD_ADAPTER["lora_name"][1], service._MAX_NAME),
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
    for action in flags.serve_parser()._actions:
        default = told.get(action.dest, action.default)
        is_told = flags._is_shown(action) and "-m" not in action.option_strings
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
        _compare(api_record.fields_of("chat"), told("chat"))


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
        assert "`--brand-new`" in "".join(flags.own_flags(flags.serve_parser()))
    else:
        with pytest.raises(AssertionError, match="--brand-new"):
            page()

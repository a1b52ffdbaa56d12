"""Constraints become grammars once, and the last ones are remembered within bounds."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from scripted import InlineSandbox, make_text_model
from tokenmill.api.jobs import Job
from tokenmill.api.sandbox import Caller
from tokenmill.control.observe.metrics import Metrics
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.tenant import Tenant
from tokenmill.server import grammars
from tokenmill.server.grammars import GrammarCompiler
from tokenmill.text.grammar.constraint import Constraint


class Counting:
    """A sandbox that counts its jobs."""

    def __init__(self) -> None:
        self._sandbox = InlineSandbox(make_text_model())
        self.num_jobs = 0

    async def run(self, job: Job, client: str) -> bytes:
        self.num_jobs += 1
        return await self._sandbox.run(job, client)


def choice(text: str) -> Constraint:
    return Constraint("choice", [text], "guided_choice")


def test_what_was_compiled_lately_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal constraints are one; what was used longest ago goes first, by number and by bytes."""
    monkeypatch.setattr(grammars, "MAX_KEPT", 2)
    sandbox = Counting()
    compiler = GrammarCompiler(sandbox)

    def num_jobs(*constraints: Constraint) -> int:
        before = sandbox.num_jobs
        for constraint in constraints:
            assert (
                constraint.value[0] in json.loads(asyncio.run(compiler.compile(constraint)))["grammars"][0].popitem()[1]
            )
        return sandbox.num_jobs - before

    assert num_jobs(choice("hello"), choice("hello"), choice("world")) == 2
    assert num_jobs(choice("hello"), choice("12"), choice("hello"), choice("world")) == 2
    monkeypatch.setattr(grammars, "MAX_KEPT_BYTES", 1)
    assert num_jobs(choice("1"), choice("1")) == 2 and compiler._num_bytes == 0


def test_what_one_tenant_asked_for_is_not_known_to_another() -> None:
    """Else the time would tell; tenants of one salt share."""
    sandbox = Counting()
    compiler = GrammarCompiler(sandbox)
    for salt, num_jobs in (("", 1), ("a", 2), ("b", 3), ("a", 3), ("", 3)):
        asyncio.run(compiler.compile(choice("hello"), Caller(tenant=Tenant("t", salt=salt))))
        assert sandbox.num_jobs == num_jobs


def test_a_refusal_names_the_field_and_is_counted() -> None:
    metrics = Metrics("m", 100)
    compiler = GrammarCompiler(InlineSandbox(make_text_model()), metrics)
    wrong: dict[str, Any] = {
        "guided_regex": Constraint("regex", "(a", "guided_regex"),
        "grammar": Constraint("lark", "start: foo", "grammar"),
    }
    for field, constraint in wrong.items():
        with pytest.raises(InvalidRequest) as refused:
            asyncio.run(compiler.compile(constraint))
        assert refused.value.param == field
    asyncio.run(compiler.compile(choice("x")))
    text = metrics.render("")[0].decode()
    assert 'tokenmill:grammars_refused_total{engine="0",model_name="m"} 2.0' in text
    assert 'tokenmill:grammar_compile_seconds_count{engine="0",model_name="m"} 1.0' in text


def test_the_order_of_a_schemas_keys_tells_constraints_apart() -> None:
    """It is the order of the answer's keys."""
    compiler = GrammarCompiler(InlineSandbox(make_text_model()))
    orders = [["a", "b"], ["b", "a"]]
    schemas = [{"type": "object", "properties": {name: {"type": "null"} for name in names}} for names in orders]
    grammars = [asyncio.run(compiler.compile(Constraint("json_schema", schema, "x"))) for schema in schemas]
    assert [list(json.loads(text)["grammars"][0]["json_schema"]["properties"]) for text in grammars] == orders

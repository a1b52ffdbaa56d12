"""The sandbox process: what is hostile or heavy ends in time and in memory, and takes nothing else with it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from serving import alive, wait_until

from scripted import make_text_model
from tokenmill.api.jobs import CompileGrammar, Encode, Read, Render, Tokenize, unpack, unpack_ids, unpack_rendered
from tokenmill.core.errors import InvalidRequest, Unavailable
from tokenmill.sandbox import parent
from tokenmill.sandbox.parent import SandboxProcess, materials
from tokenmill.text.chat_template import ChatTemplate
from tokenmill.text.grammar.build import to_grammar
from tokenmill.text.grammar.constraint import Constraint
from tokenmill.text.special_tokens import Rendered

HELLO = ({"role": "user", "content": "hello"},)

# What a template can cost, each far beyond what it may: time, memory, or both; some when it is compiled.
HOSTILE = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "folded at compilation": "{{ 'a' | center(1500000000) }}",
    "doubling by ~": "{% set n = namespace(s='aaaa') %}{% for a in range(64) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubling by +": "{% set n = namespace(s='aaaa') %}{% for a in range(64) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "a repeated string": "{{ 'x' * 10000000000 }}",
    "a repeated list": "{{ ([1] * (messages | length * 10000000000)) | length }}",
    "a power of a power": "{{ 9 ** (9 ** (9 + messages | length)) }}",
    "a format's width": "{{ '%2000000000d' | format(messages | length) }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000 ~ messages[0].role) }}",
    "join": "{{ range(99999) | join('x' * 1000000 ~ messages[0].role) }}",
    "batch": "{{ messages | batch(2000000000, 'x') | list | length }}",
    "slice": "{% for a in messages | slice(2000000000) %}{% endfor %}",
    "indented JSON": "{{ messages | tojson(indent=1000000000) }}",
    "indent": "{{ ('a\n' * 10000 ~ messages[0].role) | indent(1000000) }}",
    "lipsum": "{% for a in range(9999) %}{% set x = lipsum(1000) %}{% endfor %}",
    "a big product": "{% for a in range(99) %}{% set n = 7 ** (3000000 + a) %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "wide printing": "{% for a in range(9999) %}{{ 'x' * 100000 }}{% endfor %}",
    "deep nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


@contextlib.asynccontextmanager
async def sandbox(folder: Path, source: str | None = None, **how: Any) -> AsyncIterator[SandboxProcess]:
    text = make_text_model()
    if source is not None:
        text = dataclasses.replace(text, chat=ChatTemplate(source))
    (folder / "tokenizer.json").write_text(text.tokenizer.to_json())
    subject = SandboxProcess(str(folder), materials(text, **how))
    try:
        yield subject
    finally:
        await subject.close()


async def render(subject: SandboxProcess, client: str = "a", **how: Any) -> str:
    return unpack_rendered(await subject.run(Render(HELLO, **how), client)).text


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_jobs_give_what_they_would_here(tmp_path: Path) -> None:
    text = make_text_model()

    async def work() -> None:
        async with sandbox(tmp_path) as subject:
            assert await render(subject) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
            long = "hello world, " * 30_000
            ids = unpack_ids(await subject.run(Encode(Rendered((long,)), True), "a"))
            assert list(ids) == text.tokenizer.encode(long)
            answer = msgspec.json.decode(await subject.run(Tokenize(Rendered(("hello",)), True, "strings", 9), "a"))
            assert answer["token_strs"] == ["h", "e", "llo"] and answer["count"] == 3
            body = b'{"messages": [{"role": "user", "content": "<|im_end|>"}], "max_tokens": 3, "odd": 1}'
            call, unknown, _, rendered = unpack("chat", await subject.run(Read("chat", body, 100), "a"))
            assert (call.sampling.max_tokens, unknown, rendered.is_split) == (3, ["odd"], True)

    run(work())


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_as_the_clients_error(name: str, tmp_path: Path) -> None:
    """The model's own, and one that a request brings."""

    async def work() -> None:
        async with sandbox(tmp_path, HOSTILE[name]) as subject:
            for how in ({}, {"template": HOSTILE[name]}):
                with pytest.raises(InvalidRequest) as caught:
                    await render(subject, **how)
                assert caught.value.param in ("messages", "chat_template")
            assert unpack_ids(await subject.run(Encode(Rendered(("hello",)), True), "a"))

    run(work())


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{% if %}", "does not compile"),
        ("{{ messages[0].content | nosuch }}", "nosuch"),
        ("{{ messages[0]['text'] + 1 }}", "rejected the messages"),
        ("{{ raise_exception('never') }}", "never"),
        (HOSTILE["recursion"], ""),
    ],
)
def test_a_template_that_can_render_nothing_is_named_at_load(
    source: str, named: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before any request; one that can is not."""

    async def work() -> None:
        async with sandbox(tmp_path, source) as subject:
            subject.warm_up()
            while not caplog.records:
                await asyncio.sleep(0.01)
            assert named in caplog.text and "--chat-template FILE" in caplog.text
        caplog.clear()
        async with sandbox(tmp_path) as subject:
            subject.warm_up()
            assert await render(subject)
            assert not caplog.records

    run(work())


def test_a_heavy_job_ends_in_time_and_memory(tmp_path: Path) -> None:
    async def work() -> None:
        async with sandbox(tmp_path) as subject:
            lists = b'{"prompt": [' + b"{}," * 6_000_000 + b"{}]}"
            with pytest.raises(InvalidRequest, match=r"memory|processor time"):
                await subject.run(Read("completion", lists, 100), "a")
        async with sandbox(tmp_path, HOSTILE["nested loops"]) as subject:
            with pytest.raises(InvalidRequest, match="Rendering the messages took more") as caught:
                await subject.run(Read("chat", msgspec.json.encode({"messages": HELLO}), 100), "a")
            assert caught.value.param == "messages"

    run(work())


def test_killing_one_job_leaves_the_others(tmp_path: Path) -> None:
    """A slow one, one that is given up, and plain ones beside them."""
    slow = HOSTILE["nested loops"]

    async def work() -> None:
        async with sandbox(tmp_path) as subject:
            await render(subject)
            bad = [asyncio.create_task(render(subject, f"bad{n}", template=slow)) for n in range(4)]
            left = asyncio.create_task(subject.run(Encode(Rendered(("x y" * 1_000_000,)), True), "left"))
            await asyncio.sleep(0.1)
            left.cancel()
            for number in range(20):
                assert "hello" in await render(subject, f"good{number % 2}")
            ends = await asyncio.gather(*bad, left, return_exceptions=True)
            assert [type(end) for end in ends] == [InvalidRequest] * 4 + [asyncio.CancelledError]
            assert subject._forks is not None
            zygote = subject._forks._process.pid
            await asyncio.to_thread(wait_until, lambda: len(children(zygote)) <= 1, "only the renderer lives", 20)

    run(work())


def test_grammars_are_compiled_by_a_child_that_stays(tmp_path: Path) -> None:
    """It gives what would be given here, and a wrong one does not end it."""

    async def work() -> None:
        async with sandbox(tmp_path) as subject:
            await render(subject)
            assert subject._forks is not None
            zygote = subject._forks._process.pid
            for number in range(3):
                constraint = Constraint("choice", ["hello", str(number)], "guided_choice")
                given = await subject.run(CompileGrammar(constraint), "a")
                assert given.decode() == to_grammar(constraint, make_text_model().tokenizer)
                found = children(zygote)
                assert len(found) == 2
                with pytest.raises(InvalidRequest, match="unclosed") as refused:
                    await subject.run(CompileGrammar(Constraint("regex", "(a", "guided_regex")), "a")
                assert refused.value.param == "guided_regex" and children(zygote) == found

    run(work())


def test_a_grammar_that_takes_too_long_is_refused(tmp_path: Path) -> None:
    """By its field, and the next one is compiled."""
    patterns = {f"p{i}": {"type": "string", "pattern": f"^(a|b)*c{{1,{50 + i}}}$"} for i in range(3000)}
    schema = {"type": "object", "properties": patterns, "required": list(patterns)}
    slow = Constraint("json_schema", schema, "guided_json")

    async def work() -> None:
        async with sandbox(tmp_path) as subject:
            for _ in range(2):
                with pytest.raises(InvalidRequest, match=r"Compiling the grammar.*0\.2 s of processor time") as refused:
                    await subject.run(CompileGrammar(slow), "a")
                assert refused.value.param == "guided_json"
                assert await subject.run(CompileGrammar(Constraint("choice", ["x"])), "b")

    run(work())


def test_a_lost_sandbox_is_started_again(tmp_path: Path) -> None:
    async def work() -> None:
        async with sandbox(tmp_path) as subject:
            await render(subject)
            assert subject._forks is not None
            zygote = subject._forks._process.pid
            os.kill(zygote, signal.SIGKILL)
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                with contextlib.suppress(Unavailable):
                    assert await subject.run(Encode(Rendered(("hello",)), True), "a")
                    assert "hello" in await render(subject)
                    return
                await asyncio.sleep(0.1)
            raise AssertionError("it did not come back")

    run(work())


def test_no_call_notices_that_the_sandbox_is_killed_again_and_again(tmp_path: Path) -> None:
    """Its processes, and the one that starts them: a job waits for the next one."""

    async def work() -> None:
        async with sandbox(tmp_path) as subject:
            await render(subject)
            for number in range(4):
                assert subject._forks is not None
                zygote = subject._forks._process.pid
                victims = [*children(zygote)][:1] if number % 2 else [zygote]
                for pid in victims:
                    os.kill(pid, signal.SIGKILL)
                assert "hello" in await render(subject)

    run(work())


def test_a_tokenizer_that_has_changed_is_not_taken(tmp_path: Path) -> None:
    """Its ids would not be the model's."""

    async def work() -> None:
        async with sandbox(tmp_path) as subject:
            await render(subject)
            (tmp_path / "tokenizer.json").write_text("{}")
            with pytest.raises(Unavailable, match="has changed"):
                await subject.run(Encode(Rendered(("hello",)), True), "a")

    run(work())


def test_children_reach_nothing(tmp_path: Path) -> None:
    """No descriptor can be had: no file, no connection."""

    async def work() -> None:
        async with sandbox(tmp_path) as subject:
            await render(subject)
            assert subject._forks is not None
            (child,) = children(subject._forks._process.pid)
            limits = Path(f"/proc/{child}/limits").read_text().splitlines()
            assert next(line for line in limits if line.startswith("Max open files")).split()[3] == "0"

    run(work())


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    pids: list[int] = []

    async def work() -> None:
        async with sandbox(tmp_path) as subject:
            await render(subject)
            assert subject._forks is not None
            pids.append(subject._forks._process.pid)
            pids.extend(children(pids[0]))

    run(work())
    wait_until(lambda: not any(map(alive, pids)), "no process is left")


def test_a_job_that_is_killed_for_want_of_memory_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take that memory again; the next job is done."""
    kills = itertools.count()
    monkeypatch.setattr(parent, "oom_kills", lambda: next(kills))

    async def work() -> None:
        async with sandbox(tmp_path) as subject:
            await render(subject)
            assert subject._forks is not None
            zygote = subject._forks._process.pid
            (renderer,) = children(zygote)
            job = asyncio.create_task(subject.run(Encode(Rendered(("hello " * 1_000_000,)), True), "a"))
            await asyncio.to_thread(wait_until, lambda: len(children(zygote)) == 2, "the job's process", 20)
            (child,) = {*children(zygote)} - {renderer}
            os.kill(child, signal.SIGKILL)
            with pytest.raises(Unavailable, match="more memory than the machine has left"):
                await job
            assert next(subject._forks._numbers) == 2, "one renderer and one process for the job"
            assert "hello" in await render(subject)

    run(work())


def test_want_of_memory_before_a_job_is_not_what_kills_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The renderer stays: the kernel may have killed another process for want of memory in its life."""
    kills = [0]
    monkeypatch.setattr(parent, "oom_kills", lambda: kills[0])
    monkeypatch.setattr(parent, "_LOOK_S", 0.0)

    async def work() -> None:
        async with sandbox(tmp_path) as subject:
            await render(subject)
            kills[0] = 1
            assert subject._forks is not None
            (renderer,) = children(subject._forks._process.pid)
            os.kill(renderer, signal.SIGSTOP)
            job = asyncio.create_task(render(subject))
            for _ in range(10):
                await asyncio.sleep(0)  # it is sent
            os.kill(renderer, signal.SIGKILL)
            assert "hello" in await job

    run(work())


def test_a_renderer_killed_from_outside_is_replaced(tmp_path: Path) -> None:
    """Also while it compiles: that the template is not to blame must not be forgotten."""

    async def work() -> None:
        async with sandbox(tmp_path) as subject:
            await render(subject)
            assert subject._forks is not None
            zygote = subject._forks._process.pid
            for _ in range(5):
                await asyncio.to_thread(wait_until, lambda: len(children(zygote)) == 1, "the renderer alone", 20)
                (child,) = children(zygote)
                os.kill(child, signal.SIGKILL)
                deadline = time.monotonic() + 20
                while True:
                    assert time.monotonic() < deadline
                    with contextlib.suppress(Unavailable):
                        assert "hello" in await render(subject)
                        break
            assert not subject._broken

    run(work())

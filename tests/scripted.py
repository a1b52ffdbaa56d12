"""The HTTP front end over a scripted engine: the real app, client, shell and core; only the model is a script.

`Served` runs them on a loopback port in a thread, so that tests may use blocking clients. The tokenizer is a real
byte-level one whose vocabulary is the 256 bytes, a few merges and three special tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tokenmill.api.jobs import Job, Jobs, pack
from tokenmill.cli.engine_process import flight_recorder
from tokenmill.control.audit.log import AuditLog
from tokenmill.control.kv_store import AskStore
from tokenmill.control.observe.metrics import Metrics
from tokenmill.control.observe.traces import Tracing
from tokenmill.control.signing import Signer
from tokenmill.control.tenants.access import Access
from tokenmill.control.usage.accounting import Accounting
from tokenmill.core import effects
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.errors import BadCheckpoint
from tokenmill.core.events import Ready, WorkerFacts
from tokenmill.core.step import Introduction, RowResult, StepPlan, StepResult, TokenLogprob
from tokenmill.core.tiers import TierFacts
from tokenmill.engine.build import LocalEngineEnd, build_engine, local_link
from tokenmill.engine.recorders import FlightRecorder
from tokenmill.net.mapped_files import new_path
from tokenmill.net.system import MonotonicClock, new_event_loop, new_id, new_seed
from tokenmill.sandbox.parent import SandboxProcess, materials
from tokenmill.sched.admission import max_running
from tokenmill.server.app import Resources, build_app
from tokenmill.server.client import EngineClient
from tokenmill.server.config import ServerConfig
from tokenmill.server.connection import Connection
from tokenmill.server.idempotency.store import AnswerStore
from tokenmill.server.response_store import ResponseStore
from tokenmill.server.run import serve
from tokenmill.server.upstream.upstream import Upstream
from tokenmill.text.chat_template import ChatTemplate
from tokenmill.text.gguf_tokenizer import tokenizer_from_gguf
from tokenmill.text.text_model import TextModel

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 2
READY = Ready("m", 512, 100, (2,), "id", 16, 64)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> list[str]:
    """GPT-2's spelling of the 256 bytes, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


def make_text_model(*, specials: Sequence[str] = (), **changes: Any) -> TextModel:
    """`specials`: further special tokens."""
    merges = ["l l", "ll o", "Ġ w"]
    tokens = [*SPECIAL, *specials, *byte_alphabet(), *(merge.replace(" ", "") for merge in merges)]
    num_special = len(SPECIAL) + len(specials)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * num_special + [1] * (len(tokens) - num_special),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": EOS,
    }
    facts: dict[str, Any] = {
        "chat": ChatTemplate(TEMPLATE, "<|endoftext|>", "<|im_end|>"),
        "eos_token_ids": (EOS,),
        "bos_token_id": None,
        "max_context": 512,
    }
    return TextModel(tokenizer_from_gguf(metadata), **(facts | changes))


class InlineSandbox:
    """A Sandbox that does jobs here: without limits, and while everything else waits."""

    def __init__(self, text: TextModel, *, trust_templates: bool = False) -> None:
        given = materials(text, trust_templates=trust_templates)
        self._jobs = Jobs(given, lambda: text.tokenizer, contextlib.nullcontext)

    async def run(self, job: Job, client: str) -> bytes:
        return self._jobs.run(*pack(job))


class Script:
    """An Executor. `reply` maps the prompt's text to the answer's; an answer that runs out ends with the EOS token.

    `go` cleared: steps hang. `failure` set: steps raise it. The engine's introductions are kept in `introductions`.
    """

    def __init__(self, text: TextModel, reply: Callable[[str], str | Sequence[int]]) -> None:
        self._text = text
        self._reply = reply
        self._sequences: dict[int, tuple[Introduction, Sequence[int]]] = {}
        self.introductions: list[Introduction] = []
        self.unloaded: list[str] = []
        self.jobs: list[effects.Job] = []
        self.stored: set[bytes] = set()
        self.go = asyncio.Event()
        self.go.set()
        self.failure: Exception | None = None
        self.step_s = 0.0

    async def run(self, job: effects.Job) -> str:
        """Any folder of the right name is an adapter; its digest is its path. A store has nothing but `stored`."""
        self.jobs.append(job)
        if isinstance(job, effects.FindBlocks):
            return "".join("01"[key in self.stored] for _, key in job.wanted)
        if isinstance(job, effects.FetchBlocks):
            return "".join("01"[key in self.stored] for _, key, _ in job.moves)
        if not isinstance(job, effects.LoadAdapter | effects.DropAdapter | effects.PrepareGrammar):
            return ""
        if isinstance(job, effects.DropAdapter):
            self.unloaded.append(job.digest)
            return job.digest
        if isinstance(job, effects.PrepareGrammar):
            return ""
        if not job.path.startswith(job.inside) or "missing" in job.path:
            raise BadCheckpoint(f"{job.path} is no adapter")
        return job.path

    async def execute(self, plan: StepPlan) -> StepResult:
        await asyncio.sleep(self.step_s)
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        return StepResult(plan.step, tuple(self._row(row) for row in plan.rows), max(self.step_s, 0.001))

    def _row(self, row: Any) -> RowResult:
        if row.intro is not None:
            self.introductions.append(row.intro)
            answer = self._reply(self._text.tokenizer.decode(row.intro.prompt_tokens, skip_special=False))
            if isinstance(answer, str):
                answer = self._text.tokenizer.encode(answer, add_special=False)
            self._sequences[row.seq] = (row.intro, answer)
        intro, answer = self._sequences[row.seq]
        scores: list[TokenLogprob] = []
        if row.score:
            known = intro.prompt_tokens[row.start + 1 : row.start + row.num_tokens + 1]
            scores = [self._logprob(token, intro.sampling.prompt_logprobs or 0) for token in known]
        if not row.sample:
            return RowResult(row.seq, prompt_logprobs=tuple(scores))
        position = row.start + row.num_tokens - len(intro.prompt_tokens)
        token = answer[position] if position < len(answer) else EOS
        drawn = () if intro.sampling.logprobs is None else (self._logprob(token, intro.sampling.logprobs),)
        return RowResult(row.seq, (token,), drawn, tuple(scores))

    @staticmethod
    def _logprob(token: int, num_top: int) -> TokenLogprob:
        top = tuple((candidate, -1.0 - rank) for rank, candidate in enumerate([token, 3, 4, 5][:num_top]))
        return TokenLogprob(token, -1.0, 1, top)


class Served:
    """A context manager: the app on a free loopback port, with an engine that can be killed and brought back. `folder`:
    an empty one for the tokenizer of a sandbox process; without it jobs are done inline. `new_loop` makes the event
    loop, by default the one of a server. `flight_dir`: where the engine's steps are recorded. `tiers`: of its KV
    store."""

    new_loop = staticmethod(new_event_loop)

    def __init__(
        self,
        reply: Callable[[str], str | Sequence[int]] = lambda prompt: "hello world",
        *,
        text: TextModel | None = None,
        engine: EngineConfig | None = None,
        step_s: float = 0.0,
        drain_s: float = 1.0,
        attach: bool = True,
        folder: Path | None = None,
        listen: dict[str, Any] | None = None,
        store: ResponseStore | None = None,
        access: Access | None = None,
        accounting: Accounting | None = None,
        answers: AnswerStore | None = None,
        flight_dir: Path | None = None,
        tracing: Tracing | None = None,
        audit: AuditLog | None = None,
        signer: Signer | None = None,
        upstreams: Sequence[Upstream] = (),
        tiers: tuple[TierFacts, ...] = (),
        ask_kv: AskStore | None = None,
        **settings: Any,
    ) -> None:
        self.text = text or make_text_model()
        self.engine = engine or EngineConfig(groups=full_groups(64), max_model_len=512)
        self.config = ServerConfig(**({"model_names": ("toy",), "allowed_hosts": ("x",)} | settings))
        self._reply = reply
        self._step_s = step_s
        self._drain_s = drain_s
        self._attach = attach
        self._folder = folder
        self._listen = listen or {}
        self.store = store
        self.access = access
        self.accounting = accounting
        self.answers = answers
        self._flight_dir = flight_dir
        self._tracing = tracing
        self._num_engines = 0
        self._tiers = tiers
        self.audit = audit
        self.signer = signer
        self.upstreams = upstreams
        self.ask_kv = ask_kv
        self._started = threading.Event()

    def ask(
        self, path: str, body: Any = None, method: str | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, str, str]:
        """(status, text, content type), whatever the status."""
        data = None if body is None else json.dumps(body).encode()
        call = urllib.request.Request(
            self.url + path, data, {"content-type": "application/json", **(headers or {})}, method=method
        )
        try:
            answer = urllib.request.urlopen(call, timeout=20)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            return answer.status, answer.read().decode(), answer.headers["content-type"]

    def __enter__(self) -> Served:
        self._thread = threading.Thread(target=self._run, name="served")
        self._thread.start()
        assert self._started.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self.new_loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.client = EngineClient()
        clock = MonotonicClock()
        trusts = self.config.allow_chat_template
        sandbox: InlineSandbox | SandboxProcess = InlineSandbox(self.text, trust_templates=trusts)
        if self._folder is not None:
            (self._folder / "tokenizer.json").write_text(self.text.tokenizer.to_json())
            sandbox = SandboxProcess(str(self._folder), materials(self.text, trust_templates=trusts))
        self.sandbox = sandbox
        resources = Resources(
            clock=clock,
            new_seed=new_seed,
            new_id=new_id,
            store=self.store,
            access=self.access,
            accounting=self.accounting,
            answers=self.answers,
            audit=self.audit,
            signer=self.signer,
            tracing=self._tracing,
            upstreams=self.upstreams,
            ask_kv=self.ask_kv,
        )
        self.app = build_app(self.config, self.text, self.client, sandbox, resources)
        self.script = Script(self.text, self._reply)
        self.script.step_s = self._step_s
        self._engine: asyncio.Task[None] | None = None
        if self._attach:
            self._start_engine()

        def started(host: str, port: int) -> None:
            self.address = (host, port)
            self.url = f"http://{host}:{port}"
            self._started.set()

        self._serving = asyncio.create_task(
            serve(self.app, "127.0.0.1", 0, drain_s=self._drain_s, on_started=started, **self._listen)
        )
        try:
            await self._serving
        except asyncio.CancelledError:
            pass
        finally:
            if isinstance(sandbox, SandboxProcess):
                await sandbox.close()
            self.client.close("The test is over.")
            if self._engine is not None:
                self._engine.cancel()
                await asyncio.gather(self._engine, return_exceptions=True)

    def _start_engine(self) -> None:
        engine_end, front_end = local_link()
        flight = "" if self._flight_dir is None else new_path(str(self._flight_dir), str(self._num_engines))
        self._num_engines += 1
        self.link = self.client.attach(front_end, flight=flight)
        self._engine = asyncio.create_task(self._run_engine(engine_end, flight))

    async def _run_engine(self, link: LocalEngineEnd, flight: str) -> None:
        with flight_recorder(flight, "toy") as recorder:
            await self._run_recorded(link, recorder)

    async def _run_recorded(self, link: LocalEngineEnd, recorder: FlightRecorder | None) -> None:
        config = self.engine
        first = (effects.StoreOpened(tiers=self._tiers, writes=effects.WRITE_THROUGH),) if self._tiers else ()
        shell = build_engine(config, self.script, link, MonotonicClock(), first=first, flight=recorder)
        ready = Ready(
            "toy", config.max_model_len, self.text.tokenizer.vocab_size, (EOS,), "toy-numerics", config.block_size,
            config.groups[0].num_blocks, max_num_seqs=max_running(config),
            max_num_batched_tokens=config.max_num_batched_tokens, tiers=self._tiers,
            worker=WorkerFacts("w0", kv_store="s") if self._tiers else WorkerFacts(),
        )  # fmt: skip
        await link.send(ready)
        try:
            await shell.run()
        finally:
            link.close()

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the server's loop and give its result."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(20)

    def kill_engine(self) -> None:
        """The engine ends without a word, as after kill -9."""

        def kill() -> None:
            assert self._engine is not None
            self._engine.cancel()

        self.call(kill)

    def restart_engine(self) -> None:
        self.call(self._start_engine)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Wait until `condition` holds on the server's loop."""

        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.005)

        asyncio.run_coroutine_threadsafe(asyncio.wait_for(wait(), timeout_s), self.loop).result(timeout_s + 5)

    def connect(self) -> socket.socket:
        """A raw connection, for clients that misbehave."""
        return socket.create_connection(self.address, timeout=20)


def made_connections(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[Connection]:
    """Those that servers accept from now on, as long as anything holds them."""
    made: weakref.WeakSet[Connection] = weakref.WeakSet()
    init = Connection.__init__

    def make(self: Connection, *args: Any, **how: Any) -> None:
        init(self, *args, **how)
        made.add(self)

    monkeypatch.setattr(Connection, "__init__", make)
    return made


def attached(test: Callable[[EngineClient, LocalEngineEnd], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run the test with a client whose engine's end of the link is in the test's hands."""

    async def main() -> None:
        client = EngineClient()
        client.observers.metrics = Metrics("m", 512)
        engine, front = local_link()
        client.attach(front)
        await engine.send(READY)
        while client.ready is None:
            await asyncio.sleep(0)
        await test(client, engine)
        client.close("over")

    def run() -> None:
        asyncio.run(asyncio.wait_for(main(), 30))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run

"""The front end's side of the sandbox process: it is started when first needed, and again when it was lost.

One child of it stays and renders chat templates, one after the other, and another compiles grammars; up to two more are
forked for one heavy job each. A job ends with its caller: a child whose caller has gone is killed, and another takes up
what waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Coroutine
from functools import partial
from typing import Any

import msgspec

from ..api.jobs import (
    GRAMMAR_S,
    JOB_BYTES,
    JOB_S,
    NEED_TOKENIZER,
    RENDER_BYTES,
    RENDER_S,
    Compile,
    CompileGrammar,
    Job,
    Materials,
    Render,
    pack,
)
from ..api.rules import rules_of
from ..core import errors
from ..core.errors import BadCheckpoint, EngineFailed, InvalidRequest, TokenmillError, Unavailable
from ..core.units import MiB
from ..net.framing import Pipe
from ..node.machine import oom_kills
from ..node.memory import trim_heap
from ..text.grammar.matcher import BYTES_PER_TOKEN
from ..text.text_model import TextModel
from .child import LENGTH, RESULT, Failure, SandboxLaunch, file_stamp
from .fair_queueing import FairQueue

NUM_HEAVY = 2
_END_S = 1.0
_RESTART_S = 1.0
"""At least between two starts."""

_LOOK_S = 1.0
"""Between two looks at how often the kernel killed for want of memory: one costs twice what a short job does here."""

_NUM_TRIES = 4
"""Of a job whose process was killed from outside: that is not the job's fault, and jobs change nothing."""

_PLAIN = Render(({"role": "user", "content": "Hello"},))
"""What every template of a chat model can render."""

_TRIM_BYTES = MiB
_TRIM_AFTER_S = 1.0

_log = logging.getLogger(__name__)


def sandbox_bytes(base_bytes: int, vocab_size: int) -> int:
    """What the sandbox process and its children take at most, for the printed plan. `base_bytes`: of an interpreter
    with the model's tokenizer, to which grammars add what they need of the vocabulary."""
    return base_bytes + vocab_size * BYTES_PER_TOKEN + 2 * RENDER_BYTES + NUM_HEAVY * JOB_BYTES


def materials(text: TextModel, *, trust_templates: bool = False, allow_special: bool = False) -> Materials:
    """What a sandbox needs of a model. allow_special: special tokens that messages spell count as such."""
    specials = () if allow_special else tuple(text.tokenizer.special_texts())
    return Materials(
        text.chat,
        specials,
        rules_of(text, trust_templates),
        text.eos_token_ids,
    )


class SandboxProcess:
    """A `api.sandbox.Sandbox`. Belongs to one event loop."""

    def __init__(self, path: str, materials: Materials) -> None:
        self._launch = SandboxLaunch(path, file_stamp(path), materials)
        self._quick = FairQueue(1, 1)
        self._compiling = FairQueue(1, 1)
        self._compiler: _Child | None = None
        self._heavy = FairQueue(NUM_HEAVY, NUM_HEAVY - 1)
        self._forks: _Forks | None = None
        self._renderer: _Child | None = None
        self._broken = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._not_before_s = 0.0
        self._is_closed = False
        self._trimming: asyncio.TimerHandle | None = None

    def warm_up(self) -> None:
        """Start the process and have the model's template compiled and tried, before the first request needs them. A
        template that cannot render a plain message is named in the log."""
        if self._launch.materials.chat is not None:
            self._begin(self._prepare(_PLAIN))

    def warm_up_grammars(self) -> None:
        """Have done what the first grammar would wait for: tenths of a second, of one processor."""
        self._begin(self._prepare_grammars())

    async def close(self) -> None:
        """Ends the process; what waits for it fails."""
        self._is_closed = True
        if self._trimming is not None:
            self._trimming.cancel()
        self._lose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def run(self, job: Job, client: str) -> bytes:
        """As Sandbox.run."""
        data, body = pack(job)
        if isinstance(job, Render) and job.template is None:
            turns, work = self._quick, self._render
        elif isinstance(job, CompileGrammar):
            turns, work = self._compiling, self._compile
        else:
            turns, work = self._heavy, partial(self._do, job, body)
        async with turns.turn(client, len(data) + len(body)):
            for num_left in reversed(range(_NUM_TRIES)):
                try:
                    result = await work(data)
                    break
                except _Killed as killed:
                    if not killed.is_from_outside or not num_left:
                        turns.note_end(client, was_killed=True)
                        raise killed.reason(job) from None
                except EOFError:
                    if self._is_closed or not num_left:
                        raise Unavailable("The sandbox process is down; retry in a second.") from None
                    await asyncio.sleep(_RESTART_S)
        turns.note_end(client, was_killed=False)
        if len(data) + len(body) + len(result) > _TRIM_BYTES and self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._trim)
        return _open(result)

    def _trim(self) -> None:
        """What large bodies and results have left behind goes back to the system."""
        self._trimming = None
        trim_heap()

    async def _do(self, job: Job, body: bytes, data: bytes) -> bytes:
        """In a child of its own."""
        child = self._started().fork(b"t" if isinstance(job, NEED_TOKENIZER) else b"h")
        try:
            return await child.ask(data, body)
        finally:
            child.close()

    async def _render(self, data: bytes) -> bytes:
        """In the child that stays."""
        child = await self._ready_renderer()
        try:
            return await child.ask(data)
        except BaseException:
            self._close_renderer()
            if not self._is_closed:
                self._begin(self._prepare())  # while nobody waits for it
            raise

    async def _compile(self, data: bytes) -> bytes:
        """In the child that stays."""
        if self._compiler is None:
            self._compiler = self._started().fork(b"g")
        try:
            return await self._compiler.ask(data)
        except BaseException:
            self._close_compiler()
            raise

    def _close_compiler(self) -> None:
        if self._compiler is not None:
            self._compiler.close()
            self._compiler = None

    async def _ready_renderer(self) -> _Child:
        """With the model's template compiled. Raises InvalidRequest where it cannot be."""
        if self._renderer is None:
            if self._broken:
                raise InvalidRequest(self._broken, param="messages")
            self._renderer = self._started().fork(b"q")
            job = Compile()
            try:
                _open(await self._renderer.ask(*pack(job)))
            except BaseException as error:
                self._close_renderer()
                reason = error.reason(job) if isinstance(error, _Killed) else error
                if isinstance(reason, (BadCheckpoint, InvalidRequest)):
                    self._broken = f"This model's chat template cannot be used. {reason.message}"
                    raise InvalidRequest(self._broken, param="messages") from None
                raise
        return self._renderer

    def _close_renderer(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    async def _prepare(self, trial: Render | None = None) -> None:
        async with self._quick.turn("", 0):
            try:
                renderer = await self._ready_renderer()
                if trial is not None:
                    _open(await renderer.ask(*pack(trial)))
            except (TokenmillError, EOFError, _Killed) as error:
                reason: BaseException = error
                if isinstance(error, _Killed):
                    self._close_renderer()
                    reason = error.reason(trial or Compile())
                if isinstance(reason, InvalidRequest):  # the next request finds any other again, and is told
                    _log.warning("%s Chat is refused; --chat-template FILE gives another.", reason.message)

    async def _prepare_grammars(self) -> None:
        with contextlib.suppress(TokenmillError):  # the first grammar finds the same, and is told
            await self.run(CompileGrammar(None), "")

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="sandbox")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _started(self) -> _Forks:
        """The running process. Raises EOFError while there is none."""
        now_s = asyncio.get_running_loop().time()
        if self._forks is not None and self._forks.is_gone:
            _log.error("The sandbox process has ended; it is started again.")
            self._lose()
        if self._forks is None:
            if self._is_closed or now_s < self._not_before_s:
                raise EOFError
            self._not_before_s = now_s + _RESTART_S
            self._forks = _Forks(self._launch)
        return self._forks

    def _lose(self) -> None:
        self._close_renderer()
        self._close_compiler()
        if self._forks is not None:
            self._forks.close()
            self._forks = None


class _Forks:
    """The running process."""

    def __init__(self, launch: SandboxLaunch) -> None:
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as told:
            told.write(msgspec.msgpack.encode(launch))
            told.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tokenmill.sandbox.child", str(theirs.fileno())],
                stdin=told,
                stdout=2,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
        self._socket = ours
        self._control = Pipe()
        self._control.connect(ours)
        self._numbers = itertools.count()
        self._ended: dict[int, asyncio.Future[int | None]] = {}
        self.is_gone = False
        self._reading = asyncio.create_task(self._read(), name="sandbox-control")

    def fork(self, kind: bytes) -> _Child:
        """kind: as at the head of child.py. Raises EOFError."""
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._socket, [kind + number.to_bytes(4, "little")], [theirs.fileno()])
            except OSError:
                ours.close()
                raise EOFError from None
        ended = self._ended[number] = asyncio.get_running_loop().create_future()
        return _Child(self, number, ours, ended)

    def kill(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(b"k" + number.to_bytes(4, "little"))

    def close(self) -> None:
        """The process ends by itself, with its children, when its control socket closes."""
        self._reading.cancel()
        self._control.end()
        self._forget()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def _read(self) -> None:
        try:
            while True:
                report = await self._control.receive()
                ended = self._ended.pop(int.from_bytes(report[:4], "little"), None)
                if ended is not None and not ended.done():
                    ended.set_result(int.from_bytes(report[4:], "little", signed=True))
        except EOFError:
            self._forget()

    def _forget(self) -> None:
        self.is_gone = True
        for ended in self._ended.values():
            if not ended.done():
                ended.set_result(None)
        self._ended.clear()


class _Child:
    """One forked process. `ended`: its exit status, or None when nobody is left to tell."""

    def __init__(self, forks: _Forks, number: int, end: socket.socket, ended: asyncio.Future[int | None]) -> None:
        self._forks = forks
        self._number = number
        self._ended = ended
        self._oom_kills, self._looked_s = oom_kills(), asyncio.get_running_loop().time()
        self._pipe = Pipe()
        self._pipe.connect(end)

    async def ask(self, data: bytes, body: bytes = b"") -> bytes:
        """Raises _Killed when it died of the job, and EOFError when the whole sandbox is gone."""
        was_gone = self._ended.done()  # not by this job
        now_s = asyncio.get_running_loop().time()
        if now_s - self._looked_s > _LOOK_S:  # a child that stays may have seen kills for other jobs
            self._oom_kills, self._looked_s = oom_kills(), now_s
        try:
            await self._pipe.send(len(data).to_bytes(LENGTH, "little") + data, body)
            return await self._pipe.receive()
        except EOFError:
            status = await asyncio.shield(self._ended)
            if status is None:
                raise
            is_killed = status == -signal.SIGKILL and not was_gone
            raise _Killed(status, is_killed and oom_kills() > self._oom_kills) from None

    def close(self) -> None:
        self._pipe.end()
        if not self._ended.done():
            self._forks.kill(self._number)


class _Killed(Exception):
    """A child ended before it gave a result. has_oom_kill: the kernel has killed a process for want of memory since the
    job began or a second before: to do it again would take that memory again."""

    def __init__(self, status: int, has_oom_kill: bool) -> None:
        self._status = status
        self._has_oom_kill = has_oom_kill

    @property
    def is_from_outside(self) -> bool:
        return self._status in (-signal.SIGKILL, -signal.SIGTERM) and not self._has_oom_kill

    def reason(self, job: Job) -> TokenmillError:
        if self._has_oom_kill:
            return Unavailable(f"{job.does} needs more memory than the machine has left; retry later.")
        if self.is_from_outside:
            return Unavailable("The sandbox's process was killed from outside; retry.")
        if self._status == 1:  # it has printed a traceback
            return EngineFailed("Internal error; see the server's log.")
        param = job.param
        if self._status == -signal.SIGPROF:
            limit_s = GRAMMAR_S if isinstance(job, CompileGrammar) else JOB_S
            why = f"{job.does} took more than {limit_s:g} s of processor time."
        elif self._status == -signal.SIGVTALRM:
            why, param = f"Rendering the messages took more than {RENDER_S:g} s of processor time.", "messages"
        else:
            most = RENDER_BYTES if isinstance(job, (Render, Compile, CompileGrammar)) else JOB_BYTES
            why = f"{job.does} took more memory than the {most // MiB} MiB it may."
        advice = "Make it simpler." if isinstance(job, CompileGrammar) else "Send less at once."
        return InvalidRequest(f"{why} {advice}", param=param)


def _open(result: bytes) -> bytes:
    """What the job gave; raises what it raised."""
    if result[:1] == RESULT:
        return result[1:]
    failure = msgspec.msgpack.decode(memoryview(result)[1:], type=Failure)
    raise getattr(errors, failure.name)(failure.message, param=failure.param)

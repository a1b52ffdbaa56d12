"""The sandbox process: it forks, and its children work on what is heavy or hostile, with limits on time and memory.

    front end                                           this process
    SandboxLaunch on standard input          ------->    read once
    "q", "g", "h" or "t", number, socket    ------->    a child is forked that does the jobs of that socket
    "k" + number                            ------->    the child is killed
    number and exit status                  <-------    a child has ended

It has no threads and does no job itself, so that a fork is a copy of something simple, and a child's memory goes back
with the child. A "q" child renders templates one after the other, and a "g" child compiles grammars; an "h" child does
one job, at a low priority, and a "t" child has the tokenizer for it. Each job's processor time is limited by a timer of
the kernel's, whose signal ends the child whatever it is doing, its memory by RLIMIT_AS, and no child can open a file or
a connection: it may have no further descriptors. When the front end ends, however it ends, its end of the control
socket closes, and this process takes its children with it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..api.jobs import GRAMMAR_S, JOB_BYTES, JOB_S, MAX_RESULT_BYTES, RENDER_BYTES, RENDER_S, Jobs, Materials
from ..core.errors import InvalidRequest, TokenmillError, Unavailable
from ..text.chat_format import ChatFormat
from ..text.chat_template import ChatTemplate, Renderer
from ..text.tokenizer import Tokenizer

LENGTH = 4
"""Bytes of the length before each message, lowest first, as on the link (`net.framing`)."""

RESULT, FAILURE = b"=", b"!"
OUT_OF_MEMORY = 3
_NICE = 10
_PAGE = resource.getpagesize()


class SandboxLaunch(msgspec.Struct, frozen=True):
    """path: of the checkpoint, whose tokenizer is loaded when it is first needed. stamp: of the file that it is in, by
    `file_stamp`, when the front end read it."""

    path: str
    stamp: tuple[int, int]
    materials: Materials


class Failure(msgspec.Struct, frozen=True):
    """A TokenmillError: the name of its class, message and field."""

    name: str
    message: str
    param: str | None


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the front end's to answer
    control = socket.socket(fileno=int(sys.argv[1]))
    launch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=SandboxLaunch)
    jobs = Jobs(launch.materials, lambda: _load_tokenizer(launch), _limited_rendering)
    _preload(launch.materials.rules.chat_format)
    gc.collect()
    gc.freeze()  # children share what is not touched
    _Forks(control, jobs).serve()
    return 0


class _Forks:
    """The children, by the front end's numbers."""

    def __init__(self, control: socket.socket, jobs: Jobs) -> None:
        self._control = control
        self._jobs = jobs
        self._pids: dict[int, int] = {}

    def serve(self) -> None:
        """Until the front end has gone."""
        read_fd, write_fd = os.pipe()
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        try:
            while True:
                ready: list[int] = select.select([self._control.fileno(), read_fd], [], [])[0]
                if read_fd in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(read_fd, 4096)
                    self._reap()
                if self._control.fileno() in ready and not self._obey():
                    break
        except (BrokenPipeError, ConnectionResetError):
            pass
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)

    def _obey(self) -> bool:
        """One message. False: there will be no more."""
        data, fds, _, _ = socket.recv_fds(self._control, 5, 1)
        if not data:
            return False
        kind, number = data[:1], int.from_bytes(data[1:5], "little")
        if kind == b"k":
            if number in self._pids:
                os.kill(self._pids[number], signal.SIGKILL)
            return True
        with socket.socket(fileno=fds[0]) as end:
            if kind in b"tg":
                self._load(kind)
            pid = os.fork()
            if pid == 0:
                self._become_child(kind, end)
            self._pids[number] = pid
        return True

    def _load(self, kind: bytes) -> None:
        """The tokenizer, and what grammars need, once for all children. A child that then lacks it tells why."""
        with contextlib.suppress(TokenmillError, OSError):
            if kind == b"g":
                self._jobs.load_vocabulary()
            self._jobs.load_tokenizer()
            gc.freeze()

    def _reap(self) -> None:
        for number, pid in list(self._pids.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._pids[number]
                report = number.to_bytes(4, "little") + os.waitstatus_to_exitcode(status).to_bytes(
                    4, "little", signed=True
                )
                self._control.sendall(len(report).to_bytes(LENGTH, "little") + report)

    def _become_child(self, kind: bytes, end: socket.socket) -> None:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGPROF, signal.SIGVTALRM):
                signal.signal(number, signal.SIG_DFL)
            self._control.close()
            stays = kind in b"qg"
            _limit(RENDER_BYTES if stays else JOB_BYTES)
            if not stays:
                os.nice(_NICE)
            _work(end, self._jobs, GRAMMAR_S if kind == b"g" else JOB_S, once=not stays)
            code = 0
        except BrokenPipeError:
            code = 0  # nobody waits for it any more
        except MemoryError:
            code = OUT_OF_MEMORY
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def _work(end: socket.socket, jobs: Jobs, limit_s: float, *, once: bool) -> None:
    """limit_s: processor time of a job."""
    while (message := receive(end)) is not None:
        cut = LENGTH + int.from_bytes(message[:LENGTH], "little")
        data, body = message[LENGTH:cut], message[cut:]
        del message
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            result = RESULT + jobs.run(data, body)
            if len(result) > MAX_RESULT_BYTES:
                raise InvalidRequest(f"The result has {len(result)} bytes; {MAX_RESULT_BYTES} are allowed.")
        except TokenmillError as error:
            result = FAILURE + msgspec.msgpack.encode(Failure(type(error).__name__, error.message, error.param))
        signal.setitimer(signal.ITIMER_PROF, 0)
        del data, body
        end.sendall(len(result).to_bytes(LENGTH, "little"))
        end.sendall(result)
        if once:
            return


@contextlib.contextmanager
def _limited_rendering() -> Iterator[None]:
    signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _limit(num_bytes: int) -> None:
    """`num_bytes` more than there are now, no further descriptor, no core file."""
    limits = {resource.RLIMIT_NOFILE: 0, resource.RLIMIT_CORE: 0}
    with contextlib.suppress(OSError), open("/proc/self/statm", "rb") as file:
        limits[resource.RLIMIT_AS] = int(file.read().split()[0]) * _PAGE + num_bytes
    for name, value in limits.items():
        resource.setrlimit(name, (value, value))


def _preload(chat_format: ChatFormat) -> None:
    """What is imported or read at first use, plug-ins' families among it: children cannot."""
    chat_format.parser(None, "")
    message = {"role": "user", "content": ""}
    Renderer(ChatTemplate("{{ strftime_now('%c') }}{{ messages | tojson(indent=1) }}{{ lipsum() }}")).render([message])
    for wrong in ("{% if %}", "{{ 1 / 0 }}", "{{ ''.__class__ }}", "{{ nothing.nothing }}"):
        with contextlib.suppress(TokenmillError):
            Renderer(ChatTemplate(wrong)).render([message])


def file_stamp(path: str) -> tuple[int, int]:
    """Size of the file that has the tokenizer, and when it was changed, in nanoseconds; zeros where there is none."""
    from ..text.hf_tokenizer import tokenizer_file

    file = tokenizer_file(Path(path)) if os.path.isdir(path) else path
    try:
        found = os.stat(file)
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _load_tokenizer(launch: SandboxLaunch) -> Tokenizer:
    """Raises Unavailable when it would not be the front end's any more."""
    from ..formats.gguf import open_gguf
    from ..text.gguf_tokenizer import tokenizer_from_gguf
    from ..text.hf_tokenizer import tokenizer_from_folder

    if file_stamp(launch.path) != launch.stamp:
        raise Unavailable("The model's file has changed since the server read it; the server must be started again.")
    path = Path(launch.path)
    return tokenizer_from_folder(path) if path.is_dir() else tokenizer_from_gguf(open_gguf(path).metadata)


def receive(end: socket.socket) -> bytes | None:
    """The next message, or None when there will be none."""
    size = _receive_exactly(end, LENGTH)
    return None if size is None else _receive_exactly(end, int.from_bytes(size, "little"))


def _receive_exactly(end: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        try:
            num_bytes = end.recv_into(view[at:])
        except ConnectionResetError:
            return None
        if not num_bytes:
            return None
        at += num_bytes
    view.release()
    return bytes(data)


if __name__ == "__main__":
    sys.exit(main())

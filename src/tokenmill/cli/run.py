"""`run`: talk with a model by its name, through a server of this machine, which is started where none has the model.

A server that is started so is the user's, not the terminal's: others may call it meanwhile, and it ends by itself when
it has not been used for `--keepalive`. `tokenmill ps` lists it, `tokenmill stop` ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from ..api.common_fields import template_switch
from ..core.errors import ConfigError, Unavailable
from .chat import Conversation, show
from .models import resolve_model
from .options import sampling_overrides
from .partners import Message, ServerPartner, api_key, tell_if_small
from .servers import READY, SILENT, Served, running, servers_dir

_POLL_S = 0.05


def run(args: argparse.Namespace) -> int:
    """One answer where a prompt is given or piped; else a conversation."""
    piped = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    prompt = " ".join(text for text in (piped, *args.prompt) if text)
    if not prompt and not sys.stdin.isatty():
        raise ConfigError("There is no prompt: give one after the model, or on standard input.", param="prompt")
    overrides = {**sampling_overrides(args), **_format(args.format), **_think(args.think)}
    key = api_key(args)
    served = find_or_start(args.model, args.keepalive, key)

    def restarted() -> str:
        return find_or_start(args.model, args.keepalive, key).address

    has_it = served.asked(key).has(args.model)
    partner = ServerPartner(
        served.address, key, overrides, args.model if has_it else served.title, restarted, args.loop_guard
    )
    if not prompt:
        return Conversation(partner, args.system).run()
    messages: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
    messages.append({"role": "user", "content": prompt})
    tell_if_small(partner.num_parameters)
    console = Console(highlight=False, soft_wrap=True)
    show(partner, messages, console, thoughts=console.is_terminal and not args.hidethinking, figures=args.verbose)
    return 0


def _format(text: str | None) -> dict[str, Any]:
    """As Ollama's flag: 'json', or a JSON schema."""
    if text is None:
        return {}
    if text == "json":
        return {"response_format": {"type": "json_object"}}
    try:
        schema = json.loads(text)
    except ValueError as error:
        why = f'this is no JSON ({error}); a schema in a file: --format "$(cat FILE)"'
        raise ConfigError(f"--format must be json, or a JSON schema: {why}.", param="format") from None
    if not isinstance(schema, dict):
        raise ConfigError("--format must be json, or a JSON schema, which is an object.", param="format")
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "format", "schema": schema}}}


def _think(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    fields: dict[str, Any] = {"chat_template_kwargs": template_switch(text != "false")}
    return fields if text in ("true", "false") else {**fields, "reasoning_effort": text}


def find_or_start(model: str, keep_s: int, key: str | None) -> Served:
    """A server that has the model, and is ready. Fetches what is not there yet. Raises TokenmillError."""
    found = next((each for each in _reachable() if each.asked(key).has(model)), None)
    if found is None:
        resolved = resolve_model(model)
        path = os.path.abspath(resolved.path)
        named = path if resolved.source == "path" else model
        folder = servers_dir()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = folder / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', resolved.served_name)}.log"
        with _alone(log):
            found = next((each for each in _reachable() if each.path == path), None) or _start(named, keep_s, log)
    while found.state() != READY:
        if found not in running():
            raise Unavailable(f"The server at {found.address} has ended.")
        time.sleep(_POLL_S)
    return found


def _reachable() -> Iterator[Served]:
    """Over HTTP, without a certificate that may be another machine's; one that is asked to stop does not answer."""
    return (each for each in running() if each.address.startswith("http://") and each.state() != SILENT)


@contextlib.contextmanager
def _alone(log: Path) -> Iterator[None]:
    """Of several that want the model at once, one starts its server, and the others find it."""
    with open(log, "a", encoding="utf8") as file:
        log.chmod(0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _start(model: str, keep_s: int, log: Path) -> Served:
    """In the background, on a free port; what it says goes to `log`. Ends it where its start is interrupted."""
    command = [sys.executable, "-P", "-m", "tokenmill.cli.main", "serve", model, "--port=0"]
    env = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}  # of the service that calls us
    os.truncate(log, 0)
    with open(log, "a", encoding="utf8") as file:
        process = subprocess.Popen(
            [*command, f"--exit-idle-time={keep_s}"],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, start_new_session=True,
        )  # fmt: skip
    console = Console(stderr=True)
    status = console.status(f"starting {model}") if console.is_terminal else contextlib.nullcontext()
    try:
        with status:
            while process.poll() is None:
                found = next((each for each in running() if each.pid == process.pid), None)
                if found is not None and found.state() == READY:
                    process.returncode = 0  # it outlives this process; without that, Popen warns that nobody waits
                    return found
                time.sleep(_POLL_S)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    said = [line for line in log.read_text(encoding="utf8", errors="replace").splitlines() if line.strip()]
    why = said[-1].removeprefix("tokenmill: ") if said else f"exit code {process.returncode}"
    raise Unavailable(f"The server of {model} did not start: {why} (all it said: {log})")

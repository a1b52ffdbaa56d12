"""Flags of `serve` about its processes, and about where it listens and for whom; and what these come to."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..cluster.failures import LIMIT_S
from ..cluster.pools import DECISIONS
from ..cluster.replication import POLICIES as REPLICATION
from ..cluster.rescheduling import POLICIES
from ..cluster.router import OF_GATEWAYS, ROUTING_POLICIES, USUAL_ROUTING
from ..core.errors import ConfigError
from ..core.masking import MIN_KEY_CHARS
from ..core.options import check, option, seconds
from ..node.options import TIERS
from ..node.policy_file import take_own_policies
from ..server.config import KEYS, LOAD, LOGS, ServerConfig
from .keys import duration
from .logs import FORMATS
from .options import given_options, read_seed
from .parser import DEFAULT_MODEL
from .state import OFF, default_state_dir

if TYPE_CHECKING:
    import ssl

KEY_VARIABLES = ("TOKENMILL_API_KEY", "VLLM_API_KEY", "LLAMA_API_KEY")
LOG_LEVELS = ("debug", "info", "warning", "error")


def port_number(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 5 and int(text) < 2**16:
        return int(text)
    raise ValueError(f"must be a port from 0 to 65535, got {text!r}.")


def lora_module(text: str) -> tuple[str, str]:
    """'name=path', or JSON with "name" and "path" as vLLM takes it."""
    name, equals, path = text.partition("=")
    if text.startswith("{"):
        with contextlib.suppress(ValueError, KeyError):
            given = json.loads(text)
            name, equals, path = str(given["name"]), "=", str(given["path"])
    if not (name and equals and path):
        raise ValueError(f"must be NAME=PATH, got {text!r}.")
    return name, path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What `serve` does besides answering: seeds, adapters, its processes. Raises ConfigError."""

    seed: int | None = option(
        None,
        "requests that bring no seed draw theirs from this one, in order of arrival (default: fresh ones)",
        also="-s",
        read=read_seed,
        metavar="N",
        group="text",
    )
    lora_modules: tuple[tuple[str, str], ...] = option(
        (),
        "adapters to serve, each under a model name of its own (repeatable)",
        several="all",
        read=lora_module,
        metavar="NAME=PATH",
        group="text",
    )
    drain_s: float = option(30.0, "on SIGTERM, let requests finish this long (default: 30)", read=seconds, metavar="S")
    engine_timeout_s: float = option(
        60.0,
        "replace an engine that has work and makes no progress this long; 0: never (default: 60)",
        read=seconds,
        metavar="S",
    )
    liveness_s: float = option(
        LIMIT_S,
        "take an engine out that has work and gives no sign of life this long, or whose step does not get on this long"
        " and for five times what it should take; 0: never (default: 2)",
        read=seconds,
        metavar="S",
    )
    start_limit_s: float | None = option(
        None,
        "end what waits when no engine could be started this long (default: 30, or three times its last start if that"
        " is longer)",
        read=seconds,
        metavar="S",
    )
    disaggregation: str = option(
        "cost",
        "which requests have their prompt computed by a worker of the pool prefill and their answer by one of the pool"
        " decode: those for which it costs less, all that can, or none (default: cost)",
        choices=DECISIONS,
        takes_own=True,
        group=LOAD,
    )
    migration: str = option(
        "on",
        "move running requests between workers, with their KV, to balance load, to make room for long ones and when a"
        " worker leaves (default: on)",
        choices=POLICIES,
        takes_own=True,
        group=LOAD,
    )
    replication: str = option(
        "on",
        "copy a prefix that is asked for more often than the workers that have it cached can serve to further ones,"
        " before requests need it there (default: on)",
        choices=REPLICATION,
        takes_own=True,
        group=LOAD,
    )
    routing_policy: str = option(
        USUAL_ROUTING,
        "which of several engines gets a request (default: kv_aware, the one predicted to give its first token first)",
        choices=ROUTING_POLICIES,
        takes_own=True,
        group=LOAD,
    )
    journal: str | None = option(
        None,
        "write all that the engine is told and plans to FILE, prompts and answers included, so that a run can be "
        "replayed by python -m tokenmill.sim.run --replay FILE "
        "(mode 0600; up to 1 GiB; those of three earlier starts are kept beside it)",
        metavar="FILE",
        group=LOGS,
    )
    flight_recorder: str | None = option(
        None,
        "folder for the last steps of each engine, which stay when it dies (see tokenmill flight), or 'off' "
        "(default: flight in the user's state folder)",
        metavar="DIR|off",
        group=LOGS,
    )
    step_log: str | None = option(
        None,
        "write what each step had to do and how long it took to FILE, for tokenmill calibrate: lengths and times, no "
        "texts (30 MiB, the last 262,144 steps; those of three earlier starts are kept beside it)",
        metavar="FILE",
        group=LOGS,
    )
    expert_load: str | None = option(
        None,
        "write to FILE what each expert of each layer computed, every ten seconds and at the end, for"
        " tokenmill inspect --expert-load and for placement (default: nowhere)",
        metavar="FILE",
        group=LOGS,
    )
    idle_command: str | None = option(
        None,
        "run this shell command while nobody has a call open: its process group is stopped as a call comes, goes on"
        " when all have ended, and ends with the server (default: none)",
        metavar="CMD",
        group=LOAD,
    )
    exit_idle_s: float = option(
        0.0,
        "end when no call has been open this long, such as 5m; 0: never (default: 0)",
        flag="--exit-idle-time",
        read=duration,
        metavar="TIME",
    )
    kv_pin: tuple[str, ...] = option(
        (),
        "keep the KV of this system prompt in the KV tiers whatever else is wanted: a text, or a .json file with the"
        " body of a request (repeatable)",
        several="each",
        metavar="FILE",
        group=TIERS,
    )
    observers: tuple[str, ...] = option(
        (),
        "tell this plug-in of requests and steps: counts and times, no texts (repeatable; default: none)",
        flag="--observer",
        several="each",
        metavar="NAME",
        group=LOGS,
    )
    log_level: str = option("info", "log lines from this level on (default: info)", choices=LOG_LEVELS, group=LOGS)
    log_format: str = option("text", "text lines, or a JSON object a line (default: text)", choices=FORMATS, group=LOGS)
    otlp_traces_endpoint: str | None = option(
        None,
        "send traces there by OTLP over HTTP, such as to http://localhost:4318/v1/traces "
        "(needs tokenmill[otel]; default: where OTEL_* variables say, else nowhere)",
        metavar="URL",
        group=LOGS,
    )

    def __post_init__(self) -> None:
        take_own_policies(self, OF_GATEWAYS)
        check(self)
        if self.observers:
            from ..control.observe.plugin_observers import observer_class

            for name in self.observers:
                observer_class(name)

    @property
    def flight_dir(self) -> str:
        """Absolute; "": nothing is recorded."""
        if self.flight_recorder == OFF:
            return ""
        given = self.flight_recorder
        return os.path.abspath(os.path.expanduser(given)) if given else str(default_state_dir() / "flight")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Where `serve` listens, under which names, and who may call. Raises ConfigError."""

    host: str = option("127.0.0.1", "address to listen on (default: 127.0.0.1)", metavar="H")
    port: int = option(8000, "port; 0 picks a free one (default: 8000)", read=port_number, metavar="P")
    uds: str | None = option(None, "listen on this Unix socket, for this user only, not on a port", metavar="PATH")
    api_key: tuple[str, ...] = option(
        (),
        f"clients must send it as a bearer token (repeatable; also from {', '.join(KEY_VARIABLES)})",
        several="each",
        metavar="KEY",
        group=KEYS,
    )
    api_key_file: str | None = option(
        None,
        "keys, one a line: unlike --api-key no other user's ps shows them",
        metavar="FILE",
        group=KEYS,
    )
    insecure: bool = option(False, "let other machines connect though no API key is asked for", group=KEYS)
    served_model_name: tuple[str, ...] = option(
        (),
        "names in the API; answers carry the first (default: the model's own)",
        several="all",
        metavar="NAME",
    )
    ssl_certfile: str | None = option(None, "serve HTTPS with this certificate", also="--ssl-cert-file", metavar="FILE")
    ssl_keyfile: str | None = option(
        None, "its key (default: in the certificate's file)", also="--ssl-key-file", metavar="FILE"
    )
    ssl_ca_certs: str | None = option(None, "authorities of clients' certificates", metavar="FILE")
    ssl_cert_reqs: int = option(
        0, "clients' certificates: 0 unasked, 1 optional, 2 demanded (default: 0)", choices=(0, 1, 2)
    )
    disable_access_log: bool = option(False, "log no line per answer", also="--disable-uvicorn-access-log", group=LOGS)

    def __post_init__(self) -> None:
        check(self)
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"--{name.replace('_', '-')} needs --ssl-certfile.", param=name)
            if self.ssl_cert_reqs:
                raise ConfigError("--ssl-cert-reqs needs --ssl-certfile.", param="ssl_cert_reqs")
        elif self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs.", param="ssl_cert_reqs")

    def tls(self) -> ssl.SSLContext | None:
        """Raises ConfigError."""
        from ..server.listen import make_tls

        if self.ssl_certfile is None:
            return None
        return make_tls(self.ssl_certfile, self.ssl_keyfile or "", self.ssl_ca_certs or "", self.ssl_cert_reqs)

    def at_inherited_socket(self) -> HttpOptions:
        """With the address of the socket that systemd handed over, if it did. Raises ConfigError."""
        from ..server.systemd import inherited_socket

        inherited = inherited_socket()
        if inherited is None:
            return self
        if inherited.family == socket.AF_UNIX:
            return replace(self, uds=inherited.getsockname())
        host, port = inherited.getsockname()[:2]
        return replace(self, host=host, port=port, uds=None)

    def shown_address(self, host: str, port: int, root_path: str = "") -> str:
        """What to tell a user who wants to connect."""
        scheme = "http" if self.ssl_certfile is None else "https"
        if self.uds:
            return f"Unix socket {host} (curl --unix-socket {host} {scheme}://localhost{root_path}/v1/models)"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{root_path}"


def server_config(args: argparse.Namespace, http: HttpOptions) -> ServerConfig:
    """Under the names that flags give, or the name that the model is asked for by. Raises ConfigError."""
    names = _model_names(http.served_model_name, args.model, is_model_named=args.model != DEFAULT_MODEL)
    given = given_options(ServerConfig, args, model_names=names, api_keys=read_api_keys(http))
    return replace(
        given,
        allowed_hosts=_allowed_hosts(given.allowed_hosts or (), http),
        lora_dir=_folder("--lora-dir", given.lora_dir, "lora_dir"),
        files_dir=_files_dir(given.files_dir),
        reports_dir=_folder("--reports-dir", os.path.expanduser(given.reports_dir), "reports_dir"),
    )


def _folder(flag: str, path: str, param: str) -> str:
    """Absolute; "": none is given."""
    if path and not os.path.isdir(path):
        raise ConfigError(f"{flag} {path} is not a folder.", param=param)
    return os.path.abspath(path) if path else ""


def _model_names(given: tuple[str, ...], own: str, *, is_model_named: bool) -> tuple[str, ...]:
    """Those given, or the model's own. The last of several may be a model that was meant as such: argparse gives all
    that follows the flag to the flag."""
    from ..formats.model_names import find_known

    names = list(dict.fromkeys(given))
    if not names:
        return (own,)
    last = names[-1]
    if not is_model_named and len(names) > 1 and (find_known(last) or os.path.exists(last)):
        raise ConfigError(
            f"Is {last} the model? Then put it before --served-model-name, which takes all that follows it.",
            param="served_model_name",
        )
    return tuple(names)


def read_api_keys(options: HttpOptions) -> tuple[str, ...]:
    """Those of flags, file and environment together, each once. Raises ConfigError."""
    keys = [*options.api_key]
    if options.api_key_file is not None:
        try:
            lines = Path(options.api_key_file).read_text(encoding="utf8").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--api-key-file {options.api_key_file} cannot be read: {error}.", param="api_key_file"
            ) from error
        from_file = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not from_file:
            raise ConfigError(f"--api-key-file {options.api_key_file} has no key.", param="api_key_file")
        keys += from_file
    # Taken out, so that processes started from here on do not inherit them: one compiles clients' templates.
    keys += [key for name in KEY_VARIABLES if (key := os.environ.pop(name, ""))]
    if not all(key.isascii() and key.isprintable() and key == key.strip() for key in keys):
        raise ConfigError("An API key must be of printable ASCII characters, none of them a space at an end.")
    if any(len(key) < MIN_KEY_CHARS for key in keys):
        raise ConfigError(
            f"An API key of --api-key, --api-key-file or {', '.join(KEY_VARIABLES)} has fewer than {MIN_KEY_CHARS} "
            "characters: it can be guessed, and to hide it in logs would hide a word. `tokenmill keys create NAME` "
            "makes one.",
            param="api_key",
        )
    return tuple(dict.fromkeys(keys))


def _allowed_hosts(given: tuple[str, ...], options: HttpOptions) -> tuple[str, ...] | None:
    """None: any. With TLS the name is vouched for by the certificate; others' machines know this one by names that
    it need not know itself; and no web page reaches a Unix socket."""
    from ..server.listen import is_loopback

    if given:
        return given
    return () if not (options.uds or options.ssl_certfile) and is_loopback(options.host) else None


def _files_dir(given: str) -> str:
    if given == OFF:
        return ""
    return os.path.abspath(os.path.expanduser(given)) if given else str(default_state_dir() / "files")


def set_access_log(options: HttpOptions) -> None:
    from ..server.access_log import ACCESS_LOGGER

    if options.disable_access_log:
        logging.getLogger(ACCESS_LOGGER).setLevel(logging.CRITICAL)

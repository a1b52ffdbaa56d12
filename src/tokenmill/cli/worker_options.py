"""Flags of links between machines: where workers and front end meet, and what each proves itself with."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..control.workers.roster import POOL_NAME, POOL_RULE
from ..core.errors import ConfigError
from ..core.options import check, option

if TYPE_CHECKING:
    from ssl import SSLContext

    from ..kv.transfer.peer.client import PeerAuth
    from ..net.tcp import Credentials

LAUNCHERS = ("local", "ray")
SECRET_VARIABLE = "TOKENMILL_WORKER_SECRET"
_MAX_SECRET_BYTES = 4096


def read_address(text: str) -> tuple[str, int]:
    """'host:port', '[::1]:port'; port 0 picks a free one."""
    host, _, port = text.rpartition(":")
    if host and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 2**16:
        return host.removeprefix("[").removesuffix("]"), int(port)
    raise ValueError(f"must be HOST:PORT, such as 10.0.0.1:7000, got {text!r}.")


def read_name(text: str) -> str:
    """Letters, digits and . _ : -, as in the path of /admin/workers/NAME."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}", text):
        raise ValueError(f"must be up to 100 letters, digits or . _ : -, got {text[:200]!r}.")
    return text


def read_pool(text: str) -> str:
    """As /admin/workers/NAME/pool takes it."""
    if not POOL_NAME.fullmatch(text):
        raise ValueError(f"{POOL_RULE}, got {text[:200]!r}.")
    return text


def shown_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """How the two ends of a network link make sure of each other. Raises ConfigError."""

    worker_secret_file: str | None = option(
        None,
        f"the secret that workers and front end share: 16 bytes or more in a file that only its owner may read"
        f" (default: {SECRET_VARIABLE})",
        metavar="FILE",
    )
    worker_tls_cert: str | None = option(
        None, "certificate of this end; needed where the link leaves the machine", metavar="FILE"
    )
    worker_tls_key: str | None = option(None, "its key (default: in the certificate's file)", metavar="FILE")
    worker_tls_ca: str | None = option(None, "authority that signed the other end's certificate", metavar="FILE")
    worker_insecure: bool = option(
        False, "leave the machine without TLS: whoever can read the network's traffic sees all prompts and answers"
    )

    kv_transfer: str = option(
        "memory",
        "how workers of one machine get KV of each other: memory, by reading the other's, where the system allows it;"
        " tcp; tier, by way of their KV store alone (default: memory)",
        choices=("memory", "tcp", "tier"),
    )

    def __post_init__(self) -> None:
        check(self)
        if (self.worker_tls_cert is None) != (self.worker_tls_ca is None):
            raise ConfigError("--worker-tls-cert and --worker-tls-ca go together.", param="worker_tls_cert")
        if self.worker_tls_key is not None and self.worker_tls_cert is None:
            raise ConfigError("--worker-tls-key needs --worker-tls-cert.", param="worker_tls_key")

    def tls(self, *, is_front_end: bool) -> SSLContext | None:
        """Of the end that is connected to, or of the other one. Raises ConfigError."""
        from ..net.handshake import mutual_tls

        if self.worker_tls_cert is None or self.worker_tls_ca is None:
            return None
        key = self.worker_tls_key or self.worker_tls_cert
        return mutual_tls(self.worker_tls_cert, key, self.worker_tls_ca, is_front_end=is_front_end)

    def credentials(self, *hosts: str, is_front_end: bool) -> Credentials:
        """For links by `hosts`. Raises ConfigError where there is no secret, or no TLS and others than this machine
        can reach the link."""
        from ..net.tcp import Credentials
        from ..server.listen import is_loopback

        secret = _read_secret(self.worker_secret_file, os.environ)
        if (context := self.tls(is_front_end=is_front_end)) is not None:
            return Credentials(secret, context)
        host = next((host for host in hosts if not is_loopback(host)), "")
        if host and not self.worker_insecure:
            raise ConfigError(
                f"{host} is not this machine, and a link without TLS shows prompts and answers to its network: give"
                " --worker-tls-cert and --worker-tls-ca, or --worker-insecure where the network itself is sealed.",
                param="worker_tls_cert",
            )
        return Credentials(secret)

    def peer_auth(self, credentials: Credentials) -> PeerAuth:
        """To KV of workers on other machines. Any certificate of the authority will do: a front end says where a worker
        is to be had, and that may be an address of the moment, such as a pod's, which no certificate names."""
        from ..kv.transfer.peer.client import PeerAuth

        asking = self.tls(is_front_end=False)
        if asking is not None:
            asking.check_hostname = False
        return PeerAuth(credentials.secret, self.tls(is_front_end=True), asking)


MAX_LOCAL = 64
"""Workers that a zygote is asked for before it has loaded the weights: all these messages fit into its socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Engines of `serve` that are not its own. Raises ConfigError."""

    listen_workers: tuple[str, int] | None = option(
        None,
        "take workers (tokenmill worker) in here, as further engines; port 0 picks a free one",
        read=read_address,
        metavar="HOST:PORT",
    )
    engine: bool = option(True, "start an engine here; --no-engine: workers are all there is (default: on)")
    workers: int | None = option(
        None,
        "start so many engines, which divide processors and memory (default: 1)",
        metavar="N",
        least=1,
    )
    prefill_workers: int | None = option(
        None, "start so many engines for prompts, beside --decode-workers", metavar="N", least=1
    )
    decode_workers: int | None = option(
        None, "start so many engines for what follows the first token, beside --prefill-workers", metavar="N", least=1
    )
    launcher: str = option(
        "local",
        "what starts engines: local, processes beside the server; ray, actors of Ray (default: local)",
        choices=LAUNCHERS,
    )

    def __post_init__(self) -> None:
        check(self)
        if not self.engine and self.listen_workers is None:
            raise ConfigError("--no-engine needs --listen-workers: something must compute.", param="engine")
        if (self.prefill_workers is None) != (self.decode_workers is None):
            raise ConfigError("--prefill-workers and --decode-workers go together.", param="prefill_workers")
        if not self.engine and (self.workers or self.prefill_workers):
            raise ConfigError("--no-engine starts none, and --workers says how many to start.", param="workers")
        if self.launcher == "ray" and not self.engine:
            raise ConfigError("--no-engine starts none, and --launcher ray starts workers.", param="launcher")
        num_asked = (self.workers or 0) + (self.prefill_workers or 0) + (self.decode_workers or 0)
        if self.launcher == "local" and num_asked > MAX_LOCAL:
            message = f"--workers: one server starts at most {MAX_LOCAL} workers beside it, not {num_asked}."
            raise ConfigError(message, param="workers")

    @property
    def pools_are_asked(self) -> bool:
        return bool(self.workers or self.prefill_workers)

    @property
    def pools(self) -> tuple[str, ...]:
        """Of each engine that is to be started, where it serves; those of --workers are beside the others."""
        mixed = self.workers or (0 if self.prefill_workers else int(self.engine))
        counts = (("mixed", mixed), ("prefill", self.prefill_workers or 0), ("decode", self.decode_workers or 0))
        return tuple(pool for pool, count in counts for _ in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Whom `worker` works for. Raises ConfigError."""

    connect: tuple[tuple[str, int], ...] = option(
        (),
        "a front end's address, which its --listen-workers names (needed; repeatable: several front ends may use one"
        " worker)",
        several="all",
        read=read_address,
        metavar="HOST:PORT",
    )
    worker_id: str | None = option(
        None,
        "this worker's name, which its next life has too: a front end lets an earlier life go when a later one joins"
        " (default: the machine's name and the process's number)",
        read=read_name,
        metavar="NAME",
    )
    pool: str = option(
        "mixed",
        "the pool that it serves in until front ends put it into another: prefill, decode, mixed, or another name"
        " (default: mixed)",
        read=read_pool,
        metavar="NAME",
    )
    kv_address: tuple[str, int] | None = option(
        None,
        "where workers of other machines get KV from this one; port 0 picks a free one (default: only those of this"
        " machine get any)",
        read=read_address,
        metavar="HOST:PORT",
    )
    health_address: tuple[str, int] | None = option(
        None, "answer GET /live and /ready here, for probes", read=read_address, metavar="HOST:PORT"
    )

    def __post_init__(self) -> None:
        check(self)
        if not self.connect or not all(port for _, port in self.connect):
            raise ConfigError("worker needs --connect HOST:PORT, the front end's --listen-workers.", param="connect")
        if self.kv_address is not None and self.kv_address[0] in ("0.0.0.0", "::", ""):
            raise ConfigError("--kv-address must be an address that other workers can reach.", param="kv_address")
        if len(set(self.connect)) < len(self.connect):
            raise ConfigError("--connect names one front end twice.", param="connect")


def _read_secret(path: str | None, environ: MutableMapping[str, str]) -> bytes:
    """Takes it out of `environ`, for processes that are started from here on: one of them compiles clients'
    templates."""
    from ..net.handshake import MIN_SECRET_BYTES

    if path is None:
        secret, where = os.fsencode(environ.pop(SECRET_VARIABLE, "")), SECRET_VARIABLE
        if not secret:
            raise ConfigError(
                f"Workers and front end need a secret that they share: --worker-secret-file FILE or {SECRET_VARIABLE}."
                " One is made by: head -c 32 /dev/urandom | base64",
                param="worker_secret_file",
            )
    else:
        where = f"--worker-secret-file {path}"
        try:
            with Path(path).open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                secret = file.read(_MAX_SECRET_BYTES)
        except OSError as error:
            raise ConfigError(f"{where} cannot be read: {error.strerror}.", param="worker_secret_file") from error
        if mode & 0o077:
            raise ConfigError(
                f"{where} can be read by others than its owner (mode {mode:04o}): chmod 600 it.",
                param="worker_secret_file",
            )
    secret = secret.strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"The secret of {where} has {len(secret)} bytes; it needs {MIN_SECRET_BYTES}.", param="worker_secret_file"
        )
    return secret

"""What `serve` is told of its audit log."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ...core.errors import ConfigError
from ...core.masking import Mask
from ...core.options import check, option, size
from ...core.units import KiB, MiB

if TYPE_CHECKING:
    from ...text.text_model import TextModel
    from .entries import CallWatch
    from .log import AuditLog

SYSLOG = "/dev/log"

CALLS = ("off", "ended", "all")
PROMPTS = ("off", "digest", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """Raises ConfigError."""

    audit_log: str | None = option(
        None, "keep an audit log: a chain of entries in FILE, whose head is signed (default: none)", metavar="FILE"
    )
    audit_key: str | None = option(
        None,
        "Ed25519 key that signs its head, outside of its folder; made by tokenmill audit keygen FILE",
        metavar="FILE",
    )
    audit_calls: str = option(
        "ended",
        "entries for calls that generate: none, one as each request ends, or one as it comes too (default: ended)",
        choices=CALLS,
    )
    audit_prompts: str = option(
        "digest",
        "what these entries have of prompts and answers: nothing, SHA-256 of the token ids, or their text "
        "(default: digest)",
        choices=PROMPTS,
    )
    audit_max_bytes: int = option(
        64 * MiB, "begin a new file at this size (default: 64MiB)", read=size, metavar="SIZE", least=4 * KiB
    )
    audit_syslog: str | None = option(
        None,
        f"send heads to this syslog too: a socket's path, HOST:PORT (UDP) or off (default: {SYSLOG} if it is there)",
        metavar="ADDRESS",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.audit_log is None and self.audit_key is not None:
            raise ConfigError("--audit-key needs --audit-log.", param="audit_key")
        if self.audit_log is not None and self.audit_key is None:
            raise ConfigError(
                "--audit-log needs --audit-key; make one with: tokenmill audit keygen FILE", param="audit_log"
            )

    def open(self, mask: Mask) -> AuditLog | None:
        """The log, open; None: there is to be none. `mask`: of what no entry has. Raises ConfigError."""
        from ..signing import load_signer
        from .log import AuditLog, Syslog

        if self.audit_log is None or self.audit_key is None:
            return None
        path, key = (os.path.realpath(os.path.expanduser(each)) for each in (self.audit_log, self.audit_key))
        if os.path.dirname(key) == os.path.dirname(path):
            raise ConfigError(
                "--audit-key must lie outside of the audit log's folder: who can rewrite the log must not have it.",
                param="audit_key",
            )
        signer = load_signer(key, "--audit-key")
        address = self.audit_syslog or (SYSLOG if os.path.exists(SYSLOG) else "off")
        syslog = None if address == "off" else Syslog(address)
        log = AuditLog(path, signer, syslog=syslog, max_bytes=self.audit_max_bytes, mask=mask)
        log.open()
        return log

    def watch(self, log: AuditLog, name_adapter: Callable[[str], str], text: TextModel, model: str) -> CallWatch | None:
        """What makes entries of calls; None: they get none. `name_adapter` gives the name of an adapter by its digest;
        `model`: the name of the model itself."""
        from .entries import CallWatch

        if self.audit_calls == "off":
            return None

        def model_of(adapter: str) -> str:
            return (name_adapter(adapter) or adapter) if adapter else model

        return CallWatch(
            log,
            tells_coming=self.audit_calls == "all",
            prompts=self.audit_prompts,
            decode=partial(text.tokenizer.decode, skip_special=False),
            model_of=model_of,
        )

"""Settings of the HTTP front end."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.errors import ConfigError
from ..core.masking import Mask
from ..core.options import check, option, seconds, size
from ..core.slo import AUTO, OFF, PROFILES
from ..core.speculation import DETAILED, NO_METRICS, SUMMARY
from ..core.units import MiB
from .connections import Clients, HttpBounds

ENFORCE, SHADOW = "enforce", "shadow"
KEYS, LOAD, KEPT = "keys and usage", "load and objectives", "what is kept"
LOGS, AUDIT = "logs and traces", "audit and signatures"
"""Headings in the help of `serve`."""

_FOREVER_S = 1e9


def _num_characters(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    raise ValueError(f"must be a number of characters, at least 0, got {text!r}.")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the front end accepts, and from whom. Fields without help are no flags of `serve`:

    model_names          names the one model is served under; the first is the name that answers carry
    api_keys             any of these opens the API; none: it is open
    http                 bounds of connections and heads
    max_buffered_bytes   all bodies held at once; more is 429
    max_open_requests    choices waiting or running, of all calls; more is 429
    max_open_tokens      their prompt tokens together; more is 429
    stall_after_s        work but no step for this long makes /health 503

    `allowed_hosts` is (): the names of this machine, or None: any. `lora_dir` is "" where no adapter may be loaded over
    HTTP, `files_dir` where no files are kept, `reports_dir` where no reports are shown. The sandbox process bounds what
    `allow_chat_template` costs. `responses_store`, `idempotency_store`, `tenants` and `usage_*` are for who starts the
    server. Raises ConfigError.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = option(
        (), "origin browsers may call from (repeatable)", several="each", metavar="ORIGIN"
    )
    allowed_hosts: tuple[str, ...] | None = option(
        (),
        "names that requests may have in their Host header besides this machine's, *.example.com for all below,"
        " '*' for any (default: any where others than this machine can connect, or with TLS)",
        several="all",
        metavar="NAME",
    )
    root_path: str = option("", "path under which a proxy shows this server", also="--api-prefix", metavar="PATH")
    log_requests: bool = option(
        False,
        "log each request as it comes and as it ends, with lengths and times (default: off)",
        flag="--enable-log-requests",
        has_no=True,
        group=LOGS,
    )
    max_log_len: int = option(
        0,
        "with --enable-log-requests, log the first N characters of prompts too (default: 0)",
        read=_num_characters,
        metavar="N",
        group=LOGS,
    )
    per_request_spec_decode_metrics: str = option(
        NO_METRICS,
        "tell in an answer, under metrics.speculative_decoding, how many drafts were accepted: summary, detailed (by"
        " step) or none (default: none)",
        choices=(NO_METRICS, SUMMARY, DETAILED),
    )
    tells_tokenizer: bool = option(
        False,
        "answer GET /tokenizer_info, which tells the special tokens and the chat template, as lm-eval wants",
        flag="--enable-tokenizer-info-endpoint",
    )
    http: HttpBounds = field(default_factory=HttpBounds)
    max_body_bytes: int = option(
        16 * MiB, "largest request body accepted (default: 16MiB)", read=size, metavar="SIZE", least=1
    )
    max_buffered_bytes: int = 128 * MiB
    max_open_requests: int = 8192
    max_open_tokens: int = 2_000_000
    max_queue_s: float = option(
        10.0,
        "refuse a call that would wait longer than this: 429 with Retry-After, 503 without an engine; 0: none is "
        "(default: 10)",
        read=seconds,
        metavar="S",
        group=LOAD,
    )
    admission: str = option(
        ENFORCE,
        "refuse calls that are expected to miss their targets, let them in and count which did (shadow), or look at "
        "--max-queue-s alone (off) (default: enforce)",
        choices=(ENFORCE, SHADOW, OFF),
        group=LOAD,
    )
    request_timeout_s: float = option(
        0.0,
        "end a request that takes longer: with what it has, or with 408 before its first token; requests may ask for "
        "less by the header x-request-timeout-s; 0: never (default: 0)",
        read=seconds,
        metavar="S",
        least=0,
        group=LOAD,
    )
    max_priority: int = option(
        0,
        "most urgent priority that a request may claim; lower is more urgent (default: 0)",
        metavar="N",
        group=LOAD,
    )
    kv_keep_tools_s: float = option(
        60.0,
        "where there is a KV store, keep the KV of an answer that ends in calls of tools there for so long, unless its"
        " request says otherwise; 0: not (default: 60)",
        read=seconds,
        metavar="S",
        group=LOAD,
    )
    trusted_proxies: tuple[str, ...] = option(
        (),
        "proxies whose X-Forwarded-For tells clients apart, such as 10.0.0.0/8, or * (default: none)",
        several="all",
        metavar="NETWORK",
    )
    stall_after_s: float = 30.0
    lora_dir: str = option(
        "", "folder that /v1/load_lora_adapter may load from (default: it is refused)", metavar="DIR", group="text"
    )
    allowed_mcp_servers: tuple[str, ...] = option(
        (),
        "URLs of MCP servers that tools of the type mcp of /v1/responses may name, and what lies below them; needs the "
        "extra mcp (default: none)",
        several="all",
        metavar="URL",
    )
    stream_interval: int = option(
        1,
        "tokens of each chunk of a stream behind the first, unless a request says otherwise (default: 1)",
        metavar="N",
        least=1,
    )
    files_dir: str = option(
        "",
        "folder of /v1/files and /v1/batches, or 'off' (default: files in the user's state folder)",
        metavar="DIR",
        group=KEPT,
    )
    reports_dir: str = option(
        "", "folder whose results of benchmarks (--json) the console shows (default: none)", metavar="DIR"
    )
    allow_chat_template: bool = option(
        False,
        "let requests bring a chat_template of their own (default: it is refused)",
        flag="--trust-request-chat-template",
        group="text",
    )

    slo: str = option(
        OFF,
        "latency objectives of requests for which neither they nor their tenant name any: a profile"
        f" ({', '.join(PROFILES)}); auto, the one that the traffic of the tenant or client resembles; off, none"
        " (default: off)",
        choices=(OFF, AUTO, *PROFILES),
        metavar="PROFILE|auto|off",
        group=LOAD,
    )

    sign_responses: str | None = option(
        None,
        "sign answers with this Ed25519 key, made by tokenmill audit keygen FILE (default: they are not signed)",
        metavar="FILE",
        group=AUDIT,
    )
    responses_store: str | None = option(
        None,
        "file that keeps the responses of /v1/responses for a day, or 'off' to keep none "
        "(default: kept.db in the user's state folder)",
        metavar="FILE|off",
        group=KEPT,
    )
    idempotency_store: str | None = option(
        None,
        "file that keeps the answers of calls with an Idempotency-Key for a day, or 'off': they are refused "
        "(default: kept.db in the user's state folder)",
        metavar="FILE|off",
        group=KEPT,
    )
    result_cache: int = option(
        0,
        "memory for results, which equal calls that are greedy or bring a seed get instead of a computation "
        "(default: 0, none)",
        read=size,
        metavar="SIZE",
        least=0,
        group=KEPT,
    )
    resume_file: str = option(
        "",
        "file that keeps streams under way, so that they outlive this process, and clients can come back to them "
        "(default: none)",
        metavar="FILE",
        group=KEPT,
    )
    resume_grace_s: float = option(
        60.0,
        "how long a stream goes on whose client has gone and asked to wait, or that an earlier process began "
        "(default: 60)",
        read=seconds,
        metavar="S",
        least=0,
        group=KEPT,
    )
    resume_kept_s: float = option(
        3600.0,
        "how long a stream that has ended can still be read from the resume file (default: 3600)",
        read=seconds,
        metavar="S",
        group=KEPT,
    )
    resume_bytes: int = option(
        256 * MiB,
        "most that the resume file keeps of streams that have ended (default: 256MiB)",
        read=size,
        metavar="SIZE",
        least=0,
        group=KEPT,
    )
    usage_dir: str | None = option(
        None,
        "folder that keeps the account of tokens by tenant, key and model, or 'off' to keep none "
        "(default: usage in the user's state folder)",
        metavar="DIR|off",
        group=KEYS,
    )
    usage_kept_days: int = option(
        0,
        "days after which sums of usage are deleted; 0: never (default: 0)",
        metavar="N",
        least=0,
        group=KEYS,
    )

    tenants: str | None = option(
        None,
        "file of tenants and the API keys given out to them (see `tokenmill keys`), or 'off' for none "
        "(default: control.db in the user's state folder)",
        metavar="FILE|off",
        group=KEYS,
    )

    @property
    def mask(self) -> Mask:
        """Of its API keys, for all that is written down of calls."""
        return Mask(self.api_keys)

    @property
    def longest_wait_s(self) -> float:
        """`max_queue_s`, or where that is 0 longer than anybody waits."""
        return self.max_queue_s or _FOREVER_S

    def __post_init__(self) -> None:
        check(self)
        if not self.model_names or not all(self.model_names):
            raise ConfigError("served-model-name needs at least one name.", param="served-model-name")
        if not all(self.api_keys):
            raise ConfigError("api-key must not be empty.", param="api-key")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root-path must be like /llm, got {self.root_path!r}.", param="root-path")
        for name in ("max_buffered_bytes", "max_open_requests", "max_open_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.", param=name)
        Clients(self.trusted_proxies)
        if self.stall_after_s <= 0:
            raise ConfigError(f"stall_after_s must be positive, got {self.stall_after_s}.", param="stall_after_s")

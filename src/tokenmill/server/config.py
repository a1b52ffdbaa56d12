"""Settings of the HTTP front end."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.errors import ConfigError
from ..core.units import MiB
from .bounds import HttpBounds
from .clients import Clients


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the front end accepts, and from whom.

    model_names          names the one model is served under; the first is the name that answers carry
    api_keys             any of these opens the API; none: it is open
    cors_origins         origins a browser may call from ("*": any); none: no CORS headers
    allowed_hosts        names that the Host header may be besides those of this machine ("*": any); None: any
    root_path            path under which a proxy shows this server, such as /llm; it may cut it off or not
    log_requests         a line for each call that comes and for each choice that ends
    max_log_len          characters of a prompt that such a line may show
    http                 bounds of connections and heads
    max_body_bytes       largest request body; larger ones are 413
    max_buffered_bytes   all bodies held at once; more is 429
    max_open_requests    choices waiting or running, of all calls; more is 429
    max_open_tokens      their prompt tokens together; more is 429
    max_queue_s          longest predicted wait of a call for its first choice; longer is 429
    max_priority         most urgent priority that a request may claim; lower numbers are more urgent
    trusted_proxies      networks whose X-Forwarded-For is believed; "*": any peer's
    stall_after_s        work but no step for this long makes /health 503
    lora_dir             folder that adapters may be loaded from over HTTP; "": none may
    allow_chat_template  a request may bring its own chat template; the helper process bounds what it costs
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = ()
    root_path: str = ""
    log_requests: bool = False
    max_log_len: int = 0
    http: HttpBounds = field(default_factory=HttpBounds)
    max_body_bytes: int = 16 * MiB
    max_buffered_bytes: int = 128 * MiB
    max_open_requests: int = 8192
    max_open_tokens: int = 2_000_000
    max_queue_s: float = 10.0
    max_priority: int = 0
    trusted_proxies: tuple[str, ...] = ()
    stall_after_s: float = 30.0
    lora_dir: str = ""
    allow_chat_template: bool = False

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError("served-model-name needs at least one name.", param="served-model-name")
        if not all(self.api_keys):
            raise ConfigError("api-key must not be empty.", param="api-key")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root-path must be like /llm, got {self.root_path!r}.", param="root-path")
        for name in ("max_body_bytes", "max_buffered_bytes", "max_open_requests", "max_open_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.", param=name)
        if self.max_queue_s <= 0:
            raise ConfigError(f"max-queue-s must be positive, got {self.max_queue_s:g}.", param="max_queue_s")
        Clients(self.trusted_proxies)
        if self.stall_after_s <= 0:
            raise ConfigError(f"stall_after_s must be positive, got {self.stall_after_s}.", param="stall_after_s")

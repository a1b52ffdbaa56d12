"""Settings of the HTTP front end."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.errors import ConfigError
from ..core.units import MiB


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What the front end accepts, and from whom.

    model_names          names the one model is served under; the first is the name that answers carry
    api_keys             any of these opens the API; none: it is open
    cors_origins         origins a browser may call from ("*": any); none: no CORS headers
    max_body_bytes       largest request body; larger ones are 413
    max_buffered_bytes   all bodies held at once; more is 429
    max_open_requests    choices queued or running in the engine; more is 429
    max_open_tokens      their prompt tokens together; more is 429
    stall_after_s        work but no step for this long makes /health 503
    lora_dir             folder that adapters may be loaded from over HTTP; "": none may
    allow_chat_template  a request may bring its own chat template; the helper process bounds what it costs
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 * MiB
    max_buffered_bytes: int = 128 * MiB
    max_open_requests: int = 1024
    max_open_tokens: int = 2_000_000
    stall_after_s: float = 30.0
    lora_dir: str = ""
    allow_chat_template: bool = False

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ConfigError("served-model-name needs at least one name.", param="served-model-name")
        if not all(self.api_keys):
            raise ConfigError("api-key must not be empty.", param="api-key")
        for name in ("max_body_bytes", "max_buffered_bytes", "max_open_requests", "max_open_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}.", param=name)
        if self.stall_after_s <= 0:
            raise ConfigError(f"stall_after_s must be positive, got {self.stall_after_s}.", param="stall_after_s")

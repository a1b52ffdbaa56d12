"""Names, times and durations as Ollama writes them. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

from ...text.text_model import About

API_VERSION = "0.13.0"
"""Of Ollama, whose API is spoken here. Clients ask for it before they use what later versions have."""

_LATEST = ":latest"


def tagged(name: str) -> str:
    """A model's name with its tag, which is "latest" where it has none."""
    return name if ":" in name.rpartition("/")[2] else name + _LATEST


def timestamp(seconds: float) -> str:
    """RFC 3339, of seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def details(about: About) -> dict[str, object]:
    return {
        "parent_model": "",
        "format": about.format,
        "family": about.architecture,
        "families": [about.architecture] if about.architecture else [],
        "parameter_size": about.parameter_size,
        "quantization_level": about.quantization,
    }

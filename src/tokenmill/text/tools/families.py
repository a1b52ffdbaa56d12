"""Which family a chat template belongs to, or a name means."""

from __future__ import annotations

from ...plugins.groups import TOOL_PARSERS
from ...plugins.load import load_plugin
from .deepseek import ALL, DEEPSEEK_V3, DEEPSEEK_V31
from .family import Family
from .granite import GRANITE, PHI
from .harmony import CHANNEL, HARMONY
from .hermes import GENERIC, HERMES
from .llama import LLAMA3, TAG
from .mistral import ARGS, MARK, MISTRAL, MISTRAL_LIST
from .qwen_coder import FUNCTION, QWEN_CODER

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        HERMES,
        LLAMA3,
        MISTRAL,
        MISTRAL_LIST,
        GRANITE,
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        PHI,
        QWEN_CODER,
        HARMONY,
        GENERIC,
    )
}
"""By the names that --tool-call-parser takes."""

ALIASES = {"openai": "harmony", "gpt-oss": "harmony"}
"""Other servers' names of the same."""


def tool_family(name: str) -> Family | None:
    """One of ours, or of a plug-in; None where neither has the name. Raises ConfigError."""
    return FAMILIES.get(name) or load_plugin(TOOL_PARSERS, name, Family, param="tool_call_parser")


def family_of(template: str | None) -> Family:
    """The one whose marks the template's text shows; GENERIC where it shows none, or there is no template."""
    if template is None:
        return GENERIC
    if CHANNEL in template:
        return HARMONY
    if MARK in template:
        return MISTRAL if ARGS in template else MISTRAL_LIST
    if ALL in template:
        return DEEPSEEK_V3 if "```json" in template else DEEPSEEK_V31
    if "<tool_call>" in template or "</tool_call>" in template:
        return QWEN_CODER if FUNCTION in template else HERMES
    if "<|tool|>" in template:
        return PHI
    if "<|tool_call|>" in template:
        return GRANITE
    if TAG in template or ("<|start_header_id|>" in template and "tools" in template):
        return LLAMA3
    return GENERIC

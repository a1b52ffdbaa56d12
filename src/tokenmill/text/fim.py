"""Fill in the middle: the tokens with which a model marks the text before a gap, after it, and the gap itself.

A GGUF file may name them; else they are found by how code models spell them. The order of the parts is llama.cpp's
(prefix, suffix, middle), with other files of the repository before them where the model has tokens for these
(Qwen2.5-Coder, arXiv 2409.12186).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .special_tokens import Rendered
from .tokenizer import Tokenizer

_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "prefix": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<|code_prefix|>",
        "▁<PRE>",
        "<PRE>",
    ),
    "suffix": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<|code_suffix|>",
        "▁<SUF>",
        "<SUF>",
    ),
    "middle": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<|code_middle|>", "▁<MID>", "<MID>"),
    "repo": ("<|fim_repo|>", "<|repo_name|>", "<repo_name>", "<reponame>"),
    "file": ("<|file_sep|>", "<|file_separator|>", "<file_sep>", "<filename>"),
}
_PADS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>")
_GGUF = {
    "prefix": ("fim_pre", "prefix"),
    "suffix": ("fim_suf", "suffix"),
    "middle": ("fim_mid", "middle"),
    "repo": ("fim_rep",),
    "file": ("fim_sep",),
}
_REPOSITORY = "repository"
_FILE = "current file"


@dataclass(frozen=True, slots=True)
class FimTokens:
    """How the model spells its marks. `repo` and `file` are "" where it has none for other files. `ends`: ids of tokens
    that end what fills a gap: there another file would begin."""

    prefix: str
    suffix: str
    middle: str
    repo: str = ""
    file: str = ""
    ends: tuple[int, ...] = ()


def find_fim(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> FimTokens | None:
    """The model's own marks; None for a model without the three that are needed. `metadata`: GGUF keys, or none."""
    known = set(tokenizer.added_texts())
    found: dict[str, str] = {}
    for role, spellings in _SPELLINGS.items():
        ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _GGUF[role])
        named = [tokenizer.token_text(token) for token in ids if type(token) is int]
        found[role] = next((text for text in (*named, *spellings) if text is not None and text in known), "")
    if not (found["prefix"] and found["suffix"] and found["middle"]):
        return None
    over = [tokenizer.token_id(text) for text in (found["repo"], found["file"], *_PADS) if text in known]
    ends = tuple(sorted(token for token in over if token is not None))
    if not (found["repo"] and found["file"]):
        found |= {"repo": "", "file": ""}
    return FimTokens(**found, ends=ends)


def infill(
    fim: FimTokens, prefix: str, suffix: str, *, extra: Sequence[tuple[str, str]] = (), prompt: str = ""
) -> Rendered:
    """The prompt whose continuation belongs between `prefix` and `suffix`. `extra`: name and text of other files.
    `prompt`: how the middle begins. No mark counts that the texts spell."""
    pieces: list[str] = []
    if extra and fim.repo:
        pieces += ["", fim.repo, f"{_REPOSITORY}\n"]
        for name, text in extra:
            pieces += [fim.file, f"{name}\n{text}\n"]
        pieces += [fim.file, f"{_FILE}\n"]
    else:
        pieces.append("".join(f"{text}\n" for _, text in extra))
    pieces += [fim.prefix, prefix, fim.suffix, suffix, fim.middle, prompt]
    return Rendered(tuple(pieces), is_split=True)

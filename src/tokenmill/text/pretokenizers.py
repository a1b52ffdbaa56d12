"""How text is cut into words before byte-level BPE, by the name a GGUF file gives in `tokenizer.ggml.pre`; and how
vocabularies spell bytes: byte-level (GPT-2), SentencePiece's marks, WordPiece.

A word is the unit no merge may cross, so a wrong cut gives wrong tokens without any error: an unknown name is refused.
Each scheme is a chain of regular expressions, applied in turn to the pieces the one before left, isolating what it
matches. The expressions are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from ..core.errors import BadCheckpoint

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACE}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACE}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_GPT4O = rf"{_CASED.replace('%s', _CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_SLASHED}|{_SPACE}"
_TEKKEN = rf"{_CASED.replace('%s', '')}|\p{{N}}|{_SLASHED}|{_SPACE}"
_SEED_CODER = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}"
)
_HAN_APART = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s"
_KIMI = (
    rf"[\p{{Han}}]+|{_HAN_APART % ('*', '+')}{_CONTRACTION}?|{_HAN_APART % ('+', '*')}{_CONTRACTION}?|\p{{N}}{{1,3}}"
    rf"|{_PUNCTUATION}|{_SPACE}"
)
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True, slots=True)
class Scheme:
    """steps          regular expressions in order
    digits         isolate every digit first
    gpt2           end with GPT-2's own expression (built into the byte-level step)
    ignore_merges  a word that is a token is that token, whatever the merges say
    add_bos        begin with BOS unless the file says otherwise
    """

    steps: tuple[str, ...] = ()
    digits: bool = False
    gpt2: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self, missing: str = "") -> PreTokenizer:
        """`missing`: bytes, in the byte-level spelling, that are no tokens. Nothing merges across one, nothing is left
        of it."""
        chain: list[PreTokenizer] = [Digits(individual_digits=True)] if self.digits else []
        chain += [Split(Regex(step), "isolated") for step in self.steps]
        chain.append(ByteLevel(add_prefix_space=False, use_regex=self.gpt2))
        if missing:
            chain.append(Split(Regex(f"[{re.escape(missing)}]"), "removed"))
        return Sequence(chain) if len(chain) > 1 else chain[0]


_SCHEMES: tuple[tuple[Scheme, tuple[str, ...]], ...] = (
    (
        Scheme(gpt2=True),
        (
            "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat", "a.x-4.0", "mellum",
            "modern-bert", "exaone4",
        ),
    ),
    (
        Scheme(digits=True, gpt2=True),
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    (
        Scheme((_LLAMA3,), ignore_merges=True, add_bos=True),
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    ),
    (Scheme((_LLAMA3,)), ("dbrx", "smaug-bpe", "chatglm-bpe", "glm4")),
    (
        Scheme((_QWEN2,)),
        ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
    ),
    (Scheme((_QWEN35,)), ("qwen35",)),
    (Scheme((_GPT4O,)), ("gpt-4o", "llama4", "kanana2", "minimax-m2")),
    (Scheme((_TEKKEN,), ignore_merges=True, add_bos=True), ("tekken",)),
    (Scheme((_KIMI,)), ("kimi-k2",)),
    (Scheme((_SEED_CODER,)), ("seed-coder",)),
    (Scheme((_BAILING,)), ("bailingmoe", "bailingmoe2", "llada-moe")),
    (Scheme((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)), ("deepseek-v3", "hunyuan-dense", "joyai-llm")),
    (
        Scheme((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
        ("deepseek-coder",),
    ),
    (Scheme((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")), ("falcon",)),
    (Scheme((_BLOOM,)), ("bloom", "poro-chat", "gpt3-finnish")),
    (Scheme((_BLOOM, r"\p{N}")), ("viking",)),
    (Scheme((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")), ("default",)),
)  # fmt: skip

SCHEMES: dict[str, Scheme] = {name: scheme for scheme, names in _SCHEMES for name in names}


def find_scheme(name: str) -> Scheme:
    """The scheme called `name`. Raises BadCheckpoint for one that is not known here."""
    scheme = SCHEMES.get(name)
    if scheme is None:
        raise BadCheckpoint(
            f"The file's pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known; guessing would give wrong tokens. "
            f"Known: {', '.join(SCHEMES)}. Use the model's Hugging Face folder, whose tokenizer.json describes it."
        )
    return scheme


SPACE_MARK = "▁"


def _gpt2_alphabet() -> dict[str, int]:
    """GPT-2's spelling of the 256 bytes: printable Latin-1 as itself, the others from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


ALPHABET = _gpt2_alphabet()


def _byte_level_bytes(text: str) -> bytes:
    try:
        return bytes([ALPHABET[char] for char in text])
    except KeyError:
        return text.encode()


def _marked_bytes(text: str) -> bytes:
    """SentencePiece's spelling: '▁' is a space, '<0x0A>' is a byte."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace(SPACE_MARK, " ").encode()


def _word_piece_bytes(text: str) -> bytes:
    """WordPiece's spelling: '##' goes on with a word, and anything else begins one."""
    return (text[2:] if text.startswith("##") else " " + text).encode()


def find_byte_decoder(backend: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """(which of the spellings the vocabulary uses, whether a text's first space is not part of it), from the decoder's
    description."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = [state, *state.get("decoders", [])]
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return _byte_level_bytes, False
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return _marked_bytes, any(map(_drops_first_space, steps))
    if "WordPiece" in kinds:
        return _word_piece_bytes, True
    raise BadCheckpoint(
        f"The tokenizer's decoder ({', '.join(str(kind) for kind in kinds)}) is not supported; "
        "byte-level, SentencePiece-style and WordPiece vocabularies are."
    )


def _drops_first_space(step: dict[str, Any]) -> bool:
    if step.get("type") == "Metaspace":
        return step.get("prepend_scheme", "always") != "never"
    return step.get("type") == "Strip" and step.get("content") == " " and step.get("start", 0) > 0

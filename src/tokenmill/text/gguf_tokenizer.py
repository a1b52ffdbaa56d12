"""A tokenizer from the metadata of a GGUF file: byte-level BPE, or SentencePiece's BPE and unigrams.

SentencePiece's table of characters to replace (`check_charsmap`) is checked before the tokenizers library walks it. It
is a length, that many bytes of a double-array trie (32-bit units), and replacements that end with a NUL. The library
trusts it: a unit that leads outside the array, or a leaf that names no replacement, would stop the process at the first
text that meets it.

    unit  bits 0-7 and 31: label | 8: a leaf follows | 9: the offset counts 256 | 10-30: offset
"""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors

from ..core.errors import BadCheckpoint
from .pretokenizers import ALPHABET, SPACE_MARK, find_scheme
from .tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type`."""


def tokenizer_from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    """From the keys `tokenizer.ggml.*`. Raises BadCheckpoint for a kind of tokenizer that is not known here."""
    backend = backend_from_gguf(metadata)
    types = metadata.get("tokenizer.ggml.token_type") or []
    return Tokenizer(backend, unknown_ids=[i for i, t in enumerate(types) if t == UNKNOWN])


def backend_from_gguf(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """As tokenizer_from_gguf."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _string_list(metadata, "tokenizer.ggml.tokens")
    vocab = {text: token_id for token_id, text in enumerate(tokens)}
    if len(vocab) != len(tokens) or not tokens:
        raise BadCheckpoint("tokenizer.ggml.tokens is empty or holds a token twice.")
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        types = [NORMAL] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise BadCheckpoint("tokenizer.ggml.token_type does not have one entry for each token.")
    if kind == "gpt2":
        scheme = find_scheme(metadata.get("tokenizer.ggml.pre", "default"))
        backend = _byte_level_backend(metadata, vocab, scheme.ignore_merges)
        backend.pre_tokenizer = scheme.build("".join(char for char in ALPHABET if char not in vocab))
        add_bos = scheme.add_bos
    elif kind == "llama":
        backend = _sentencepiece_backend(metadata, vocab, tokens, types)
        add_bos = True
    elif kind == "t5":
        backend = _unigram_backend(metadata, tokens, types)
        add_bos = False
    else:
        raise BadCheckpoint(f"tokenizer.ggml.model {kind!r} is not supported; 'gpt2', 'llama' and 't5' are.")
    special = [AddedToken(tokens[i], special=True, normalized=False) for i, t in enumerate(types) if t == CONTROL]
    defined = [AddedToken(tokens[i], special=False, normalized=False) for i, t in enumerate(types) if t == USER_DEFINED]
    backend.add_special_tokens(special)
    backend.add_tokens(defined)
    bos = tokens[gguf_token_id(metadata, "bos")] if _wants(metadata, "bos", add_bos) else None
    eos = tokens[gguf_token_id(metadata, "eos")] if _wants(metadata, "eos", kind == "t5") else None
    if bos is not None or eos is not None:
        surround(backend, bos, eos)
    return backend


def gguf_token_id(metadata: dict[str, Any], role: str) -> int:
    """The id under tokenizer.ggml.<role>_token_id, checked against the vocabulary; -1 where the file has none."""
    key = f"tokenizer.ggml.{role}_token_id"
    token_id = metadata.get(key, -1)
    num_tokens = len(_string_list(metadata, "tokenizer.ggml.tokens"))
    if type(token_id) is not int or not -1 <= token_id < num_tokens:
        raise BadCheckpoint(f"{key} is {token_id!r}; the vocabulary has {num_tokens} tokens.")
    return token_id


def _wants(metadata: dict[str, Any], role: str, default: bool) -> bool:
    wanted = metadata.get(f"tokenizer.ggml.add_{role}_token", default)
    return bool(wanted) and gguf_token_id(metadata, role) >= 0


def surround(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Set what `add_special` puts around a text: tokens of the vocabulary."""
    tokens = [(text, backend.token_to_id(text)) for text in (bos, eos) if text is not None]
    template = [*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=tokens)


def _string_list(metadata: dict[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or (value and not isinstance(value[0], str)):
        raise BadCheckpoint(f"The file has no usable {key}.")
    return value


def _byte_level_backend(metadata: dict[str, Any], vocab: dict[str, int], ignore_merges: bool) -> tokenizers.Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in _string_list(metadata, "tokenizer.ggml.merges")]
    backend = tokenizers.Tokenizer(make_bpe(vocab, merges, ignore_merges=ignore_merges))
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_backend(
    metadata: dict[str, Any], vocab: dict[str, int], tokens: list[str], types: list[int]
) -> tokenizers.Tokenizer:
    """SentencePiece joins the adjacent pair whose joint token scores best. As BPE that is a list of merges, for every
    token all its splits into two tokens, in order of falling score."""
    scores = _scores(metadata, tokens)
    order = sorted(
        (i for i, t in enumerate(types) if t in (NORMAL, USER_DEFINED, UNUSED)), key=lambda i: (-scores[i], i)
    )
    merges = []
    for text in (tokens[i] for i in order):
        splits = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        splits = [(left, right) for left, right in splits if left in vocab and right in vocab]
        merges += sorted(splits, key=lambda split: (vocab[split[0]], vocab[split[1]]))
    unknown = next((tokens[i] for i, t in enumerate(types) if t == UNKNOWN), None)
    backend = tokenizers.Tokenizer(make_bpe(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    _mark_spaces(backend, metadata, [])
    return backend


def _unigram_backend(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    """The pieces whose summed scores are best, on text that the file's own table has normalised."""
    unknown = next((i for i, t in enumerate(types) if t == UNKNOWN), None)
    try:
        model = models.Unigram(list(zip(tokens, _scores(metadata, tokens), strict=True)), unknown, BYTE in types)
        table = bytes(metadata.get("tokenizer.ggml.precompiled_charsmap") or b"")
        steps: list[normalizers.Normalizer] = [normalizers.Precompiled(table)] if table else []
    except Exception as error:
        raise BadCheckpoint(f"The file's unigrams or their table of characters cannot be used: {error}.") from error
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend = tokenizers.Tokenizer(model)
    _mark_spaces(backend, metadata, steps)
    check_normalizer(backend)
    return backend


def _mark_spaces(backend: tokenizers.Tokenizer, metadata: dict[str, Any], steps: list[normalizers.Normalizer]) -> None:
    """After `steps`, a mark for each space and, unless the file says otherwise, one before the text; and back again."""
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    before = [normalizers.Prepend(SPACE_MARK)] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, *before, normalizers.Replace(" ", SPACE_MARK)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    back = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(back)


def _scores(metadata: dict[str, Any], tokens: list[str]) -> list[float]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise BadCheckpoint("tokenizer.ggml.scores does not have one entry for each token.")
    return scores


def make_bpe(vocab: dict[str, int], merges: list[Any], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab, merges, **options)
    except Exception as error:
        raise BadCheckpoint(f"The file's vocabulary and merges do not fit together: {error}.") from error


def check_charsmap(table: bytes) -> None:
    """Raises BadCheckpoint unless every walk through the table stays inside it."""
    if len(table) < 4:
        raise BadCheckpoint("The table of characters has no length.")
    (num_bytes,) = struct.unpack_from("<I", table)
    if num_bytes % 4 or not 4 <= num_bytes <= len(table) - 4:
        raise BadCheckpoint(f"The table of characters says {num_bytes} bytes of trie; it has {len(table) - 4} in all.")
    units = struct.unpack_from(f"<{num_bytes // 4}I", table, 4)
    texts = table[4 + num_bytes :]
    try:
        texts.decode()
    except UnicodeDecodeError:
        raise BadCheckpoint("The replacements of the table of characters are not UTF-8.") from None
    # A unit can only be the child of nodes whose children are counted from its place and label.
    children: dict[int, list[int]] = {}
    for place, unit in enumerate(units):
        if not unit & 0x80000000 and unit & 0xFF:
            children.setdefault(place ^ unit & 0xFF, []).append(place)
    waiting = [_follow(units[0], 0)]
    seen = set()
    while waiting:
        start = waiting.pop()
        if start in seen:
            continue
        seen.add(start)
        if start | 0xFF >= len(units):
            raise BadCheckpoint("The trie of the table of characters leads outside itself.")
        for place in children.get(start, ()):
            node = _follow(units[place], place)
            waiting.append(node)
            if not units[place] >> 8 & 1:
                continue
            if node >= len(units):
                raise BadCheckpoint("The trie of the table of characters leads outside itself.")
            value = units[node] & 0x7FFFFFFF
            if value > len(texts) or (value < len(texts) and texts[value] & 0xC0 == 0x80):
                raise BadCheckpoint("The trie of the table of characters names replacements that are not there.")


def _follow(unit: int, place: int) -> int:
    """Where the children of the unit at `place` are counted from."""
    return place ^ (unit >> 10 << ((unit & 0x200) >> 6))


def check_normalizer(backend: tokenizers.Tokenizer) -> None:
    """check_charsmap for every table in a tokenizer's normaliser."""
    if backend.normalizer is None:
        return
    steps: list[dict[str, Any]] = [json.loads(backend.normalizer.__getstate__())]
    while steps:
        step = steps.pop()
        steps += step.get("normalizers", [])
        if step.get("type") == "Precompiled":
            check_charsmap(base64.b64decode(step["precompiled_charsmap"]))

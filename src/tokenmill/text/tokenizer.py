"""Text to token ids and back, on the `tokenizers` library.

Built from GGUF metadata (byte-level BPE, or SentencePiece's BPE and unigrams) or from a folder's tokenizer.json. The
ids equal those of llama.cpp on the same GGUF file and of transformers on the same folder; where those two differ from
each other is told at the head of tests/oracle/test_tokenizer.py.

Special tokens are recognised in text only where the caller asks: `parse_special=False` keeps a user's "<|im_end|>" a
row of ordinary characters. Decoding works on bytes, token by token, so that a stream and a whole text decode alike.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors

from ..core.errors import BadCheckpoint, InvalidRequest
from ..formats.safetensors import read_json
from .charsmap import check_normalizer
from .pretokenizers import find_scheme
from .segments import PIECE_CHARS, SegmentCache, can_cut, cut_text

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type`."""

_SPACE_MARK = "▁"


class Tokenizer:
    """Encodes and decodes. Immutable but for caches, of token bytes and of texts' tokens; threads may share it.

    vocab_size  one more than the largest id
    """

    def __init__(self, backend: tokenizers.Tokenizer, unknown_ids: Iterable[int] = ()) -> None:
        """`backend` with its decoder set; `unknown_ids`: ids that are special without being added tokens."""
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in self._added.items() if token.special) | frozenset(unknown_ids)
        self._plain = _without_special(backend, self._added, self._special_ids) if self._special_ids else backend
        self._to_bytes, self._begins_with_space = _find_byte_decoder(backend)
        self.vocab_size = max([backend.get_vocab_size(with_added_tokens=False), *(i + 1 for i in self._added)])
        self._within: tokenizers.Tokenizer | None = None
        self._around = _around(backend) if can_cut(backend) else None
        self._segments = None if self._around is None else SegmentCache(self._encode_piece)
        self._all_bytes = _BytesTable(self, skip_special=False)
        self._visible_bytes = _BytesTable(self, skip_special=True)

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True, shared: bool = True
    ) -> list[int]:
        """Ids of `text`. `add_special`: with the BOS / EOS the model wants around a text. `parse_special`: special
        tokens written out in the text become those tokens. `shared`: take what is known of other texts, and let others
        take of this one; that shows in the time it takes. Lone surrogates are read as U+FFFD. Other threads may run
        meanwhile."""
        if shared and parse_special and self._segments is not None and len(text) > PIECE_CHARS:
            assert self._around is not None
            before, after = self._around if add_special else ([], [])
            return [*before, *self._segments.encode(text), *after]
        return self._encode_whole(text, self._backend if parse_special else self._plain, add_special)

    def encode_parts(self, text: str, *, add_special: bool = True) -> Iterator[list[int]]:
        """The ids of `encode`, part by part, so that a large text needs no more memory than a part of it at a time
        where its words can be told apart without the tokenizer."""
        if self._around is None:
            yield self._encode_whole(text, self._backend, add_special)
            return
        before, after = self._around if add_special else ([], [])
        yield before
        for piece in cut_text(text):
            yield self._encode_piece(piece)
        yield after

    def encode_split(self, pieces: Sequence[str], *, add_special: bool = True) -> list[int]:
        """Ids of text and special token in turns, text first and last (see `standins.Rendered`): within a text special
        tokens do not count. A text without any gives the ids of `encode`. Other threads may run meanwhile."""
        before, after = (_around(self._backend) if add_special else None) or ([], [])
        ids = list(before)
        for place, piece in enumerate(pieces):
            if place % 2:
                ids.append(self._special(piece)[0])
                continue
            if place and self._special(pieces[place - 1])[1].rstrip:
                piece = piece.lstrip()
            if place + 1 < len(pieces) and self._special(pieces[place + 1])[1].lstrip:
                piece = piece.rstrip()
            if piece:
                ids += self._encode_whole(piece, self._plain_within() if place else self._plain, False)
        return [*ids, *after]

    def special_texts(self) -> list[str]:
        """How the special tokens that are found in text are spelled, by rising id."""
        return [token.content for _, token in sorted(self._added.items()) if token.special]

    def longest_token(self) -> int:
        """Bytes of the longest token. Takes a while: it asks for all."""
        return max(len(self.token_bytes(token)) for token in range(self.vocab_size))

    def _special(self, text: str) -> tuple[int, AddedToken]:
        token_id = self._backend.token_to_id(text)
        assert token_id is not None, f"{text!r} is no special token"
        return token_id, self._added[token_id]

    def _plain_within(self) -> tokenizers.Tokenizer:
        """`_plain` for what does not begin a text: some tokenizers put a space only before what does."""
        if self._within is None:
            self._within = self._plain
            state = b"" if self._plain.pre_tokenizer is None else self._plain.pre_tokenizer.__getstate__()
            if (first := b'"prepend_scheme":"first"') in state:
                self._within = _like(self._plain, self._plain.model, self._plain.get_added_tokens_decoder())
                inner = copy.deepcopy(self._plain.pre_tokenizer)
                inner.__setstate__(state.replace(first, b'"prepend_scheme":"never"'))
                self._within.pre_tokenizer = inner
        return self._within

    def num_unknown_chars(self, text: str) -> int:
        """How much of `text` was not in texts encoded before, about: what is left for a shared `encode`."""
        return len(text) if self._segments is None else self._segments.num_unknown_chars(text)

    def _encode_piece(self, text: str) -> list[int]:
        return self._encode_whole(text, self._backend, False)

    def _encode_whole(self, text: str, backend: tokenizers.Tokenizer, add_special: bool) -> list[int]:
        return _encode_batch(backend, [text], add_special)[0].ids

    def encode_inputs(
        self,
        texts: Sequence[str],
        seconds: Sequence[str] = (),
        *,
        max_tokens: int | None = None,
        keep_end: bool = False,
    ) -> list[tuple[list[int], int]]:
        """Of each text, or each pair with the text of `seconds` at its place: ids with what the model wants around and
        between, and where the second text begins (0: none, or the model does not tell them apart). Cut to `max_tokens`
        within the texts, the longer of a pair first, so that what is around them stays. Other threads may run
        meanwhile."""
        backend = self._backend
        firsts = self._encode_bare(texts)
        others = self._encode_bare(seconds) if seconds else [None] * len(texts)
        around = backend.num_special_tokens_to_add(bool(seconds))
        side = "left" if keep_end else "right"
        found = []
        for first, other in zip(firsts, others, strict=True):
            if max_tokens is not None:
                num_others = 0 if other is None else len(other.ids)
                lengths = _fit(len(first.ids), num_others, max(0, max_tokens - around))
                for encoding, length in zip((first, other), lengths, strict=True):
                    if encoding is not None:
                        encoding.truncate(length, direction=side)
            whole = backend.post_process(first, other, True)
            types = () if other is None else whole.type_ids  # an encoding of no text is false
            found.append((whole.ids, types.index(1) if 1 in types else 0))
        return found

    def _encode_bare(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        return _encode_batch(self._backend, list(texts), False)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. A Detokenizer's pieces add up to the same, with the
        space before it where the vocabulary puts one before a text: a stream goes on with a text, this is a whole one.
        """
        table = self.bytes_table(skip_special=skip_special)
        text = b"".join([table[i] for i in ids]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._begins_with_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for; special tokens stand for their name. Empty for an id that is no token."""
        return self._all_bytes[token_id]

    def bytes_table(self, *, skip_special: bool) -> dict[int, bytes]:
        """id -> bytes, filled as it is asked; special tokens are empty where skipped."""
        return self._visible_bytes if skip_special else self._all_bytes

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def token_text(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or None if there is no such id."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_id(self, text: str) -> int | None:
        """The id of the token the vocabulary spells `text`."""
        return self._backend.token_to_id(text)

    def to_json(self) -> str:
        """As a tokenizer.json, which `tokenizers` and transformers read."""
        return self._backend.to_str()

    def _compute_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.content.encode()
        text = self.token_text(token_id)
        return b"" if text is None else self._to_bytes(text)


def _encode_batch(backend: tokenizers.Tokenizer, texts: list[str], add_special: bool) -> list[tokenizers.Encoding]:
    """Of the library's ways to encode, only the one for batches releases the interpreter lock. Raises InvalidRequest
    for a text with a word so long that the library gives up."""
    try:
        return backend.encode_batch_fast(texts, add_special_tokens=add_special)
    except TypeError:
        return backend.encode_batch_fast([_without_surrogates(text) for text in texts], add_special_tokens=add_special)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # which the library exports nowhere, and which is no Exception
            raise
        raise InvalidRequest(
            "The text has a word of millions of characters, which the tokenizer cannot take."
        ) from None


def _without_surrogates(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _fit(first: int, second: int, room: int) -> tuple[int, int]:
    """Lengths of two texts cut to `room` together, the longer first."""
    if first + second <= room:
        return first, second
    shorter = min(first, second, room // 2)
    return (shorter, room - shorter) if first < second else (room - shorter, shorter)


class _BytesTable(dict[int, bytes]):
    """Computes an entry on its first use: a vocabulary is large and a server may start before most of it is needed."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip_special = skip_special

    def __missing__(self, token_id: int) -> bytes:
        skipped = self._skip_special and self._tokenizer.is_special(token_id)
        value = b"" if skipped else self._tokenizer._compute_bytes(token_id)
        self[token_id] = value
        return value


def _around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """What the tokenizer puts before a text and after it; None where that cannot be told."""
    bare, whole = (backend.encode("a", add_special_tokens=add).ids for add in (False, True))
    places = [at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare]
    return (whole[: places[0]], whole[places[0] + len(bare) :]) if len(places) == 1 else None


def _without_special(
    backend: tokenizers.Tokenizer, added: dict[int, AddedToken], special_ids: frozenset[int]
) -> tokenizers.Tokenizer:
    """A second tokenizer that shares the first one's model but does not look for special tokens in text."""
    if isinstance(backend.model, models.Unigram):
        num_pieces = backend.get_vocab_size(with_added_tokens=False)
        added = {i: token for i, token in added.items() if i not in special_ids or i >= num_pieces}
        return _like(backend, _hide(backend, special_ids), added)
    return _like(backend, backend.model, added)


def _like(backend: tokenizers.Tokenizer, model: models.Model, added: dict[int, AddedToken]) -> tokenizers.Tokenizer:
    """With another model and other added tokens, of which special ones are not looked for in text."""
    plain = tokenizers.Tokenizer(model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    plain.add_tokens([token for _, token in sorted(added.items())])
    assert plain.get_added_tokens_decoder().keys() == added.keys(), "added tokens changed their ids"
    if backend.post_processor is not None:
        plain.post_processor = backend.post_processor
    plain.encode_special_tokens = True
    return plain


def _hide(backend: tokenizers.Tokenizer, hidden: frozenset[int]) -> models.Unigram:
    """The unigram model with the pieces `hidden` spelt as no text is. Unigrams choose among all pieces that match, so
    that a special token's name in a text would be that token even where none is looked for; spaces are marked before
    the model sees them, so that a piece with a space matches nothing."""
    state = json.loads(backend.model.__getstate__())
    pieces = [(f"{text} " if i in hidden else text, score) for i, (text, score) in enumerate(state["vocab"])]
    return models.Unigram(pieces, state["unk_id"], state["byte_fallback"])


# ---- bytes of a token ------------------------------------------------------------------------------------------------


def _gpt2_alphabet() -> dict[str, int]:
    """GPT-2's spelling of the 256 bytes: printable Latin-1 as itself, the others from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _gpt2_alphabet()


def _byte_level_bytes(text: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in text])
    except KeyError:
        return text.encode()


def _marked_bytes(text: str) -> bytes:
    """SentencePiece's spelling: '▁' is a space, '<0x0A>' is a byte."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace(_SPACE_MARK, " ").encode()


def _word_piece_bytes(text: str) -> bytes:
    """WordPiece's spelling: '##' goes on with a word, and anything else begins one."""
    return (text[2:] if text.startswith("##") else " " + text).encode()


def _find_byte_decoder(backend: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
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


# ---- from a folder ---------------------------------------------------------------------------------------------------


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """From tokenizer.json, with the tokens that only tokenizer_config.json lists. Raises BadCheckpoint.

    BOS and EOS are put around a text as tokenizer.json says; like transformers, we do not read `add_bos_token` and
    `add_eos_token` of tokenizer_config.json where there is a tokenizer.json.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise BadCheckpoint(
            f"{folder} has no tokenizer.json. Save the model's fast tokenizer there (transformers: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...))."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are no Exceptions
        raise BadCheckpoint(f"{path} is not a tokenizer that can be read: {error}.") from error
    check_normalizer(backend)
    backend.no_truncation()
    backend.no_padding()
    _add_missing_tokens(backend, read_tokenizer_config(folder))
    return Tokenizer(backend)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, or nothing."""
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def token_content(value: Any) -> str | None:
    """A token in a config is a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Added tokens that only tokenizer_config.json lists, in the order of their ids."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    known = backend.get_added_tokens_decoder()
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        entries = sorted((int(key), entry) for key, entry in listed.items() if int(key) not in known)
        tokens = [AddedToken(e["content"], **{flag: bool(e[flag]) for flag in flags if flag in e}) for _, e in entries]
    except (TypeError, ValueError, KeyError) as error:
        raise BadCheckpoint(f"tokenizer_config.json: added_tokens_decoder is malformed: {error!r}.") from error
    backend.add_tokens(tokens)


# ---- from GGUF metadata ----------------------------------------------------------------------------------------------


def tokenizer_from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    """From the keys `tokenizer.ggml.*`. Raises BadCheckpoint for a kind of tokenizer that is not known here."""
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
        backend.pre_tokenizer = scheme.build("".join(char for char in _ALPHABET if char not in vocab))
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
        _surround(backend, bos, eos)
    return Tokenizer(backend, unknown_ids=[i for i, t in enumerate(types) if t == UNKNOWN])


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


def _surround(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
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
    backend = tokenizers.Tokenizer(_bpe(vocab, merges, ignore_merges=ignore_merges))
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
    backend = tokenizers.Tokenizer(_bpe(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
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
    before = [normalizers.Prepend(_SPACE_MARK)] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, *before, normalizers.Replace(" ", _SPACE_MARK)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    back = [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(back)


def _scores(metadata: dict[str, Any], tokens: list[str]) -> list[float]:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise BadCheckpoint("tokenizer.ggml.scores does not have one entry for each token.")
    return scores


def _bpe(vocab: dict[str, int], merges: list[Any], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab, merges, **options)
    except Exception as error:
        raise BadCheckpoint(f"The file's vocabulary and merges do not fit together: {error}.") from error

"""Text to token ids and back, on the `tokenizers` library.

Built from GGUF metadata (gguf_tokenizer.py) or from a folder's tokenizer.json (hf_tokenizer.py). The
ids equal those of llama.cpp on the same GGUF file and of transformers on the same folder; where those two differ from
each other is told at the head of tests/oracle/test_tokenizer.py.

Special tokens are recognised in text only where the caller asks: `parse_special=False` keeps a user's "<|im_end|>" a
row of ordinary characters. Decoding works on bytes, token by token, so that a stream and a whole text decode alike.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence

import tokenizers
from tokenizers import AddedToken, models

from ..core.errors import InvalidRequest
from .pretokenizers import find_byte_decoder
from .token_cache import PIECE_CHARS, TokenCache, can_cut, cut_text

_NOTHING: frozenset[int] = frozenset()


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
        self._to_bytes, self._begins_with_space = find_byte_decoder(backend)
        self.vocab_size = max([backend.get_vocab_size(with_added_tokens=False), *(i + 1 for i in self._added)])
        self._within: tokenizers.Tokenizer | None = None
        self._around = _around(backend) if can_cut(backend) else None
        self._token_cache = None if self._around is None else TokenCache(self._encode_piece)
        self._all_bytes = _BytesTable(self, skipped=frozenset())
        self._visible_bytes = {_NOTHING: _BytesTable(self, skipped=self._special_ids)}

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True, shared: bool = True, salt: str = ""
    ) -> list[int]:
        """Ids of `text`. `add_special`: with the BOS / EOS the model wants around a text. `parse_special`: special
        tokens written out in the text become those tokens. `shared`: take what is known of other texts of this `salt`,
        and let others take of this one; that shows in the time it takes. Lone surrogates are read as U+FFFD. Other
        threads may run meanwhile."""
        if shared and parse_special and self._token_cache is not None and len(text) > PIECE_CHARS:
            assert self._around is not None
            before, after = self._around if add_special else ([], [])
            return [*before, *self._token_cache.encode(text, salt), *after]
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

    def added_texts(self) -> list[str]:
        """How the tokens that are found in text before it is split into words are spelled, by rising id."""
        return [token.content for _, token in sorted(self._added.items())]

    def added_tokens(self) -> dict[int, AddedToken]:
        """The same by id, with how each is found; not to be changed."""
        return self._added

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

    def num_unknown_chars(self, text: str, salt: str = "") -> int:
        """How much of `text` was not in texts of `salt` encoded before, about: what is left for a shared `encode`."""
        return len(text) if self._token_cache is None else self._token_cache.num_unknown_chars(text, salt)

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

    def bytes_table(self, *, skip_special: bool, shown: frozenset[int] = _NOTHING) -> dict[int, bytes]:
        """id -> bytes, filled as it is asked; special tokens but those `shown` are empty where skipped."""
        if not skip_special:
            return self._all_bytes
        table = self._visible_bytes.get(shown)
        if table is None:
            table = self._visible_bytes[shown] = _BytesTable(self, skipped=self._special_ids - shown)
        return table

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    def token_text(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or None if there is no such id."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def digest(self) -> str:
        """Of what each id stands for, in hex. Tokens of one tokenizer mean the same to another with an equal one."""
        texts = [self.token_text(token) for token in range(self.vocab_size)]
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()

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

    def __init__(self, tokenizer: Tokenizer, *, skipped: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        value = b"" if token_id in self._skipped else self._tokenizer._compute_bytes(token_id)
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

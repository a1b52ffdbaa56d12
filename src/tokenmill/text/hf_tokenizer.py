"""A tokenizer from a Hugging Face folder: its tokenizer.json and tokenizer_config.json, or the files that older
checkpoints and other tools have instead.

    tekken.json             Mistral's: a pattern, special tokens, and byte strings by rank
    tokenizer.model         SentencePiece's; or as tiktoken.model
    sentencepiece.bpe.model SentencePiece's, with ids that are fairseq's, of XLM-RoBERTa and CamemBERT
    tiktoken.model          byte strings and their ranks, a line for each
    vocab.json, merges.txt  byte-level BPE
    vocab.txt               WordPiece

How text is cut into words, and what goes around it, most of these do not say: that is part of the class that
tokenizer_config.json names. Unknown classes are refused, and a repository's own code is never run.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from ..core.errors import BadCheckpoint
from ..formats.mapping import map_file
from ..formats.safetensors import read_json
from ..formats.sentencepiece import read_sentencepiece
from .gguf_tokenizer import backend_from_gguf, check_normalizer, make_bpe, surround
from .pretokenizers import ALPHABET, SPACE_MARK, find_scheme
from .tokenizer import Tokenizer

JSON_NAME = "tokenizer.json"


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """With the tokens that only tokenizer_config.json lists. Raises BadCheckpoint.

    BOS and EOS are put around a text as tokenizer.json says; like transformers, we do not read `add_bos_token` and
    `add_eos_token` of tokenizer_config.json where there is a tokenizer.json.
    """
    config = read_tokenizer_config(folder)
    backend = _from_json(folder / JSON_NAME) if (folder / JSON_NAME).is_file() else backend_from_files(folder, config)
    check_normalizer(backend)
    backend.no_truncation()
    backend.no_padding()
    _add_missing_tokens(backend, config)
    return Tokenizer(backend)


def tokenizer_file(folder: Path) -> Path:
    """The file that has the folder's tokenizer; tokenizer.json where none has."""
    files = (folder / name for name in (JSON_NAME, *VOCABULARY_FILES))
    return next((file for file in files if file.is_file()), folder / JSON_NAME)


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, or nothing; with the meaning of what it does not say where no tokenizer.json does."""
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    return config if (folder / JSON_NAME).is_file() else class_settings(folder, config)


def _from_json(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_buffer(bytes(map_file(path)))
    except (BadCheckpoint, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are no Exceptions
        raise BadCheckpoint(f"{path} is not a tokenizer that can be read: {error}.") from error


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


Settings = Mapping[str, Any]
Maker = Callable[[Path, Settings], tokenizers.Tokenizer]

_SPELLED = {byte: char for char, byte in ALPHABET.items()}
_RANKED = {"TikTokenTokenizer": "kimi-k2", "PreTrainedTokenizer": "llama3", "TokenizersBackend": "llama3"}
"""Class -> how it cuts text into words (pretokenizers.py)."""
_BYTE_LEVEL = {"GPT2Tokenizer": "gpt-2", "RobertaTokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
_FAIRSEQ = {
    "XLMRobertaTokenizer": (3, ("<s>", "<pad>", "</s>", "<unk>")),
    "CamembertTokenizer": (1, ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED")),
}
"""Class -> how many pieces of SentencePiece's are left out, and what comes in their place."""
_WORD_PIECE = ("BertTokenizer", "DistilBertTokenizer")
_OF_MODEL_TYPES = {
    "bert": "BertTokenizer", "distilbert": "BertTokenizer", "nomic_bert": "BertTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer", "camembert": "CamembertTokenizer",
    "roberta": "RobertaTokenizer", "qwen": "Qwen2Tokenizer", "starcoder2": "GPT2Tokenizer",
}  # fmt: skip
"""The beginning of a model_type -> its class where no file names one."""

_BERT = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
_MARKED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
_TAIL = "<|endoftext|>"
_ROBERTA = {
    "bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>", "unk_token": "<unk>",
    "pad_token": "<pad>", "mask_token": "<mask>",
}  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaTokenizer": {**_MARKED, "legacy": False},
    "GemmaTokenizer": {**_MARKED, "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
    "GPT2Tokenizer": {"bos_token": _TAIL, "eos_token": _TAIL, "unk_token": _TAIL},
    "Qwen2Tokenizer": {"eos_token": _TAIL, "unk_token": _TAIL, "pad_token": _TAIL},
    **dict.fromkeys(("RobertaTokenizer", *_FAIRSEQ), _ROBERTA),
    **dict.fromkeys(_WORD_PIECE, _BERT),
}  # fmt: skip
"""What a class means where tokenizer_config.json does not say."""

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OLD_TEKKEN = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""The special tokens of a tekken.json that lists none."""


def class_settings(folder: Path, config: Settings) -> dict[str, Any]:
    """`config`, tokenizer_config.json, with the class named that the folder's file has, and with what that class and
    the older files beside it mean where it does not say."""
    kind = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if not kind and (folder / "config.json").is_file():
        model_type = str(read_json(folder / "config.json").get("model_type"))
        kind = next((name for start, name in _OF_MODEL_TYPES.items() if model_type.startswith(start)), "")
    marked = (folder / "tekken.json").is_file() or ((folder / "tokenizer.model").is_file() and kind not in _RANKED)
    defaults = _DEFAULTS.get(kind, _MARKED if marked else {})
    named = folder / "special_tokens_map.json"
    found = {**defaults, **(read_json(named) if named.is_file() else {}), **config, "tokenizer_class": kind}
    listed = folder / "added_tokens.json"
    if "added_tokens_decoder" not in found and listed.is_file():
        special = {*(token_content(found.get(role)) for role in _ROLES), *_more(found)}
        found["added_tokens_decoder"] = {
            str(token_id): {"content": text, "special": text in special, "normalized": text not in special}
            for text, token_id in read_json(listed).items()
        }
    return found


def backend_from_files(folder: Path, settings: Settings) -> tokenizers.Tokenizer:
    """The tokenizer of the first of the files above that the folder has. `settings`: see class_settings. Raises
    BadCheckpoint."""
    name = next((name for name in VOCABULARY_FILES if (folder / name).is_file()), None)
    if name is None:
        raise BadCheckpoint(
            f"{folder} has no tokenizer.json, and none of {', '.join(VOCABULARY_FILES)} in its place. Save the model's"
            " fast tokenizer there (transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))."
        )
    try:
        backend = _MAKERS[name](folder / name, settings)
    except BadCheckpoint:
        raise
    except Exception as error:
        raise BadCheckpoint(f"{folder / name} is not a vocabulary that can be read: {error!r}.") from error
    _add_named_tokens(backend, settings)
    around = [token_content(settings.get(role)) if settings.get(f"add_{role}") else None for role in _ROLES[:2]]
    bos, eos = (text if text and backend.token_to_id(text) is not None else None for text in around)
    if backend.post_processor is None and (bos or eos):
        surround(backend, bos, eos)
    return backend


def _from_tekken(path: Path, settings: Settings) -> tokenizers.Tokenizer:
    file = read_json(path)
    config, entries = file["config"], file.get("special_tokens")
    special = _OLD_TEKKEN if entries is None else [e["token_str"] for e in sorted(entries, key=lambda e: e["rank"])]
    num_special = config.get("default_num_special_tokens") or len(special)
    special = [*special, *(f"<SPECIAL_{rank}>" for rank in range(len(special), num_special))]
    size = config.get("default_vocab_size")
    listed = file["vocab"] if size is None else file["vocab"][: size - num_special]
    ranks = {base64.b64decode(entry["token_bytes"]): num_special + rank for rank, entry in enumerate(listed)}
    backend = _from_ranks(ranks, dict(zip(special, range(num_special), strict=True)))
    split = pre_tokenizers.Split(Regex(config["pattern"]), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, _spell_bytes()])
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return backend


def _from_model(path: Path, settings: Settings) -> tokenizers.Tokenizer:
    data = bytes(map_file(path))
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\n", data):
        return _from_tiktoken(path, settings)
    metadata = read_sentencepiece(data, path)
    metadata["tokenizer.ggml.add_bos_token"] = False  # what goes around is told by tokenizer_config.json
    metadata["tokenizer.ggml.add_eos_token"] = False
    metadata["tokenizer.ggml.add_space_prefix"] &= settings.get("add_prefix_space") is not False
    backend = backend_from_gguf(metadata)
    if metadata["tokenizer.ggml.add_space_prefix"] and not settings.get("legacy", True):
        backend.normalizer = None  # a space goes before what begins the text, not before what follows a special token
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme="first", split=False)
    return backend


def _from_fairseq(path: Path, settings: Settings) -> tokenizers.Tokenizer:
    _check_class(path, settings, _FAIRSEQ)
    num_dropped, first = _FAIRSEQ[settings["tokenizer_class"]]
    model = read_sentencepiece(bytes(map_file(path)), path)
    tokens = model["tokenizer.ggml.tokens"]
    if model["tokenizer.ggml.model"] != "t5" or tokens[:3] != ["<unk>", "<s>", "</s>"]:
        raise BadCheckpoint(f"{path} is no model of unigrams that begins with <unk>, <s> and </s>.")
    pieces = [(text, -100.0 if text == "<unk>NOTUSED" else 0.0) for text in first]
    pieces += zip(tokens[num_dropped:], model["tokenizer.ggml.scores"][num_dropped:], strict=True)
    pieces.append((str(token_content(settings["mask_token"])), 0.0))
    backend = tokenizers.Tokenizer(models.Unigram(pieces, first.index("<unk>"), False))
    if table := model["tokenizer.ggml.precompiled_charsmap"]:
        backend.normalizer = normalizers.Precompiled(table)
    mark = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme="always")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), mark])
    backend.decoder = decoders.Metaspace(SPACE_MARK, prepend_scheme="always")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[(text, backend.token_to_id(text)) for text in ("<s>", "</s>")],
    )
    return backend


def _from_tiktoken(path: Path, settings: Settings) -> tokenizers.Tokenizer:
    scheme = _scheme_of(path, settings, _RANKED)
    ranks = {}
    for line in bytes(map_file(path)).splitlines():
        if line:
            text, rank = line.split()
            ranks[base64.b64decode(text, validate=True)] = int(rank)
    backend = _from_ranks(ranks, {})
    backend.pre_tokenizer = find_scheme(scheme).build()
    last = max((int(token_id) for token_id in settings.get("added_tokens_decoder") or {}), default=-1)
    listed = settings.get("added_tokens_decoder") or {}
    for token_id in range(len(ranks), last + 1):  # ids between those listed are reserved
        entry = listed.get(str(token_id)) or {"content": f"<|reserved_token_{token_id}|>"}
        backend.add_special_tokens([AddedToken(entry["content"], special=True, normalized=False)])
    return backend


def _from_merges(path: Path, settings: Settings) -> tokenizers.Tokenizer:
    scheme = _scheme_of(path, settings, _BYTE_LEVEL)
    lines = bytes(map_file(path.with_name("merges.txt"))).decode().split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    backend = tokenizers.Tokenizer(make_bpe(read_json(path), merges))
    if scheme == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = find_scheme(scheme).build()
    backend.decoder = decoders.ByteLevel()
    if settings["tokenizer_class"] == "RobertaTokenizer":
        _add_named_tokens(backend, settings)
        sep, cls = (str(token_content(settings[role])) for role in ("sep_token", "cls_token"))
        vocab = backend.get_vocab()
        ends = (sep, vocab[sep]), (cls, vocab[cls])
        backend.post_processor = processors.RobertaProcessing(
            ends[0], ends[1], trim_offsets=True, add_prefix_space=False
        )
    return backend


def _from_word_list(path: Path, settings: Settings) -> tokenizers.Tokenizer:
    _check_class(path, settings, _WORD_PIECE)
    vocab = {
        word: token_id for token_id, word in enumerate(bytes(map_file(path)).decode().removesuffix("\n").split("\n"))
    }
    cls, sep, unknown = (str(token_content(settings[f"{role}_token"])) for role in ("cls", "sep", "unk"))
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(
        lowercase=bool(settings.get("do_lower_case", True)),
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=bool(settings.get("tokenize_chinese_chars", True)),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, vocab[cls]), (sep, vocab[sep])],
    )
    return backend


_MAKERS: dict[str, Maker] = {
    "tekken.json": _from_tekken,
    "tokenizer.model": _from_model,
    "sentencepiece.bpe.model": _from_fairseq,
    "tiktoken.model": _from_tiktoken,
    "vocab.json": _from_merges,
    "vocab.txt": _from_word_list,
}
VOCABULARY_FILES = tuple(_MAKERS)
"""In the order in which they count."""


def _from_ranks(ranks: dict[bytes, int], special: dict[str, int]) -> tokenizers.Tokenizer:
    """Byte-level BPE that joins the adjacent pair whose joint string has the lowest rank: as merges, for every string
    all its splits into two others, in order of rank."""
    merges: list[tuple[str, str]] = []
    vocab = {"".join(map(_SPELLED.__getitem__, text)): rank for text, rank in ranks.items()}
    for text, _ in sorted(vocab.items(), key=lambda item: item[1]):
        splits = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        found = [(left, right) for left, right in splits if left in vocab and right in vocab]
        merges += sorted(found, key=lambda split: (vocab[split[0]], vocab[split[1]]))
    backend = tokenizers.Tokenizer(make_bpe({**vocab, **special}, merges, ignore_merges=True))
    backend.decoder = decoders.ByteLevel()
    return backend


def _spell_bytes() -> pre_tokenizers.ByteLevel:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _scheme_of(path: Path, settings: Settings, known: Mapping[str, str]) -> str:
    _check_class(path, settings, known)
    if settings.get("add_prefix_space"):
        raise BadCheckpoint(f"{path}: add_prefix_space = true is not supported without a tokenizer.json.")
    return known[settings["tokenizer_class"]]


def _check_class(path: Path, settings: Settings, known: Iterable[str]) -> None:
    kind = settings["tokenizer_class"]
    if kind not in known:
        raise BadCheckpoint(
            f"{path}: how a tokenizer of class {kind!r} cuts text into words is not known here (known:"
            f" {', '.join(known)}). Save the model's fast tokenizer as tokenizer.json beside it."
        )


def _add_named_tokens(backend: tokenizers.Tokenizer, settings: Settings) -> None:
    """Of the tokens with a role, those of the vocabulary are special."""
    texts = [text for text in (*(token_content(settings.get(role)) for role in _ROLES), *_more(settings)) if text]
    found = dict.fromkeys(text for text in texts if backend.token_to_id(text) is not None)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in found])


def _more(settings: Settings) -> Iterator[str]:
    """The special tokens without a role."""
    for token in settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or ():
        if (text := token_content(token)) is not None:
            yield text


def token_content(value: Any) -> str | None:
    """A token in a config is a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None

"""A tokenizer from a folder: its tokenizer.json, or what it has instead (vocab_files.py), and tokenizer_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ..core.errors import BadCheckpoint
from ..formats.mapping import map_file
from ..formats.safetensors import read_json
from .charsmap import check_normalizer
from .tokenizer import Tokenizer
from .vocab_files import VOCABULARY_FILES, backend_from_files, class_settings

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

"""A tokenizer from a folder's tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ..core.errors import BadCheckpoint
from ..formats.safetensors import read_json
from .charsmap import check_normalizer
from .tokenizer import Tokenizer


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

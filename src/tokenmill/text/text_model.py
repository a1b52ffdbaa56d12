"""Everything the front end needs of a model, from its checkpoint: tokenizer, chat template, end tokens, defaults, and
what clients that list models want to know.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..core.errors import BadCheckpoint
from ..core.units import format_count
from ..formats.checkpoint import Checkpoint, open_text
from ..formats.config_key import UNBOUNDED_CONTEXT
from ..formats.config_keys import architecture_of, keys_of, value_of
from ..formats.hub import resolve_model
from ..formats.quantised import stored_bytes
from ..formats.safetensors import pickled_weights, read_json
from ..formats.sentence_transformers import read_sentence_config
from .chat_format import AUTO, ChatFormat, find_chat_format
from .chat_template import MAX_TEMPLATE_CHARS, ChatTemplate
from .fim import FimTokens, find_fim
from .gguf_tokenizer import CONTROL, gguf_token_id, tokenizer_from_gguf
from .hf_tokenizer import read_tokenizer_config, token_content, tokenizer_from_folder
from .tokenizer import Tokenizer
from .tools.harmony import CALL, END, RETURN

_EMBEDDING_KEYS = ("hidden_size", "d_model", "n_embd", "dim")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """architecture     as the file names it: "llama", "qwen3"
    format           "gguf", "safetensors" or "pytorch"
    num_parameters   values of all tensors; 0 where these are not open
    size_bytes       of all tensors, or where these are not open of their files
    quantization     the kind that most parameters are stored as, in capitals: "Q4_0", "BF16"
    width            values of a hidden state, 0 where the file does not say
    num_layers       0 where the file does not say
    modified_s       when the file was last written, in seconds since 1970
    """

    architecture: str = ""
    format: str = ""
    num_parameters: int = 0
    size_bytes: int = 0
    quantization: str = ""
    width: int = 0
    num_layers: int = 0
    modified_s: float = 0.0

    @property
    def parameter_size(self) -> str:
        """The number of parameters as model cards write it: "134.5M", "7.6B"; empty where it is not known."""
        return format_count(self.num_parameters) if self.num_parameters else ""


def model_info(checkpoint: Checkpoint) -> ModelInfo:
    """Cheap: only headers are looked at. What a file does not tell is left empty."""
    kinds: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        kinds[tensor.kind] += tensor.num_values
    metadata = checkpoint.metadata
    is_gguf = checkpoint.kind == "gguf"
    architecture = str(metadata.get("general.architecture" if is_gguf else "model_type") or "")
    if is_gguf:
        width = _count(metadata.get(f"{architecture}.embedding_length"))
        num_layers = _count(metadata.get(f"{architecture}.block_count"))
    else:
        width = next((_count(metadata[key]) for key in _EMBEDDING_KEYS if key in metadata), 0)
        num_layers = _count(metadata.get("num_hidden_layers"))
    path = checkpoint.path
    pickled = pickled_weights(path)
    return ModelInfo(
        architecture,
        "gguf" if is_gguf else "pytorch" if pickled else "safetensors",
        sum(kinds.values()),
        sum(map(stored_bytes, checkpoint.tensors.values())) or sum(file.stat().st_size for file in pickled),
        kinds.most_common(1)[0][0].upper() if kinds else "",
        width,
        num_layers,
        path.stat().st_mtime if path.exists() else 0.0,
    )


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


END_MARKS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"}
)
"""Control tokens that end an answer under whatever key the file names its EOS: files often name only one of several."""

_PAIR_ROLES = tuple(re.compile(rf"""["']{role}["']""") for role in ("query", "document"))
_RERANK = "tokenizer.chat_template.rerank"
"""Where a GGUF file says how a pair of texts becomes one, with {query} and {document} in their places."""

HARMONY_ENDS = (RETURN, CALL)
"""Where a vocabulary has both, these end an answer, and <|end|> only a message of it."""


@dataclass(frozen=True, slots=True)
class TextModel:
    """tokenizer          text to ids and back
    chat               the chat template, not compiled, or None for a model that has none
    eos_token_ids      any of these ends an answer, in rising order
    bos_token_id       or None
    max_context        tokens the model was made for
    sampling_defaults  names and values of SamplingParams fields for requests that name none; whoever loads a model
                       settles them
    prompts            of a model that gives vectors: name -> text put before an input
    default_prompt     the name of the one used where none is asked for, or ""
    fim                how it marks the text around a gap, or None for a model that does not
    info               what its checkpoint is, for clients that list models
    chat_format        how it calls tools and marks reasoning
    opens_answer       whether a chat template that is made for pairs of texts goes on to an answer
    """

    tokenizer: Tokenizer
    chat: ChatTemplate | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    max_context: int
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    fim: FimTokens | None = None
    info: ModelInfo = field(default_factory=ModelInfo)
    chat_format: ChatFormat = field(default_factory=ChatFormat)
    opens_answer: bool = False

    @property
    def renders_pairs(self) -> bool:
        """Whether the chat template is made for a pair of texts: messages of the roles query and document (the
        convention of vLLM and sentence-transformers)."""
        return self.chat is not None and all(role.search(self.chat.source) for role in _PAIR_ROLES)


def fetch_text(model: str, progress: Callable[[int, int], None] | None = None) -> TextModel:
    """The text side of a model, fetched if need be; progress(done_bytes, total_bytes) is called meanwhile."""
    checkpoint = open_text(resolve_model(model, progress=progress).path)
    try:
        return load_text(checkpoint)
    finally:
        checkpoint.close()


def load_text(
    checkpoint: Checkpoint,
    chat_template: str | None = None,
    *,
    tool_parser: str = AUTO,
    reasoning_parser: str = AUTO,
) -> TextModel:
    """Build the text side of an open checkpoint. `chat_template`: the source to use instead of the model's own;
    `tool_parser`, `reasoning_parser`: as in find_chat_format. Raises BadCheckpoint, and ConfigError for such a name."""
    if checkpoint.kind == "gguf":
        text = _load_gguf(checkpoint.metadata, chat_template)
    else:
        text = _load_folder(checkpoint, chat_template)
    named = checkpoint.metadata if checkpoint.kind == "gguf" else {}
    source = None if text.chat is None else text.chat.source
    return replace(
        text,
        fim=find_fim(text.tokenizer, named),
        info=model_info(checkpoint),
        chat_format=find_chat_format(
            source, text.tokenizer, tool_parser=tool_parser, reasoning_parser=reasoning_parser
        ),
    )


def _load_gguf(metadata: dict[str, Any], chat_template: str | None) -> TextModel:
    tokenizer = tokenizer_from_gguf(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {role: gguf_token_id(metadata, role) for role in ("bos", "eos", "eot", "eom")}
    types = metadata.get("tokenizer.ggml.token_type", [])
    ends = {ids[role] for role in ("eos", "eot", "eom") if ids[role] >= 0}
    marks = {tokens[i]: i for i, kind in enumerate(types) if kind == CONTROL}
    if all(mark in marks for mark in HARMONY_ENDS):
        ends |= {marks[mark] for mark in HARMONY_ENDS}
        ends.discard(marks.get(END, -1))
    else:
        ends |= {token for mark, token in marks.items() if mark in END_MARKS}
    bos = tokens[ids["bos"]] if ids["bos"] >= 0 else ""
    eos = tokens[ids["eos"]] if ids["eos"] >= 0 else ""
    own = metadata.get("tokenizer.chat_template")
    if isinstance(metadata.get(_RERANK), str):
        own = _pair_template(metadata[_RERANK])
    source = own if chat_template is None else chat_template
    architecture = metadata.get("general.architecture")
    return TextModel(
        tokenizer,
        ChatTemplate(source, bos, eos) if isinstance(source, str) else None,
        tuple(sorted(ends)),
        ids["bos"] if ids["bos"] >= 0 else None,
        _context(metadata.get(f"{architecture}.context_length"), f"{architecture}.context_length"),
    )


def _pair_template(text: str) -> str:
    """A chat template of a text with {query} and {document} in it."""
    pieces = re.split(r"\{(query|document)\}", text)
    for place, piece in enumerate(pieces):
        content = f'messages | selectattr("role", "eq", "{piece}") | map(attribute="content") | first'
        pieces[place] = "{{ " + (content if place % 2 else json.dumps(piece)) + " }}"
    return "".join(pieces)


def _load_folder(checkpoint: Checkpoint, chat_template: str | None) -> TextModel:
    tokenizer = tokenizer_from_folder(checkpoint.path)
    config = read_tokenizer_config(checkpoint.path)
    bos, eos = token_content(config.get("bos_token")), token_content(config.get("eos_token"))
    source = _chat_source(checkpoint.path, config) if chat_template is None else chat_template
    sentence = read_sentence_config(checkpoint.path)
    bos_token_id = tokenizer.token_id(bos) if bos is not None else value_of(checkpoint.metadata, "bos_token_id")
    return TextModel(
        tokenizer,
        ChatTemplate(source, bos or "", eos or "") if source is not None else None,
        _folder_ends(checkpoint, tokenizer, eos),
        bos_token_id if isinstance(bos_token_id, int) else None,
        _folder_context(checkpoint),
        prompts={} if sentence is None else sentence.prompts,
        default_prompt="" if sentence is None else sentence.default_prompt,
        opens_answer=sentence is not None and sentence.opens_answer,
    )


def _folder_ends(checkpoint: Checkpoint, tokenizer: Tokenizer, eos: str | None) -> tuple[int, ...]:
    """The tokenizer's EOS, and those of generation_config.json, or where it lists none, of config.json; where no file
    names any, what the model's type means by that."""
    listed = checkpoint.generation_config.get("eos_token_id", checkpoint.metadata.get("eos_token_id"))
    if eos is None and "eos_token_id" not in checkpoint.generation_config:
        listed = value_of(checkpoint.metadata, "eos_token_id")
    listed = listed if isinstance(listed, list) else [] if listed is None else [listed]
    if not all(type(token_id) is int and token_id >= 0 for token_id in listed):
        raise BadCheckpoint(f"eos_token_id must be a token id or a list of them, got {listed!r}.")
    named = tokenizer.token_id(eos) if eos is not None else None
    calls = [tokenizer.token_id(mark) for mark in HARMONY_ENDS]
    more = [named, *(calls if None not in calls else [])]
    return tuple(sorted({*listed, *(token for token in more if token is not None)}))


def _chat_source(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else chat_template.json, else the tokenizer's config: a string or a list of named ones."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        if file.stat().st_size > 4 * MAX_TEMPLATE_CHARS:
            raise BadCheckpoint(f"{file} is too large for a chat template.")
        return file.read_text(encoding="utf-8", errors="replace")
    source = config.get("chat_template")
    if (folder / "chat_template.json").is_file():
        source = read_json(folder / "chat_template.json").get("chat_template", source)
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _folder_context(checkpoint: Checkpoint) -> int:
    config = checkpoint.metadata
    known = keys_of(config)
    key = "n_positions" if "n_positions" in known else "max_position_embeddings"
    if "state_size" in known and key not in known:  # states alone, which know no positions
        return UNBOUNDED_CONTEXT
    length = value_of(config, key)
    if length is None and key not in config:
        architecture = architecture_of(config) or config.get("model_type", "")
        raise BadCheckpoint(
            f"{checkpoint.path}: architecture {architecture!r} is not supported; docs/use/models.md lists those that "
            "are."
        )
    return _context(length, key)


def _context(length: Any, key: str) -> int:
    if type(length) is not int or length < 1:
        raise BadCheckpoint(f"The checkpoint gives no usable context length: {key} is {length!r}.")
    return length

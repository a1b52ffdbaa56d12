"""What a checkpoint is, as clients that list models want it told: architecture, size, form. No tokens, no weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..formats.checkpoint import Checkpoint
from ..formats.quantised import stored_bytes
from ..formats.safetensors import pickled_weights

_EMBEDDING_KEYS = ("hidden_size", "d_model", "n_embd", "dim")


@dataclass(frozen=True, slots=True)
class About:
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
        for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
            if self.num_parameters >= unit:
                return f"{self.num_parameters / unit:.1f}{name}"
        return str(self.num_parameters or "")


def about(checkpoint: Checkpoint) -> About:
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
    return About(
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

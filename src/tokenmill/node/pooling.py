"""Whether a model is to give vectors rather than tokens, and which: what was asked, what the model's files say, and
what its kind is made for, in this order."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.errors import ConfigError
from ..core.request import PoolingParams
from ..formats.checkpoint import Checkpoint
from ..formats.sentence_transformers import read_sentence_config
from ..models.encoder_config import EncoderConfig, is_encoder
from ..models.vectors import is_bare_decoder, vector_config

_GGUF_POOLINGS = {1: "mean", 2: "cls", 3: "last"}


@dataclass(frozen=True, slots=True)
class PoolingChoice:
    """reason: where the way of pooling comes from. advised_len: most tokens of an input, or None."""

    params: PoolingParams
    reason: str
    advised_len: int | None = None

    def describe(self) -> str:
        params = self.params
        if params.how == "score":
            return f"scores of pairs{', through the sigmoid' if params.activation else ''}"
        return f"{params.how}{', scaled to length 1' if params.activation else ''}"


def choose_pooling(checkpoint: Checkpoint, runner: str, pooling: str | None) -> PoolingChoice | None:
    """None: the model gives tokens. Raises ConfigError for a wish that the model cannot meet, and BadCheckpoint."""
    has_no_head = is_encoder(checkpoint) or is_bare_decoder(checkpoint)
    if runner == "generate":
        if has_no_head or pooling is not None:
            why = "a model that has no language head" if has_no_head else "--pooling"
            raise ConfigError(f"--runner generate does not go with {why}.", param="runner")
        return None
    sentence = read_sentence_config(checkpoint.path) if checkpoint.kind == "hf" else None
    in_gguf = _gguf_pooling(checkpoint)
    if not (has_no_head or sentence or in_gguf or pooling or runner == "pooling"):
        return None
    config = vector_config(checkpoint)
    advised_len = None if sentence is None else sentence.max_length
    if isinstance(config, EncoderConfig) and config.has_head:
        if pooling is not None:
            raise ConfigError("--pooling is for models that give vectors; this one gives scores.", param="pooling")
        return PoolingChoice(PoolingParams("score", activation=config.score_activation), "a classifier", advised_len)
    if sentence is not None:
        how, reason = sentence.pooling, "the model's modules.json"
    elif in_gguf is not None:
        how, reason = in_gguf, "the model's file"
    else:
        how, reason = "mean" if isinstance(config, EncoderConfig) else "last", "usual for its kind"
    activation = "unit" if sentence is None or sentence.normalize else ""
    params = PoolingParams(pooling or how, activation=activation)
    return PoolingChoice(params, "as asked" if pooling else reason, advised_len)


def _gguf_pooling(checkpoint: Checkpoint) -> str | None:
    architecture = checkpoint.metadata.get("general.architecture")
    kind = checkpoint.metadata.get(f"{architecture}.pooling_type")
    return _GGUF_POOLINGS.get(kind) if isinstance(kind, int) else None

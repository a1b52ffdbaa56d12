"""Every key of every type's config.json, present, null and absent: what decides the answer equals what transformers
builds from the same file, or the file is refused by name.

Where transformers cannot build a model, neither do we. Where it can and we refuse, the reason is one of a short list.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the oracle needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")

from config_table import ABSENT, TYPES, cases, differences, ours, theirs  # noqa: E402

from tokenmill.core.errors import BadCheckpoint  # noqa: E402
from tokenmill.formats.checkpoint import Checkpoint  # noqa: E402
from tokenmill.formats.config_keys import ARCHITECTURES, CONFIG_KEYS, value_of  # noqa: E402
from tokenmill.models.encoder_config import FAMILIES, encoder_config  # noqa: E402
from tokenmill.models.encoder_weights import expected_shapes  # noqa: E402
from tokenmill.models.families import HF_FAMILIES  # noqa: E402
from tokenmill.models.unread import WITHOUT_EFFECT, unread_keys  # noqa: E402

KNOWN_REFUSALS = re.compile(
    "must not be|must be a positive integer|must be a number|by layer type|with two kinds of layer|partial_rotary_fac"
    "|activation|layer_types|scaling '|heads do not divide|RoPE on|parallel residuals|norms of each head"
    "|caps of|sees? ahead|head_dim of a|sliding_attention need"
)
"""Why we refuse what transformers takes."""


@pytest.mark.parametrize("kind", TYPES)
def test_decoders(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    transformers.logging.set_verbosity_error()
    outcomes: Counter[str] = Counter()
    wrong = []
    for name, config in cases(kind):
        reason, mine, other = "", None, None
        try:
            mine = ours(config)
        except BadCheckpoint as error:
            reason = str(error)
        try:
            other = theirs(config)
        except Exception as error:  # transformers raises whatever comes
            if mine is not None:
                wrong.append(f"{name}: we take it, transformers fails: {error!r}"[:300])
        if mine is None:
            outcomes["refused"] += 1
            if other is not None and not KNOWN_REFUSALS.search(reason):
                wrong.append(f"{name}: refused: {reason}")
        elif other is not None:
            outcomes["equal"] += 1
            found = differences(mine, other)
            if kind == "helium" and found == ["shapes"]:  # an output as wide as the model, of narrower heads: it cannot
                found = []  # run there, and its tensors are refused here
            wrong += [f"{name}: {fact} differs" for fact in found]
    assert not wrong, "\n".join(wrong)
    assert outcomes["equal"] > outcomes["refused"] / 2


@pytest.mark.parametrize("kind", CONFIG_KEYS)
def test_every_key_of_the_class_is_known(kind: str) -> None:
    """Each field of transformers' class is read, refused, or without effect; and a missing one means its default."""
    made = transformers.AutoConfig.for_model(kind)
    fields = {field.name: field.default for field in dataclasses.fields(made)}
    refused = {key for key, _ in HF_FAMILIES[ARCHITECTURES[kind]].refused} if kind in ARCHITECTURES else set()
    ends = {name for name in fields if name.endswith("_token_id")}
    assert fields.keys() - CONFIG_KEYS[kind].keys() - WITHOUT_EFFECT - refused - ends == {"tie_word_embeddings"} & (
        set() if kind in ARCHITECTURES else fields.keys()
    )
    for key, known in CONFIG_KEYS[kind].items():
        if key in fields and not known.required and kind != "glm4":
            assert known.default == fields[key], key
        elif key.endswith("eos_token_id"):
            assert value_of({"model_type": kind}, key) == getattr(made, key, None)


@pytest.mark.parametrize("kind", TYPES)
def test_only_listed_keys_are_read(kind: str) -> None:
    """Each key that is looked at is one of the type's, one that is checked to be as it must, or tells the type."""
    seen: set[str] = set()

    class Watched(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            seen.add(key)
            return super().get(key, default)

        def __getitem__(self, key: str) -> Any:
            seen.add(key)
            return super().__getitem__(key)

    _, config = next(cases(kind))
    from tokenmill.models.config import config_from_checkpoint

    config_from_checkpoint(Checkpoint("hf", Path("x"), Watched(config), {}))
    checked = {"model_type", "architectures", "per_layer_config", "is_causal", "layer_types", "head_dim"}
    checked |= {"partial_rotary_factor"} | {key for key, _ in HF_FAMILIES[ARCHITECTURES[kind]].refused}
    assert seen - checked <= CONFIG_KEYS[kind].keys()
    assert CONFIG_KEYS[kind].keys() - seen == set()


def test_unknown_keys_are_told_of() -> None:
    """What transformers writes itself is known; a key of nobody's is named, in the RoPE settings too."""
    for kind in TYPES:
        config = transformers.AutoConfig.for_model(kind).to_dict()
        config |= {"architectures": [ARCHITECTURES[kind]], "model_type": kind}
        assert unread_keys(Checkpoint("hf", Path("x"), config, {})) == (), kind
    config = {"model_type": "llama", "head_scale": 2, "rope_scaling": {"rope_type": "default", "bend": 1}}
    assert unread_keys(Checkpoint("hf", Path("x"), config, {})) == ("head_scale", "rope_scaling.bend")


ENCODER_VALUES: dict[str, list[Any]] = {
    "vocab_size": [100],
    "hidden_size": [32],
    "dim": [32],
    "intermediate_size": [40],
    "hidden_dim": [40],
    "num_hidden_layers": [2],
    "n_layers": [2],
    "num_attention_heads": [2],
    "n_heads": [2],
    "hidden_act": ["gelu", "gelu_new", "relu", "silu"],
    "activation": ["gelu", "relu"],
    "max_position_embeddings": [77],
    "type_vocab_size": [1, 3],
    "layer_norm_eps": [0.1],
    "pad_token_id": [3],
    "is_decoder": [True, False],
    "add_cross_attention": [True, False],
    "position_embedding_type": ["absolute"],
    "chunk_size_feed_forward": [4],
}
ENCODER_BASE = {
    "bert": {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24, "num_hidden_layers": 1},
    "distilbert": {"dim": 16, "n_heads": 4, "hidden_dim": 24, "n_layers": 1},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_encoders(name: str) -> None:
    kind = FAMILIES[name].kind
    base = ENCODER_BASE.get(kind, ENCODER_BASE["bert"]) | {"model_type": kind, "architectures": [f"{name}Model"]}
    taken = 0
    for key, values in ENCODER_VALUES.items():
        for value in (ABSENT, None, *values):
            config = {other: given for other, given in base.items() if other != key}
            if value is not ABSENT:
                config[key] = value
            what = f"{name} {key} {'absent' if value is ABSENT else value}"
            try:
                mine = _our_encoder(config)
            except BadCheckpoint:
                continue
            taken += 1
            assert mine == _their_encoder(config), what
    assert taken > len(ENCODER_VALUES)


def _our_encoder(config: dict[str, Any]) -> dict[str, Any]:
    made = encoder_config(Checkpoint("hf", Path("x"), config, {}))
    prefix = made.prefix
    shapes = {tensor.removeprefix(prefix): shape for _, tensor, shape in expected_shapes(made)}
    return {
        "shapes": shapes, "eps": made.norm_eps, "activation": made.activation, "heads": made.num_heads,
        "first": made.first_position,
    }  # fmt: skip


def _their_encoder(config: dict[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in config.items() if key != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **given)
    made._attn_implementation = "eager"
    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])(made)
    shapes = {
        key: tuple(value.shape)
        for key, value in model.state_dict().items()
        if not key.startswith("pooler.") and not key.endswith("position_ids")
    }
    layers = model.transformer.layer if config["model_type"] == "distilbert" else model.encoder.layer
    acting = layers[0].ffn.activation if config["model_type"] == "distilbert" else layers[0].intermediate
    activation = type(getattr(acting, "intermediate_act_fn", acting)).__name__
    norm = model.embeddings.LayerNorm
    from_pad = getattr(model.embeddings, "padding_idx", None)
    return {
        "shapes": shapes,
        "eps": norm.eps,
        "activation": {"GELUActivation": "gelu_erf", "NewGELUActivation": "gelu"}.get(activation, activation),
        "heads": made.num_attention_heads,
        "first": from_pad + 1 if from_pad is not None and config["model_type"] != "bert" else 0,
    }

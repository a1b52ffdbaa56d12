"""Every key of every type's config.json, present, null and absent: what decides the answer equals what transformers
builds from the same file, or the file is refused by name.

Where transformers cannot build a model, neither do we. Where it can and we refuse, the reason is one of a short list.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the oracle needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")

from config_table import ABSENT, TYPES, WITHOUT_A_CLASS, WITHOUT_ROPE, cases, differences, ours, theirs  # noqa: E402
from families import SCALED_QUERIES  # noqa: E402
from transformers.core_model_loading import revert_weight_conversion  # noqa: E402

from tokenmill.core.errors import BadCheckpoint  # noqa: E402
from tokenmill.formats.checkpoint import Checkpoint  # noqa: E402
from tokenmill.formats.config_keys import (  # noqa: E402
    ARCHITECTURES,
    CONFIG_KEYS,
    value_of,
)
from tokenmill.formats.encoder_keys import ENCODER_TYPES, NOMIC_OWN_KEYS  # noqa: E402
from tokenmill.models.encoder import expected_shapes  # noqa: E402
from tokenmill.models.encoder_config import EncoderConfig, encoder_config  # noqa: E402
from tokenmill.models.encoder_families import FAMILIES, NOMIC_OWN, encoder_family  # noqa: E402
from tokenmill.models.families import HF_FAMILIES  # noqa: E402
from tokenmill.models.family import Family  # noqa: E402
from tokenmill.models.mixer import OLDER_KEYS  # noqa: E402
from tokenmill.models.rope import rope_frequencies  # noqa: E402
from tokenmill.models.unsupported_keys import WITHOUT_EFFECT, unread_keys  # noqa: E402

KNOWN_REFUSALS = re.compile(
    "must not be|must be a positive integer|must be a number|by layer type|with two kinds of layer|partial_rotary_fac"
    "|activation|layer_types|scaling '|heads do not divide|RoPE on|parallel residuals|norms of each head"
    "|caps of|sees? ahead|head_dim of a|sliding_attention need|experts for a token are more|do not divide into . groups"
    "|what it asks of the choice|_experts differ|per_tok differ|_(top)?k differ|layers differ|moe_norm_min must"
    "|swiglu_limit must|: (windows|clipped|biases)|must be an integer|is not supported here|of latent attention must be"
    "|is not supported below|per_layer_config|leaves no layer"
    "|older names of settings|experts of fewer channels|num_hidden_layers is not|must be 1[)]|must be below"
    "|must be even|do not fit|two of a sparse mixer|mscale that differ|heads of states|time_step_limit must"
    "|groups are not"
)
"""Why we refuse what transformers takes."""
PROPERTIES = {"bamba": "layer_types None", "falcon": "head_dim None"}
"""There these are set by no file."""


FOLLOWS = {(kind, "head_dim") for kind in ("deepseek_v32", "glm_moe_dsa")}
"""Keys to which a class gives another value than the file does, and than its default."""


@pytest.mark.sampled(1 / 4)
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
            # It checks some keys that decide nothing; and some that no file sets.
            key = name.split(": ")[1].split()[0]
            is_checked = kind in WITHOUT_ROPE and key not in CONFIG_KEYS[kind]
            is_checked |= kind == "falcon_h1" and key == "layer_types"
            if mine is not None and not is_checked and not name.endswith(PROPERTIES.get(kind, "-")):
                wrong.append(f"{name}: we take it, transformers fails: {error!r}"[:300])
        if mine is None:
            outcomes["refused"] += 1
            if other is not None and not KNOWN_REFUSALS.search(reason):
                wrong.append(f"{name}: refused: {reason}")
        elif other is not None:
            outcomes["equal"] += 1
            found = differences(mine, other)
            if kind in ("helium", "olmoe") and found == ["shapes"]:  # an output, or norms, as wide as the model, of
                found = []  # narrower heads: it cannot run there, and its tensors are refused here
            if kind == "bamba" and name.endswith(
                ": partial_rotary_factor 1.0"
            ):  # there it is 0.5 whatever the file says
                found = []
            wrong += [f"{name}: {fact} differs" for fact in found]
    assert not wrong, "\n".join(wrong)
    assert outcomes["equal"] > outcomes["refused"] / 2


@pytest.mark.parametrize("kind", sorted(CONFIG_KEYS.keys() - set(WITHOUT_A_CLASS)))
def test_every_key_of_the_class_is_known(kind: str) -> None:
    """Each field of transformers' class is read, refused, or without effect; and a missing one means its default."""
    made = transformers.AutoConfig.for_model(kind)
    fields = {field.name: field.default for field in dataclasses.fields(made)}
    family = HF_FAMILIES[ARCHITECTURES[kind]] if kind in ARCHITECTURES else encoder_family({"model_type": kind})
    assert family is not None
    refused = {key for key, _ in family.refused}
    if isinstance(family, Family):
        refused |= {family.sees_ahead_key, *family.only}
    ends = {name for name in fields if name.endswith("_token_id")}
    assert fields.keys() - CONFIG_KEYS[kind].keys() - WITHOUT_EFFECT - refused - ends == {"tie_word_embeddings"} & (
        set() if kind in ARCHITECTURES else fields.keys()
    )
    for key, known in CONFIG_KEYS[kind].items():
        if (kind, key) in FOLLOWS:
            assert known.default is None
        elif key in fields and not known.required and kind not in ("glm", "glm4", "cwm"):
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

        def __contains__(self, key: object) -> bool:
            seen.add(str(key))
            return super().__contains__(key)

        def __getitem__(self, key: str) -> Any:
            seen.add(key)
            return super().__getitem__(key)

    _, config = next(cases(kind))
    from tokenmill.models.config import config_from_checkpoint

    config_from_checkpoint(Checkpoint("hf", Path("x"), Watched(config), {}))
    checked = {"model_type", "architectures", "per_layer_config", "is_causal", "layer_types", "head_dim"}
    family = HF_FAMILIES[ARCHITECTURES[kind]]
    checked |= {"partial_rotary_factor", family.sees_ahead_key, *(key for key, _ in family.refused), *family.only}
    checked |= {*family.key_names, *(OLDER_KEYS if family.one_sublayer else ())}
    assert seen - checked <= CONFIG_KEYS[kind].keys()
    assert CONFIG_KEYS[kind].keys() - seen == set()


def test_unknown_keys_are_told_of() -> None:
    """What transformers writes itself is known; a key of nobody's is named, in the RoPE settings too."""
    for kind in CONFIG_KEYS.keys() - set(WITHOUT_A_CLASS):
        config = transformers.AutoConfig.for_model(kind).to_dict() | {"model_type": kind}
        if kind in ARCHITECTURES:
            config |= {"architectures": [ARCHITECTURES[kind]]}
        assert unread_keys(Checkpoint("hf", Path("x"), config, {})) == (), kind
    config = {"model_type": "llama", "head_scale": 2, "rope_scaling": {"rope_type": "default", "bend": 1}}
    assert unread_keys(Checkpoint("hf", Path("x"), config, {})) == ("head_scale", "rope_scaling.bend")
    config = {"model_type": "mistral", "rope_parameters": SCALED_QUERIES}
    assert unread_keys(Checkpoint("hf", Path("x"), config, {})) == ("rope_parameters.llama_4_scaling_beta",)
    modern = {"model_type": "modernbert", "norm_eps": 1e-5, "position_embedding_type": "absolute"}
    for eps, told in ((1e-5, ()), (1e-6, ("layer_norm_eps",))):
        assert unread_keys(Checkpoint("hf", Path("x"), modern | {"layer_norm_eps": eps}, {})) == told
    config = {"model_type": "distilbert", "hidden_size": 32, "num_attention_heads": 2, "tie_word_embeddings": True}
    assert unread_keys(Checkpoint("hf", Path("x"), config, {})) == ()


_FULL, _SLIDING = "full_attention", "sliding_attention"
_BASES = {_FULL: {"rope_theta": 55.0, "rope_type": "default"}, _SLIDING: {"rope_theta": 44.0}}
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
    "head_dim": [4, 8],
    "hidden_act": ["gelu", "gelu_new", "relu", "silu"],
    "hidden_activation": ["gelu", "gelu_pytorch_tanh", "relu", "silu", "swiglu"],
    "activation": ["gelu", "relu"],
    "max_position_embeddings": [77],
    "type_vocab_size": [0, 1, 3],
    "embedding_size": [16, 32],
    "layer_norm_eps": [0.1],
    "norm_eps": [0.1],
    "norm_bias": [True, False],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "local_attention": [6, 7],
    "layer_types": [[_SLIDING, _FULL, _FULL], [_FULL], [], ["linear"] * 3],
    "global_attn_every_n_layers": [1, 2, 0],
    "global_rope_theta": [777.0],
    "local_rope_theta": [777.0],
    "rope_theta": [777.0],
    "rotary_emb_base": [777.0],
    "rope_parameters": [
        {}, {"rope_type": "default", "rope_theta": 55.0}, {"rope_type": "linear", "factor": 2.0},
        {"type": "linear", "factor": 2.0}, _BASES, {_FULL: {"rope_theta": 55.0}}, {_FULL: None}, {_FULL: {}},
        {_SLIDING: {"type": "linear", "factor": 2.0}}, {"rope_theta": None},
    ],
    "rope_scaling": [{}, {"type": "linear", "factor": 2.0}],
    "classifier_pooling": ["cls", "mean", "max"],
    "classifier_bias": [True, False],
    "classifier_activation": ["gelu", "gelu_new", "relu"],
    "qkv_proj_bias": [True, False],
    "pad_token_id": [3],
    "is_decoder": [True, False],
    "add_cross_attention": [True, False],
    "position_embedding_type": ["absolute"],
    "chunk_size_feed_forward": [4],
}  # fmt: skip
ENCODER_BASE = {
    "bert": {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24, "num_hidden_layers": 1},
    "distilbert": {"dim": 16, "n_heads": 4, "hidden_dim": 24, "n_layers": 1},
    "electra": {
        "hidden_size": 16, "embedding_size": 16, "num_attention_heads": 4, "intermediate_size": 24,
        "num_hidden_layers": 1,
    },
    "modernbert": {
        "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24, "num_hidden_layers": 3, "pad_token_id": 0,
    },
}  # fmt: skip
_SCORES = "ForSequenceClassification"
_ROPED = ("nomic_bert", "gte", "jina_embeddings_v3")


@pytest.mark.parametrize(
    "architecture", [*(f"{name}Model" for name in FAMILIES if name != "New"), f"ModernBert{_SCORES}"]
)
def test_encoders(architecture: str) -> None:
    kind = ENCODER_TYPES[architecture.removesuffix("Model").removesuffix(_SCORES)]
    base = ENCODER_BASE.get(kind, ENCODER_BASE["bert"]) | {"model_type": kind, "architectures": [architecture]}
    base |= {"num_labels": 1} if architecture.endswith(_SCORES) else {}
    taken, wrong = 0, []
    for key, values in ENCODER_VALUES.items():
        for value in (ABSENT, None, *values):
            config = {other: given for other, given in base.items() if other != key}
            if value is not ABSENT:
                config[key] = copy.deepcopy(value)
            what = f"{key} {'absent' if value is ABSENT else value}"
            try:
                mine = _facts(_our_encoder(config))
            except BadCheckpoint:
                continue
            taken += 1
            try:
                other = _their_encoder(config)
            except Exception as error:  # transformers raises whatever comes
                if key in CONFIG_KEYS[kind]:  # it checks some keys of all its types
                    wrong.append(f"{what}: we take it, transformers fails: {error!r}"[:300])
                continue
            wrong += [f"{what}: {fact}: {mine[fact]}, {other[fact]}" for fact in mine if mine[fact] != other[fact]]
    assert not wrong, "\n".join(wrong)
    assert taken > 1.5 * len(ENCODER_VALUES)


def _our_encoder(config: dict[str, Any]) -> EncoderConfig:
    return encoder_config(Checkpoint("hf", Path("x"), copy.deepcopy(config), {}))


def _facts(made: EncoderConfig) -> dict[str, Any]:
    ropes = [None if layer.rope is None else rope_frequencies(layer.rope, made.head_dim, 1) for layer in made.layers]
    return {
        "shapes": {name.removeprefix(made.prefix): shape for _, name, shape in expected_shapes(made)},
        "eps": made.norm_eps, "activation": made.activation, "heads": made.num_heads, "first": made.first_position,
        "context": made.max_context, "windows": [layer.window for layer in made.layers],
        "ropes": [None if rope is None else _rounded(rope) for rope in ropes],
        "head": (made.score_pooling, made.head_activation) if made.has_head else None,
    }  # fmt: skip


def _rounded(values: Any) -> list[str]:
    return [f"{float(value):.4e}" for value in values]


def _named(activation: Any) -> str:
    name = type(activation).__name__
    return {
        "GELUActivation": "gelu_erf", "NewGELUActivation": "gelu", "GELUTanh": "gelu", "SiLUActivation": "silu",
        "SiLU": "silu",
    }.get(name, name)  # fmt: skip


def _their_encoder(config: dict[str, Any]) -> dict[str, Any]:
    kind = config["model_type"]
    given = {key: value for key, value in copy.deepcopy(config).items() if key != "model_type"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old spellings
        made = transformers.AutoConfig.for_model(kind, **given)
    made._attn_implementation = "eager"
    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])(made)
    state = revert_weight_conversion(model, model.state_dict()) if kind in _ROPED else model.state_dict()
    shapes = {
        key.removeprefix("model.").removeprefix("new."): tuple(value.shape)
        for key, value in state.items()
        if not key.startswith("pooler.") and not key.endswith("position_ids")
    }
    body = getattr(model, "model", model)
    ropes: list[Any] = [None] * made.num_hidden_layers
    windows, first, norm = [0] * made.num_hidden_layers, 0, getattr(body.embeddings, "LayerNorm", None)
    if kind == "modernbert":
        acting, norm = body.layers[0].mlp.act, body.embeddings.norm
        rotary = type(body.rotary_emb)(made)
        ropes = [_rounded(getattr(rotary, f"{layer.attention_type}_inv_freq")) for layer in body.layers]
        windows = [layer.attn.sliding_window or 0 for layer in body.layers]
    elif kind in _ROPED:
        mlp = body.layers[0].mlp
        acting = mlp.activation_fn if kind == "jina_embeddings_v3" else mlp.act_fn
        ropes = [_rounded(type(body.rotary_emb)(made).inv_freq)] * made.num_hidden_layers
    elif kind == "distilbert":
        acting = body.transformer.layer[0].ffn.activation
    else:
        acting = body.encoder.layer[0].intermediate.intermediate_act_fn
        padding = getattr(body.embeddings, "padding_idx", None)
        first = padding + 1 if padding is not None and kind != "bert" else 0
    return {
        "shapes": shapes,
        "eps": norm.eps,
        "activation": _named(acting),
        "heads": made.num_attention_heads,
        "first": first,
        "context": made.max_position_embeddings - first,
        "windows": windows,
        "ropes": ropes,
        "head": None if body is model else (made.classifier_pooling, _named(model.head.act)),
    }


def test_nomics_own_keys() -> None:
    """A file as Nomic's makers spell it is read as transformers' spelling of the same; by keys of its own, with the
    defaults of their class, and no others."""
    plain = {
        "vocab_size": 100, "n_embd": 48, "n_head": 4, "n_inner": 24, "n_layer": 2, "n_positions": 77,
        "activation_function": "swiglu", "layer_norm_epsilon": 0.1, "rotary_emb_base": 777.0,
        "rotary_emb_fraction": 1.0,
        "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "type_vocab_size": 3,
    }  # fmt: skip
    names = {own: usual for usual, own in NOMIC_OWN.keys.items()}
    base = {"model_type": "nomic_bert", "architectures": ["NomicBertModel"]}
    usual = {names.get(key, key): value for key, value in plain.items()} | {"hidden_act": "silu"}
    assert _facts(_our_encoder(base | plain)) == _facts(_our_encoder(base | usual))
    assert _our_encoder({"architectures": ["NomicBertModel"]} | plain) == _our_encoder(base | plain)
    assert value_of(base | plain, "n_positions") == 77
    assert unread_keys(Checkpoint("hf", Path("x"), base | plain, {})) == ()
    fails = {"n_inner", "activation_function", "rotary_emb_fraction", "n_embd"}
    for key in plain.keys() - fails:
        without = {other: value for other, value in plain.items() if other != key}
        meant = plain | {key: NOMIC_OWN_KEYS[key].default}
        assert _our_encoder(base | without) == _our_encoder(base | meant), key
        with pytest.raises(BadCheckpoint, match=key):
            _our_encoder(base | plain | {key: None})
    for key in fails - {"n_embd"}:
        with pytest.raises(BadCheckpoint, match=f"{key}|gelu_new"):
            _our_encoder(base | {other: value for other, value in plain.items() if other != key})
    for key, _ in NOMIC_OWN.refused:
        for file in (plain, usual):
            with pytest.raises(BadCheckpoint, match=key):
                _our_encoder(base | file | {key: 2})
    scaled = plain | {"n_positions": 4096, "rotary_scaling_factor": 2}
    assert _our_encoder(base | scaled).max_context == 2048
    assert _our_encoder(base | scaled | {"max_trained_positions": 99}).max_context == 99
    assert _our_encoder(base | plain | {"hidden_size": 32, "max_position_embeddings": 5}).width == 48

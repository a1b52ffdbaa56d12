"""Folders whose model also reads images: their language model, from its place beside the image tower, against
transformers' whole model asked with text alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import SCALED_QUERIES, SHAPE
from test_families import LENGTH, TOLERANCE, our_logits, random_tokens

from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats.checkpoint import open_checkpoint
from tokenmill.formats.multimodal import WRAPPERS, language_part
from tokenmill.formats.safetensors import read_json
from tokenmill.models.config import config_from_checkpoint
from tokenmill.models.summary import model_summary
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps

torch = pytest.importorskip("torch", reason="the oracle needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")

EYES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TILES = {**EYES, "image_size": [28, 28], "patch_size": [14, 14]}
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16}
QWEN_EYES = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
MROPE = {"rope_type": "default", "rope_theta": 10000.0}


def sections(*sizes: int) -> dict[str, Any]:
    return {"rope_parameters": {**MROPE, "mrope_section": list(sizes)}}


CASES = {
    "Gemma3": ("Gemma3Text", {"head_dim": 16, "sliding_window": 8}, EYES),
    "Gemma4": (
        "Gemma4Text",
        {"head_dim": 16, "sliding_window": 8, "global_head_dim": 32, "num_kv_shared_layers": 2}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 160},
        {**EYES, "head_dim": 16},
    ),
    "Gemma4Unified": (
        "Gemma4UnifiedText",
        {"head_dim": 16, "sliding_window": 8, "global_head_dim": 32, "attention_k_eq_v": True}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        {"mm_embed_dim": 32, "output_proj_dims": 32},
    ),
    "Glm4vMoe": (
        "Glm4vMoeText",
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]},
        },
        {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64},
    ),
    "Idefics3": ("Llama", {}, EYES),
    "InternVL": ("Qwen2", {}, TILES),
    "InternVL over GPT-OSS": ("GptOss", EXPERTS | {"sliding_window": 8, "max_position_embeddings": 8192}, TILES),
    "InternVL over Qwen3-MoE": ("Qwen3Moe", EXPERTS | {"num_experts": 6, "moe_intermediate_size": 32}, TILES),
    "Lfm2Vl": (
        "Lfm2",
        {"full_attn_idxs": [1], "block_multiple_of": 16},
        {"model_type": "siglip2_vision_model", **EYES, "num_patches": 16},
    ),
    "Llama4": (
        "Llama4Text",
        {"head_dim": 16, "num_local_experts": 4, "attention_chunk_size": 16, "intermediate_size_mlp": 80},
        {**EYES, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
    "Llava": ("Llama", {"tie_word_embeddings": False}, {"model_type": "clip_vision_model", **EYES}),
    "LlavaNext": ("Mistral", {"tie_word_embeddings": False}, {"model_type": "clip_vision_model", **EYES}),
    "Mistral3": ("Mistral", {"head_dim": 32}, {"model_type": "pixtral", **EYES}),
    "Mistral3 over Ministral 3": (
        "Ministral3",
        {"head_dim": 16, "rope_parameters": SCALED_QUERIES},
        {"model_type": "pixtral", **EYES},
    ),
    "Qwen2VL": ("Qwen2VLText", sections(2, 3, 3), {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64}),
    "Qwen2_5_VL": ("Qwen2_5_VLText", sections(2, 3, 3), QWEN_EYES),
    "Qwen3_5": (
        "Qwen3_5Text",
        {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4},
        QWEN_EYES,
    ),
    "Qwen3_5Moe": (
        "Qwen3_5MoeText",
        {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 32},
        QWEN_EYES,
    ),
    "Qwen3VL": ("Qwen3VLText", {"head_dim": 16, **sections(4, 2, 2)}, QWEN_EYES | {"deepstack_visual_indexes": [0]}),
    "Qwen3VLMoe": (
        "Qwen3VLMoeText",
        {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, **sections(4, 2, 2)},
        QWEN_EYES | {"deepstack_visual_indexes": [0]},
    ),
    "SmolVLM": ("Llama", {}, EYES),
}
"""Wrapper, and what is inside where there are several -> (its text config's class, its options, its vision_config)."""


def wrapper(name: str) -> str:
    return name.partition(" ")[0]


def save(name: str, folder: Path) -> Any:
    """A small random model, saved; what transformers reads back."""
    text_name, options, eyes = CASES[name]
    text = getattr(transformers, f"{text_name}Config")(**SHAPE | options).to_dict()
    config = getattr(transformers, f"{wrapper(name)}Config")(text_config=text, vision_config=eyes)
    kind = getattr(transformers, f"{wrapper(name)}ForConditionalGeneration")
    torch.manual_seed(1)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim >= 2 else 1).add_(0.02 * torch.randn_like(parameter))
        for part, buffer in model.named_buffers():
            if part.endswith("correction_bias"):
                buffer.add_(0.2 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def test_every_wrapper_has_a_case() -> None:
    assert {f"{wrapper(name)}ForConditionalGeneration" for name in CASES} == set(WRAPPERS)


@pytest.mark.parametrize("name", CASES)
def test_text_has_the_whole_models_logits(name: str, tmp_path: Path) -> None:
    """At every position; and the summary finds all of the language model, and says what is left out."""
    theirs = save(name, tmp_path)
    tokens = random_tokens(2, LENGTH)
    # Llama 4's whole model wants images of its text's output, in transformers 5.24, and fails.
    whole = theirs.language_model if name == "Llama4" else theirs
    with torch.no_grad():
        expected = whole(input_ids=torch.tensor(tokens[None].astype(np.int64))).logits[0].numpy()
    ops = ReferenceOps(exact_activations=True) if available() is not None else NativeOps()
    ours = our_logits(ops, tmp_path, 64, tokens)
    ops.close()
    largest = np.abs(expected).max()
    assert largest > 0.1
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE * largest)
    checkpoint = open_checkpoint(tmp_path)
    assert "images" in checkpoint.left_out
    assert model_summary(checkpoint).num_parameters < sum(parameter.numel() for parameter in theirs.parameters())


def test_sparse_configs_mean_what_transformers_makes_of_them(tmp_path: Path) -> None:
    """What `text_config` leaves out is the default of its class; end tokens stand outside it."""
    for kind, config_name, told in (
        ("gemma3_text", "Gemma3", {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}),
        ("llama", "Llava", {"max_position_embeddings": 4096, "vocab_size": 32064}),
        ("mistral", "LlavaNext", {}),
    ):
        sparse = {"model_type": kind, **told}
        whole = {"architectures": [f"{config_name}ForConditionalGeneration"], "text_config": sparse, "eos_token_id": 7}
        config, _, _ = language_part(whole, {})
        theirs = getattr(transformers, f"{config_name}Config")(text_config=sparse).text_config
        checkpoint = open_checkpoint(save_nothing(tmp_path / kind, config))
        ours = config_from_checkpoint(checkpoint)
        assert config["eos_token_id"] == 7
        assert (ours.width, ours.ffn_width, ours.num_layers) == (
            theirs.hidden_size,
            theirs.intermediate_size,
            theirs.num_hidden_layers,
        )
        assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
        assert (ours.vocab_size, ours.max_context) == (theirs.vocab_size, theirs.max_position_embeddings)
        assert (ours.norm_eps, ours.head_dim) == (theirs.rms_norm_eps, theirs.head_dim)
        window = getattr(theirs, "sliding_window", None)
        assert max(layer.window for layer in ours.layers) == (window or 0)


def test_experts_whose_inputs_come_first(tmp_path: Path) -> None:
    """As Qwen3-VL-MoE was published: each tensor of experts turned round, against the same model as transformers saves
    it, which reads both."""
    from safetensors.numpy import load_file, save_file

    theirs = save("Qwen3VLMoe", tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    turned = {
        name: np.ascontiguousarray(values.swapaxes(1, 2)) if ".experts." in name else values
        for name, values in stored.items()
    }
    shutil.copytree(tmp_path / "saved", tmp_path / "published")
    save_file(turned, tmp_path / "published" / "model.safetensors", {"format": "pt"})
    again = (
        type(theirs).from_pretrained(tmp_path / "published", dtype=torch.float32, attn_implementation="eager").eval()
    )
    tokens = random_tokens(2, LENGTH)
    whole = torch.tensor(tokens[None].astype(np.int64))
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=whole).logits, again(input_ids=whole).logits)
    ours = [our_logits(ReferenceOps(), tmp_path / name, 64, tokens) for name in ("saved", "published")]
    assert np.array_equal(*ours)
    found = [model_summary(open_checkpoint(tmp_path / name)) for name in ("saved", "published")]
    assert found[0].num_parameters == found[1].num_parameters
    assert sum(group.stored_bytes for group in found[0].groups) == sum(group.stored_bytes for group in found[1].groups)


@pytest.mark.parametrize("window", [None, 8])
def test_a_window_of_null_is_none(window: int | None, tmp_path: Path) -> None:
    """As Mistral Small 3.1 and LLaVA-NeXT say it, though their class has a window where nothing is said."""
    text = {"model_type": "mistral", "sliding_window": window}
    whole = {"architectures": ["LlavaNextForConditionalGeneration"], "text_config": text}
    config, _, _ = language_part(whole, {})
    ours = config_from_checkpoint(open_checkpoint(save_nothing(tmp_path / "m", config)))
    assert transformers.LlavaNextConfig(text_config=text).text_config.sliding_window == window
    assert {layer.window for layer in ours.layers} == {window or 0}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("outer", [None, True, False])
@pytest.mark.parametrize("inner", [None, True, False])
def test_heads_are_tied_where_transformers_ties_them(name: str, outer: bool | None, inner: bool | None) -> None:
    """Also by the word of the text inside alone, which newer classes take no notice of: without a head in the file
    theirs would be random."""
    kind = f"{wrapper(name)}ForConditionalGeneration"
    text_name, options, eyes = CASES[name]
    text_type = getattr(transformers, f"{text_name}Config").model_type
    text = {"model_type": text_type, **({} if inner is None else {"tie_word_embeddings": inner})}
    said = {} if outer is None else {"tie_word_embeddings": outer}
    config, _, _ = language_part({"architectures": [kind], "text_config": text, **said}, {})
    theirs = getattr(transformers, f"{wrapper(name)}Config")(
        text_config=SHAPE | text | options, vision_config=eyes, **said
    )
    assert config["tie_word_embeddings"] == (bool(theirs.tie_word_embeddings) or bool(inner))


def save_nothing(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with a config and one tensor that no model has."""
    import json

    from safetensors.numpy import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"x": np.zeros(1, np.float32)}, folder / "model.safetensors")
    return folder


def test_a_model_type_names_an_architecture_where_nothing_else_does(tmp_path: Path) -> None:
    save("Gemma3", tmp_path)
    inner = read_json(tmp_path / "config.json")["text_config"] | {"architectures": None}
    assert config_from_checkpoint(open_checkpoint(save_nothing(tmp_path / "text", inner))).family.title == "Gemma 3"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"text_config": {"model_type": "helium"}}, "'helium' is not supported"),
        ({"text_config": [1]}, "not an object"),
        ({"architectures": ["PaliGemmaForConditionalGeneration"], "text_config": {"model_type": "gemma"}}, "PaliGemma"),
    ],
)
def test_other_insides_are_refused_by_name(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """PaliGemma reads its prompt in both directions: it must not load as Gemma."""
    folder = save_nothing(tmp_path / "m", {"architectures": ["LlavaForConditionalGeneration"], **config})
    with pytest.raises(BadCheckpoint, match=reason):
        config_from_checkpoint(open_checkpoint(folder))

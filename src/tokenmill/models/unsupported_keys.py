"""What a config.json says that is not read: refused where it would change the answer, told of where nobody knows.

Three kinds of key decide nothing that is read here. Those without effect on what is computed are listed; those that
transformers acts on and this decoder cannot are refused by name; what is left is unknown, ignored by transformers
too, and told of once, since a newer release may have given it a meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..core.errors import BadCheckpoint
from ..formats.checkpoint import Checkpoint
from ..formats.config_keys import (
    ARCHITECTURES,
    CONFIG_KEYS,
    architecture_of,
    keys_of,
    model_type_of,
    value_of,
)
from ..formats.encoder_keys import NOMIC_OWN_KEYS
from .config_json import QUERY_BETA, ROPE_ALPHA, ROPE_KEYS, ROPE_MSCALES
from .encoder_families import FAMILIES as ENCODER_FAMILIES
from .encoder_families import EncoderFamily, encoder_family
from .families import HF_FAMILIES, hf_family
from .family import Family
from .fields import Fields

WITHOUT_EFFECT = frozenset({
    # training: how weights were drawn, dropout, losses
    "embedding_initializer_range",
    "initializer_range", "initializer_factor", "attention_dropout", "residual_dropout", "embedding_dropout",
    "hidden_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob",
    "classifier_dropout", "dropout", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds",
    "gradient_checkpointing", "router_aux_loss_coef", "output_router_logits", "router_jitter_noise",
    "input_jitter_noise",
    "mlp_dropout", "use_mup", "z_loss_coefficient",
    "aux_loss_alpha", "seq_aux", "rescale_prenorm_residual", "time_step_min", "time_step_max",
    "time_step_floor", "time_step_rank", "time_step_scale", "time_step_init_scheme", "use_mambapy",
    "use_associative_scan",
    "pretraining_tp", "problem_type", "summary_type", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_use_proj", "attn_pdrop", "initializer_cutoff_factor",
    # how a forward pass is run or returned
    "use_cache", "cache_implementation", "chunk_size_feed_forward", "output_hidden_states", "output_attentions",
    "return_dict", "attn_implementation", "experts_implementation", "torchscript", "use_bfloat16", "pruned_heads",
    "tf_legacy_loss", "dtype", "torch_dtype", "is_encoder_decoder", "tie_encoder_decoder",
    "cross_attention_hidden_size", "deterministic_flash_attn", "reference_compile", "repad_logits_with_grad",
    "use_flash_attn", "fused_bias_fc", "fused_dropout_add_ln", "dense_seq_output", "reorder_and_upcast_attn",
    "use_mamba_kernels", "mamba_ssm_cache_dtype", "chunk_size", "residual_in_fp32",
    "scale_attn_weights", "pad_vocab_size_multiple", "ep_size", "mamba_chunk_size", "num_logits_to_keep",
    "unpad_inputs", "use_memory_efficient_attention", "logn_attention_clip1", "summary_last_dropout",
    # of heads of masked language models, which are not read
    "decoder_bias", "sparse_prediction", "sparse_pred_ignore_index", "use_xentropy",
    # what the file is
    "architectures", "model_type", "transformers_version", "auto_map", "name_or_path", "base_model_tp_plan",
    "custom_pipelines", "initial_context_length", "experts_per_token", "transformers.js_config",
    # read elsewhere: the quantised tensors, the text side, scores
    "quantization_config", "compression_config", "tokenizer_class", "prefix", "task_specific_params",
    "finetuning_task", "id2label", "label2id", "num_labels", "sentence_transformers",
    "sbert_ce_default_activation_function", "text_config",
    # of other types of model, and left behind in files of these
    "hidden_act", "hidden_activation", "activation_function", "norm_type", "mlp_type", "max_window_layers",
    "perceiver_config", "pixel_shuffle_factor", "use_resampler", "qk_layer_norms", "neftune_noise_alpha", "output_past",
    # what follows from others
    "qk_head_dim", "max_seq_len", "expand", "mtp_layers_block_type", "mtp_hybrid_override_pattern",
    "mamba_proj_bias", "moe_shared_expert_overlap", "time_step_limit",
    # of indexers, which choose all positions of a context as long as is served
    "index_head_dim", "index_n_heads", "indexer_types", "index_topk_freq", "index_topk_pattern",
    "index_skip_topk_offset",
    # what can only be as it is: other values are refused
    "is_causal", "is_decoder", "add_cross_attention", "position_embedding_type", "parallel_block_tied_norm",
    # sampling, which generation_config.json tells
    "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens",
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty",
    "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens",
    "target_lookbehind", "temperature", "top_k", "top_p", "typical_p",
})  # fmt: skip
_BEGINNINGS = ("_", "unsloth_", "vision_", "image_", "video_")
_ENDS = ("_token_id", "_token_index")

_ROPE_WITHOUT_EFFECT = {"mrope_section", "mrope_interleaved", "max_position_embeddings"}
"""Of text alone, whose three kinds of position are one; and what stands beside the RoPE settings too."""


def refuse(fields: Fields, refused: Iterable[tuple[str, str]]) -> None:
    """Raises BadCheckpoint for the first key that is on, of `refused`, pairs of a key and what it asks for, and of what
    no model has."""
    shapes = () if fields.reads("per_layer_config") else (("per_layer_config", "layers of different shapes"),)
    for key, meaning in (*refused, *shapes):
        if fields.metadata.get(key):
            raise BadCheckpoint(f"{fields.where}: {key} = {fields.metadata[key]!r}: {meaning} are not supported.")


def refuse_what_is_not_done(fields: Fields, family: Family) -> None:
    """Raises BadCheckpoint for a key with a value that transformers acts on and the decoder does not."""
    refuse(fields, family.refused)
    for key, values in family.only.items():
        if key in fields.metadata and fields.metadata[key] not in values:
            known = ", ".join(map(repr, values)) or "nothing"
            raise BadCheckpoint(
                f"{fields.where}: {key} = {fields.metadata[key]!r} is not supported here (supported: {known})."
            )
    if fields.metadata.get("is_causal") in (False, None) and "is_causal" in fields.metadata:
        raise BadCheckpoint(f"{fields.where}: is_causal = false: a decoder that sees ahead gives no tokens.")
    if family.sees_ahead_key and fields.metadata.get(family.sees_ahead_key):
        raise BadCheckpoint(f"{fields.where}: {family.sees_ahead_key}: a decoder that sees ahead gives no tokens.")


def unread_keys(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Keys of config.json that are not read for its type and not known to be without effect, in the file's order. A
    key of another type that is off says nothing; nor does a GGUF file."""
    if checkpoint.kind != "hf" or not keys_of(checkpoint.metadata):
        return ()
    kind = model_type_of(checkpoint.metadata)
    own = None if kind in CONFIG_KEYS else hf_family(architecture_of(checkpoint.metadata))
    lists = [family.refused for family in (*HF_FAMILIES.values(), *filter(None, (own,)))]
    lists += [family.refused for family in ENCODER_FAMILIES.values()]
    refused = {key for pairs in lists for key, _ in pairs} | {"per_layer_config"}
    refused |= {family.sees_ahead_key for family in HF_FAMILIES.values()}
    refused |= {key for family in HF_FAMILIES.values() for key in family.only}
    known = keys_of(checkpoint.metadata).keys() | WITHOUT_EFFECT | refused
    encoder = encoder_family(checkpoint.metadata)
    if encoder is not None:
        required = {key for key, _ in encoder.required}
        known |= {"tie_word_embeddings", *encoder.aliases} | required | _said_twice(checkpoint.metadata, encoder)
    elsewhere = {key for others in (*CONFIG_KEYS.values(), NOMIC_OWN_KEYS) for key in others}

    def says_nothing(key: str, value: Any) -> bool:
        return key in known or key.startswith(_BEGINNINGS) or key.endswith(_ENDS) or (key in elsewhere and not value)

    unread = [key for key, value in checkpoint.metadata.items() if not says_nothing(key, value)]
    family = own or HF_FAMILIES.get(ARCHITECTURES.get(kind, ""))
    rope_keys = {*ROPE_KEYS, *_ROPE_WITHOUT_EFFECT, *([QUERY_BETA] if family and family.scaled_queries else ())}
    rope_keys |= {ROPE_ALPHA} if family and family.rope_alpha else set()
    rope_keys |= set(ROPE_MSCALES) if family and family.rope_mscales else set()
    return (*unread, *_unread_rope_keys(checkpoint.metadata, rope_keys))


def positions_left_out(checkpoint: Checkpoint) -> tuple[int, int] | None:
    """(positions that are served, positions that the model was made for), where an indexer would choose among more than
    are served; None where it would not, or there is none."""
    metadata = checkpoint.metadata
    family = HF_FAMILIES.get(architecture_of(metadata)) if checkpoint.kind == "hf" else None
    if family is None or not family.indexed:
        return None
    served, made_for = (value_of(metadata, key) for key in ("index_topk", "max_position_embeddings"))
    return (served, made_for) if served < made_for else None


def unread_by(kind: str, metadata: Mapping[str, Any]) -> list[str]:
    """Keys of a config.json that say something to no model of this type, in the file's order."""
    known = CONFIG_KEYS[kind].keys() | WITHOUT_EFFECT
    said = (key for key, value in metadata.items() if key not in known and value not in (None, False))
    return [key for key in said if not key.startswith(_BEGINNINGS) and not key.endswith(_ENDS)]


def _said_twice(metadata: Mapping[str, Any], family: EncoderFamily) -> set[str]:
    """Usual names beside the family's own that say the same."""
    return {usual for usual, own in family.keys.items() if metadata.get(usual) == value_of(metadata, own)}


def _unread_rope_keys(metadata: Mapping[str, Any], read: set[str]) -> Iterator[str]:
    for name in ("rope_parameters", "rope_scaling"):
        given = metadata.get(name)
        if not isinstance(given, Mapping):
            continue
        for key, value in given.items():
            if isinstance(value, Mapping):
                yield from (f"{name}.{key}.{inner}" for inner in value if inner not in read)
            elif key not in read:
                yield f"{name}.{key}"

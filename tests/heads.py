"""Random EAGLE-3 heads, as open checkpoints or folders of either form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from adapters import safetensors
from tiny import VOCAB_SIZE, tensor
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.formats.tensor import Tensor

FFN, HEADS, KV_HEADS, HEAD_DIM, NUM_DRAFTED, EPS, BASE = 96, 4, 2, 16, 40, 1e-5, 500.0

_KINDS = {"f32": np.float32, "i64": np.int64, "bool": np.bool_}


def head_model(
    *,
    width: int = 64,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    form: str = "speculators",
    layers: list[int] | None = None,
    embeds: bool = True,
    **norms: bool,
) -> Checkpoint:
    """NUM_DRAFTED tokens of vocab_size. form: whose names and config.json."""
    rng = np.random.default_rng([11, seed])
    shapes = {"fc": (width, len(layers or "123") * width), "lm_head": (NUM_DRAFTED, width), "norm": (width,)}
    q_width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    inner = {
        "input_layernorm": (width,),
        "hidden_norm": (width,),
        "post_attention_layernorm": (width,),
        "self_attn.q_proj": (q_width, 2 * width),
        "self_attn.k_proj": (kv_width, 2 * width),
        "self_attn.v_proj": (kv_width, 2 * width),
        "self_attn.o_proj": (width, q_width),
        "mlp.gate_proj": (FFN, width),
        "mlp.up_proj": (FFN, width),
        "mlp.down_proj": (width, FFN),
    }
    shapes |= {f"{'layers.0' if form == 'speculators' else 'midlayer'}.{name}": shape for name, shape in inner.items()}
    shapes |= {"embed_tokens": (vocab_size, width)} if embeds else {}
    shapes |= {"input_norm": (3 * width,)} if norms.get("norm_before_fc") else {}
    shapes |= {f"fc_norm.{each}": (width,) for each in range(3) if norms.get("fc_norm")}
    tensors = {}
    for name, shape in shapes.items():
        values = rng.normal(size=shape) * shape[-1] ** -0.5 * 2 if len(shape) > 1 else 1 + 0.1 * rng.normal(size=shape)
        tensors[f"{name}.weight"] = tensor(f"{name}.weight", values)
    places = np.sort(rng.permutation(vocab_size)[:NUM_DRAFTED])
    known = np.isin(np.arange(vocab_size), places)
    tensors["d2t"] = Tensor("d2t", "i64", (NUM_DRAFTED,), stored(places - np.arange(NUM_DRAFTED)))
    tensors["t2d"] = Tensor("t2d", "bool", (vocab_size,), stored(known))
    layer = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": EPS,
        "vocab_size": vocab_size,
        "max_position_embeddings": 64,
        "rope_theta": BASE,
    }
    said: dict[str, Any] = {"draft_vocab_size": NUM_DRAFTED, **norms}
    if form == "speculators":
        verifier = {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}
        said |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
        said |= {"speculators_config": {"algorithm": "eagle3", "verifier": verifier}, "transformer_layer_config": layer}
        said |= {"eagle_aux_hidden_state_layer_ids": layers} if layers else {}
    else:
        said |= {"architectures": ["LlamaForCausalLMEagle3"], **layer}
        said |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [each - 1 for each in layers]}} if layers else {}
    return Checkpoint("hf", Path("tiny-head"), said, tensors)


def stored(values: np.ndarray) -> memoryview:
    """The bytes of a tensor."""
    return memoryview(np.ascontiguousarray(values).view(np.uint8))


def write_head(folder: Path, head: Checkpoint) -> Path:
    folder.mkdir(exist_ok=True)
    arrays = {
        name: np.frombuffer(each.data, _KINDS[each.kind]).reshape(each.shape) for name, each in head.tensors.items()
    }
    (folder / "model.safetensors").write_bytes(safetensors(arrays))
    (folder / "config.json").write_text(json.dumps(head.metadata))
    return folder

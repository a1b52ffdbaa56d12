"""The decoder over paged KV against a plain float64 transformer that recomputes everything from scratch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tiny import VOCAB_SIZE, logits_of, tensor, tiny_checkpoint
from tokenmill.core.errors import BadCheckpoint
from tokenmill.formats.config_key import DECODER, ends, keys, sizes
from tokenmill.formats.config_keys import ARCHITECTURES, CONFIG_KEYS
from tokenmill.models.config import config_from_checkpoint
from tokenmill.models.decoder import AuxHiddenStates
from tokenmill.models.families import HF_FAMILIES, Family
from tokenmill.models.loader import load_model
from tokenmill.models.rope import rope_frequencies
from tokenmill.models.unsupported_keys import unread_keys
from tokenmill.ops.api import StepBatch, StepLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps


def plain_logits(checkpoint, tokens: list[int]) -> np.ndarray:
    """Logits [T, V] of a whole sequence: no cache, no blocks, no stacked weights; RoPE in the file's own order."""
    return plain_pass(checkpoint, tokens)[1]


def plain_pass(checkpoint, tokens: list[int]) -> tuple[list[np.ndarray], np.ndarray]:
    """(hidden states [T, D] before each layer, after the last one and after the final norm; logits)"""
    config, gguf = config_from_checkpoint(checkpoint), checkpoint.kind == "gguf"
    weights = {
        name: np.frombuffer(t.data, np.float32).reshape(t.shape).astype(np.float64)
        for name, t in checkpoint.tensors.items()
    }

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.norm_eps) * weight

    def rotate(x_TC):
        angles = np.arange(len(x_TC))[:, None] * rope_frequencies(config.layers[0].rope, config.head_dim)
        pairs = x_TC.reshape(len(x_TC), -1, 2) if gguf else x_TC.reshape(len(x_TC), 2, -1).swapaxes(1, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], axis=1)  # one order for q and k: scores do not see it

    def names(layer):
        if gguf:
            at = f"blk.{layer}."
            parts = [
                "attn_norm",
                "attn_q",
                "attn_k",
                "attn_v",
                "attn_output",
                "ffn_norm",
                "ffn_gate",
                "ffn_up",
                "ffn_down",
            ]
        else:
            at = f"model.layers.{layer}."
            parts = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
            parts += ["post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        return [weights[f"{at}{part}.weight"] for part in parts]

    embed = weights["token_embd.weight" if gguf else "model.embed_tokens.weight"]
    x = embed[tokens]
    states = [x]
    causal = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for layer in range(config.num_layers):
        attn_norm, wq, wk, wv, wo, ffn_norm, gate, up, down = names(layer)
        h = norm(x, attn_norm)
        heads = []
        for head in range(config.num_heads):
            c, kv_head = config.head_dim, head * config.num_kv_heads // config.num_heads
            q = rotate(h @ wq[head * c : head * c + c].T)
            k = rotate(h @ wk[kv_head * c : kv_head * c + c].T)
            v = h @ wv[kv_head * c : kv_head * c + c].T
            scores = np.where(causal, q @ k.T / np.sqrt(c), -np.inf)
            share = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(share / share.sum(axis=1, keepdims=True) @ v)
        x = x + np.concatenate(heads, axis=1) @ wo.T
        h = norm(x, ffn_norm)
        g = h @ gate.T
        x = x + (g / (1 + np.exp(-g)) * (h @ up.T)) @ down.T
        states.append(x)
    head = weights.get("output.weight" if gguf else "lm_head.weight", embed)
    states.append(norm(x, weights["output_norm.weight" if gguf else "model.norm.weight"]))
    return states, states[-1] @ head.T


@pytest.mark.parametrize("kind", ["hf", "gguf"])
@pytest.mark.parametrize("tied", [False, True])
def test_chunks_and_batches_equal_the_plain_transformer(kind, tied):
    """Two sequences, cut into uneven chunks over scattered blocks, give the plain model's logits at every position."""
    checkpoint = tiny_checkpoint(kind=kind, tied=tied)
    ops = ReferenceOps()
    model = load_model(checkpoint, ops, max_model_len=64, block_size=8, kv_dtype="f32")
    pool = ops.new_pool(model.kv_group, 12)
    kv = pool.kv
    rng = np.random.default_rng(1)
    tokens = [rng.integers(0, VOCAB_SIZE, 29).tolist(), rng.integers(0, VOCAB_SIZE, 17).tolist()]
    tables, done = np.array([[3, 9, 1, 6], [11, 0, 5, 0]], np.int32), [0, 0]
    expected = [plain_logits(checkpoint, row) for row in tokens]
    for chunk in ([5, 17], [1, 0], [23, 0]):
        rows = [s for s in (0, 1) if chunk[s]]
        starts = np.cumsum([0] + [chunk[s] for s in rows]).astype(np.int32)
        batch = StepBatch(
            tokens_T=np.concatenate([tokens[s][done[s] : done[s] + chunk[s]] for s in rows]).astype(np.int32),
            positions_T=np.concatenate([np.arange(done[s], done[s] + chunk[s]) for s in rows]).astype(np.int32),
            row_starts_S1=starts,
            context_lens_S=np.array([done[s] + chunk[s] for s in rows], np.int32),
            block_tables_SB=tables[rows],
            logit_rows_L=np.arange(starts[-1], dtype=np.int32),
        )
        logits = model.forward(ops, kv, batch)
        for i, s in enumerate(rows):
            got, end = logits[starts[i] : starts[i + 1]], done[s] + chunk[s]
            np.testing.assert_allclose(got, expected[s][done[s] : end], atol=2e-4)
            done[s] = end
    pool.close()


@pytest.mark.parametrize("backend", ["numpy", "native"])
def test_a_step_leaves_the_hidden_states_that_a_drafter_asks_for(backend):
    """Those before some layers, after the last one and after the final norm are the plain transformer's, for all tokens
    of a step; logits are bit for bit what they are without."""
    if backend == "native" and (why := available()) is not None:
        pytest.skip(why)
    ops = ReferenceOps() if backend == "numpy" else NativeOps(2)
    checkpoint = tiny_checkpoint(kind="hf", tied=True)
    model = load_model(checkpoint, ops, max_model_len=64, block_size=8, kv_dtype="f32")
    num_layers = model.config.num_layers
    pool = ops.new_pool(model.kv_group, 3)
    limits = StepLimits(max_tokens=32, max_seqs=1, max_blocks_per_seq=3, max_logit_rows=4)
    asked = (num_layers, 0, num_layers - 1)
    aux = AuxHiddenStates.of(model.config, limits.max_tokens, asked, is_normed=True)
    plain = ops.compile(lambda recorder, batch: model.forward(recorder, pool.kv, batch), limits)
    with_aux = ops.compile(lambda recorder, batch: model.forward(recorder, pool.kv, batch, aux), limits)
    tokens = np.random.default_rng(2).integers(0, VOCAB_SIZE, 21).tolist()
    expected, _ = plain_pass(checkpoint, tokens)
    for start, end in ((0, 18), (18, 19), (19, 21)):
        positions_T = np.arange(start, end, dtype=np.int32)
        ends = np.array([0, end - start], np.int32)
        batch = StepBatch(
            tokens_T=np.array(tokens[start:end], np.int32),
            positions_T=positions_T,
            row_starts_S1=ends,
            context_lens_S=np.array([end], np.int32),
            block_tables_SB=np.array([[2, 0, 1]], np.int32),
            logit_rows_L=ends[1:] - np.int32(1),
        )
        logits = np.array(plain(batch))
        assert np.array_equal(np.array(with_aux(batch)), logits)
        for array, at in zip(aux.arrays, (*asked, num_layers + 1), strict=True):
            np.testing.assert_allclose(array[: end - start], expected[at][start:end], atol=2e-4)
    ops.close()
    pool.close()


def test_a_dense_family_is_an_entry_in_two_tables(monkeypatch):
    """An invented one with names, a fused matrix, defaults and a setting of its own gives the logits of the Llama that
    has its weights; what it refuses is refused, and what it does not read is told of."""
    defaults = sizes(VOCAB_SIZE, 64, 96, 2, 4, 2, 256) | ends(1, 2) | {"rms_norm_eps": 1e-5}
    monkeypatch.setitem(CONFIG_KEYS, "vireo", keys(**DECODER | defaults, residual_multiplier=1.0))
    monkeypatch.setitem(ARCHITECTURES, "vireo", "VireoForCausalLM")
    family = Family(
        "Vireo",
        fused=("gate_up",),
        refused=(("use_parallel_residual", "parallel residuals"),),
        names={"ffn_norm": "model.layers.{}.norm_of_ffn"},
    )
    monkeypatch.setitem(HF_FAMILIES, "VireoForCausalLM", family)
    llama = tiny_checkpoint()
    tensors = {name.replace("post_attention_layernorm", "norm_of_ffn"): each for name, each in llama.tensors.items()}
    for layer in range(2):
        mlp = f"model.layers.{layer}.mlp"
        parts = [tensors.pop(f"{mlp}.{part}_proj.weight") for part in ("gate", "up")]
        rows = np.concatenate([np.frombuffer(part.data, np.float32).reshape(part.shape) for part in parts])
        tensors[f"{mlp}.gate_up_proj.weight"] = tensor(f"{mlp}.gate_up_proj.weight", rows)
    said = {"architectures": ["VireoForCausalLM"], "model_type": "vireo", "wings": 2}
    vireo = replace(llama, metadata=said, tensors=tensors)
    assert unread_keys(vireo) == ("wings",)
    with pytest.raises(BadCheckpoint, match="use_parallel_residual = True: parallel residuals are not supported"):
        load_model(replace(vireo, metadata=said | {"use_parallel_residual": True}), ReferenceOps())
    np.testing.assert_array_equal(logits_of(llama), logits_of(vireo))

"""The random checkpoints of the benchmarks are what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from random_models import FORMS, ROUTER, SHAPES, VOCAB, Shape, write_gguf_model, write_hf_model, zipf_biases
from tokenmill.formats.checkpoint import open_checkpoint
from tokenmill.formats.ggml import dequantise
from tokenmill.models.config import config_from_checkpoint
from tokenmill.models.roles import expected_shapes
from tokenmill.text.gguf_tokenizer import tokenizer_from_gguf
from tokenmill.text.hf_tokenizer import tokenizer_from_folder

TEXT = "the same words, 1234 of them:\n\tnaïve"


def small(name: str) -> Shape:
    return replace(SHAPES[name], layers=2, width=64, heads=2, kv_heads=1, experts=4, top_k=2, expert_ffn=32)


WITH_EXPERTS = [name for name, shape in SHAPES.items() if shape.experts]


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_both_formats_have_one_tokenizer_and_weights_of_one_spread(name: str, tmp_path: Path) -> None:
    shape = small(name)
    write_gguf_model(tmp_path / "m.gguf", shape, "mxfp4")
    write_hf_model(tmp_path / "hf", shape)
    file, folder = open_checkpoint(tmp_path / "m.gguf"), open_checkpoint(tmp_path / "hf")
    ids = tokenizer_from_gguf(file.metadata).encode(TEXT)
    assert ids == tokenizer_from_folder(tmp_path / "hf").encode(TEXT) and max(ids) < VOCAB
    pairs = {
        "blk.1.ffn_down_exps.weight": "model.layers.1.mlp.experts.3.down_proj.weight",
        "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
        "token_embd.weight": "model.embed_tokens.weight",
    }
    for ours, theirs in pairs.items():
        spreads = []
        for tensor in (file.tensors[ours], folder.tensors[theirs]):
            spreads.append(float(dequantise(tensor.kind, tensor.data, tensor.num_values).std()))
        assert 0.6 < spreads[0] / spreads[1] < 1.6, (ours, spreads)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_the_decoder_takes_them(name: str, tmp_path: Path) -> None:
    """Every tensor that the decoder wants is there, with its shape, and no other."""
    shape = replace(SHAPES[name], layers=2)
    write_gguf_model(tmp_path / "m.gguf", replace(shape, width=64, experts=8, expert_ffn=32), "q8_0")
    write_hf_model(tmp_path / "hf", replace(shape, width=64, experts=8, expert_ffn=32))
    for path in (tmp_path / "m.gguf", tmp_path / "hf"):
        checkpoint = open_checkpoint(path)
        wanted = expected_shapes(checkpoint.kind, config_from_checkpoint(checkpoint))
        assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == wanted
        checkpoint.close()


def test_the_decoder_takes_a_dense_one(tmp_path: Path) -> None:
    """One matrix for embeddings and head, and names for all tokens of its vocabulary."""
    shape = replace(SHAPES["dense"], layers=2, width=64, dense_ffn=96, vocab=VOCAB + 100)
    write_gguf_model(tmp_path / "m.gguf", shape, "q8_0")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    config = config_from_checkpoint(checkpoint)
    wanted = expected_shapes(checkpoint.kind, config)
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == wanted
    assert "output.weight" not in wanted and wanted["token_embd.weight"] == (VOCAB + 100, 64)
    assert max(tokenizer_from_gguf(checkpoint.metadata).encode(TEXT)) < VOCAB
    checkpoint.close()


@pytest.mark.parametrize("form", FORMS)
def test_quantised_weights_have_no_mean(form: str, tmp_path: Path) -> None:
    """A mean is a direction that every layer feeds: all tokens would soon choose the same experts."""
    write_gguf_model(tmp_path / "m.gguf", replace(small("moe"), experts=32), form)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    for role in ("attn_q", "ffn_up_exps", "ffn_down_exps"):
        tensor = checkpoint.tensors[f"blk.1.{role}.weight"]
        values = dequantise(tensor.kind, tensor.data, tensor.num_values)
        assert abs(values.mean()) < 4 * values.std() * values.size**-0.5, role


def test_one_matrix_or_two_for_latent_attention(tmp_path: Path) -> None:
    for old in (False, True):
        write_gguf_model(tmp_path / "m.gguf", small("mla"), "q8_0", old=old)
        names = set(open_checkpoint(tmp_path / "m.gguf").tensors)
        assert ("blk.0.attn_kv_b.weight" in names) == old and ("blk.0.attn_k_b.weight" in names) != old


def test_a_seed_decides_every_byte(tmp_path: Path) -> None:
    files = []
    for seed in (1, 1, 2):
        write_gguf_model(tmp_path / "m.gguf", small("moe"), "q4_0", seed=seed)
        files.append((tmp_path / "m.gguf").read_bytes())
    assert files[0] == files[1] != files[2]


def test_biases_give_loads_by_zipfs_law() -> None:
    """And two independent tokens share two fifths of their experts, where equal loads give an eighth."""
    experts, top_k = 64, 8
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4000, experts)) * ROUTER + zipf_biases(experts, top_k)
    chosen = np.zeros(logits.shape, bool)
    np.put_along_axis(chosen, np.argsort(-logits, axis=1)[:, :top_k], True, axis=1)
    loads = chosen.mean(axis=0)
    ranks = np.arange(1, experts + 1)
    assert 0.8 < np.polyfit(np.log(ranks[1:]), -np.log(loads[1:]), 1)[0] < 1.25
    assert 0.3 < (chosen[1:] & chosen[:-1]).sum(axis=1).mean() / top_k < 0.5

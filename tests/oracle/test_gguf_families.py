"""The same families from GGUF: a checkpoint converted as llama.cpp's converter would gives transformers' logits."""

from __future__ import annotations

import json

import numpy as np
import pytest
from families import CASES, Case
from families_moe import MOE_CASES
from gguf_families import ARCHITECTURES, convert
from test_config_logits import CASES as RESPELLED
from test_families import LENGTH, TOLERANCE, make_model, our_logits, random_tokens, their_logits

from tokenmill.models.moe import MERGED, SPLIT, STACKED
from tokenmill.ops.reference import ReferenceOps

_SKIPPED = {
    "Mistral, sliding window": "the architecture 'llama' has no windows",
    "Ministral 3, no YaRN, sliding window": "the architecture 'mistral3' is with YaRN and has no windows",
    "Qwen2, sliding window": "the architecture 'qwen2' has no windows",
    "Llama, dynamic NTK RoPE, within its context": "GGUF has no such scaling",
    "Llama, YaRN with mscale": "GGUF has no such keys",
    "Gemma 2": "GGUF derives the scale of queries from the head size",
    "SmolLM3, sliding window": "the architecture 'smollm3' has no windows",
    "Gemma with SiLU": "the architecture is with GELU",
    "Gemma 2, no caps, SiLU": "the architecture is with GELU",
    "Gemma 3, capped logits, SiLU": "the architecture is with GELU",
    "Command R, biases, exact GELU": "the architecture is with SiLU",
    "Falcon, sequential residuals": "the architecture is with parallel residuals",
    "StableLM 2 12B (norms of heads)": "the architecture has these norms as one tensor",
    "EXAONE 4, a window that no layer has": "GGUF has no such pattern",
    "Mixtral, sliding window": "the architecture 'llama' has no windows",
    "Qwen3-MoE, dense layers, sliding window": "the architecture 'qwen3moe' has no windows",
    "K-EXAONE, listed layers, weights as they are": "GGUF has no such pattern",
    "AFMoE, experts everywhere, biases, every other layer with a window": "GGUF has no such pattern",
    "GPT-OSS, tight limits, no YaRN, no biases, other windows": "GGUF has no such keys",
    "Qwen2-MoE, every other layer, no biases, weights of sum 1": "'qwen2moe' takes weights as they are",
}
GGUF_CASES = [case for case in (*CASES, *MOE_CASES) if case.family in ARCHITECTURES and case.title not in _SKIPPED]


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("case", GGUF_CASES, ids=lambda case: case.title.replace(" ", "_"))
def test_logits_from_gguf(case: Case, tmp_path):
    theirs = make_model(case, tmp_path)
    path = convert(tmp_path, case.family, tmp_path / "model.gguf")
    tokens = random_tokens(2, LENGTH)
    ours = our_logits(ReferenceOps(exact_activations=True), path, case.max_model_len, tokens)
    expected = their_logits(theirs, tokens)
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE * np.abs(expected).max())


def test_mistral_as_the_converter_has_it_beside_images(tmp_path):
    """Mistral Small 3.1 is of Ministral 3's architecture, and has neither YaRN nor scaled queries."""
    theirs = make_model(next(case for case in CASES if case.title == "Mistral, no window"), tmp_path)
    path = convert(tmp_path, "Ministral3", tmp_path / "model.gguf")
    tokens = random_tokens(2, LENGTH)
    ours = our_logits(ReferenceOps(exact_activations=True), path, 64, tokens)
    expected = their_logits(theirs, tokens)
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE * np.abs(expected).max())


def test_minicpm(tmp_path):
    """Of the same checkpoint as in test_config_logits.py, which transformers runs as Granite."""
    case, changes = next((case, changes) for case, changes in RESPELLED if case.title.startswith("MiniCPM"))
    theirs = make_model(case, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    path = convert(tmp_path, "MiniCPM", tmp_path / "model.gguf")
    tokens = random_tokens(2, LENGTH)
    ours = our_logits(ReferenceOps(exact_activations=True), path, 64, tokens)
    expected = their_logits(theirs, tokens)
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("form", [MERGED, SPLIT])
def test_experts_stored_otherwise(form: str, tmp_path):
    """Gate and up as one tensor, and the matrices one by one, as early Mixtral files have them: the same logits, bit
    for bit."""
    make_model(MOE_CASES[0], tmp_path)
    tokens = random_tokens(2, LENGTH)
    paths = [convert(tmp_path, "Mixtral", tmp_path / f"{each}.gguf", each) for each in (STACKED, form)]
    logits = [our_logits(ReferenceOps(exact_activations=True), path, 64, tokens) for path in paths]
    np.testing.assert_array_equal(*logits)

"""Beam search on a small random Llama: the same sequences and scores as transformers finds, in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripted import EOS, SPECIAL, make_text_model
from tokenmill import LLM, BeamSearchParams
from tokenmill.core.errors import InvalidRequest
from tokenmill.ops.native import available

torch = pytest.importorskip("torch", reason="the oracle needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle needs transformers")

ENDS = (EOS, 40, 90, 133, 200)
"""Several, so that beams end at many lengths."""

SETTINGS: list[dict[str, Any]] = [
    {"beam_width": 1},
    {"beam_width": 2, "max_tokens": 40},
    {"beam_width": 4},
    {"beam_width": 4, "early_stopping": True},
    {"beam_width": 4, "early_stopping": "never"},
    {"beam_width": 3, "length_penalty": 0.0},
    {"beam_width": 3, "length_penalty": 2.5, "early_stopping": "never"},
    {"beam_width": 5, "length_penalty": -0.5},
    {"beam_width": 8, "min_tokens": 7, "length_penalty": 0.6},
    {"beam_width": 15, "max_tokens": 6},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any]]:
    if available() is not None:
        pytest.skip(f"the native backend is not available: {available()}")
    folder: Path = tmp_path_factory.mktemp("model")
    tokenizer = make_text_model().tokenizer
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, eos_token_id=EOS,
    )  # fmt: skip
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim == 2 else 1)
    model.to(torch.float32).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[EOS]}))
    theirs = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    with LLM(folder, kv_cache_dtype="f32", kv_cache_memory_bytes="8MiB") as llm:
        yield llm, theirs


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_beams_of_transformers(models: tuple[LLM, Any], settings: dict[str, Any]) -> None:
    """Same tokens in the same order, scores to 1e-4; and the ends are of both kinds over all prompts."""
    llm, theirs = models
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 250, length).tolist() for length in (1, 5, 17, 33)]
    params = BeamSearchParams(**{"max_tokens": 24, "stop_token_ids": ENDS[1:]} | settings)
    kinds = set()
    for prompt, found in zip(prompts, llm.beam_search(prompts, params), strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            min_new_tokens=params.min_tokens or None,
            length_penalty=float(params.length_penalty),
            early_stopping=params.early_stopping,
            eos_token_id=list(ENDS),
            pad_token_id=0,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        rows = [cut(row[len(prompt) :].tolist()) for row in expected.sequences]
        assert [list(each.token_ids) for each in found.sequences] == rows
        if params.beam_width > 1:  # with one beam transformers does no search, and gives no score
            scores = expected.sequences_scores.numpy()
            np.testing.assert_allclose([each.score for each in found.sequences], scores, rtol=1e-6, atol=1e-4)
        for each in found.sequences:
            kinds.add(each.finish_reason)
            assert each.cum_logprob == pytest.approx(sum(entry.logprob for entry in each.logprobs))
            assert list(each.tokens) == prompt + list(each.token_ids)
    assert len(kinds) == 2 or settings != {"beam_width": 4}


def test_a_beam_search_that_is_too_wide_names_the_most(models: tuple[LLM, Any]) -> None:
    """Width and end tokens together need no more candidates than a step reports."""
    llm, _ = models
    assert llm.beam_search([1, 2], BeamSearchParams(beam_width=19, max_tokens=1))[0].sequences
    with pytest.raises(InvalidRequest, match="at most 19"):
        llm.beam_search([1, 2], BeamSearchParams(beam_width=20))
    with pytest.raises(InvalidRequest, match="early_stopping"):
        BeamSearchParams(beam_width=2, early_stopping=1)  # type: ignore[arg-type]


def cut(tokens: list[int]) -> list[int]:
    """Without what fills the row up behind its end token."""
    ends = [number for number, token in enumerate(tokens) if token in ENDS]
    return tokens[: ends[0] + 1] if ends else tokens

"""The table of models: what follows from shapes, against what their makers and papers state."""

from __future__ import annotations

import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.sim.models import model_named, models, read_models

PARAMETERS_1E9 = {
    "llama-2-7b": 6.74,
    "llama-2-70b": 68.98,
    "llama-3-8b": 8.03,
    "llama-3-405b": 405.9,
    "mistral-7b": 7.24,
    "yi-34b": 34.39,
    "opt-66b": 65.7,
    "qwen3-0.6b": 0.596,
    "qwen3-32b": 32.8,
    "qwen3-235b-a22b": 235.1,
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 140.6,
    "dbrx": 131.6,
    "deepseek-v3": 671.0,
    "step-3": 316.0,
    "smollm2-135m": 0.1345,
}
"""As model cards state them."""

KV_BYTES = {
    ("llama-2-70b", "bf16"): 327_680,
    ("llama-3-70b", "bf16"): 327_680,
    ("llama-2-7b", "bf16"): 524_288,
    ("llama-2-13b", "bf16"): 819_200,
    ("opt-13b", "bf16"): 819_200,
    ("opt-66b", "bf16"): 2_359_296,
    ("opt-175b", "bf16"): 4_718_592,
    ("bloom-176b", "bf16"): 4_014_080,
    ("mistral-7b", "bf16"): 131_072,
    ("yi-34b", "bf16"): 245_760,
    ("falcon-180b", "bf16"): 163_840,
    ("deepseek-v3", "fp8"): 35_136,
    ("step-3", "fp8"): 31_232,
    ("qwen3-235b-a22b", "fp8"): 96_256,
}


@pytest.mark.parametrize("name", PARAMETERS_1E9)
def test_shapes_have_the_parameters_that_their_makers_state(name: str) -> None:
    """Layers, heads, experts and ranks of the table multiply to the published size."""
    assert model_named(name).num_parameters / 1e9 == pytest.approx(PARAMETERS_1E9[name], rel=0.003)


@pytest.mark.parametrize("name, active", [("deepseek-v3", 37), ("step-3", 38), ("mixtral-8x7b", 12.9), ("dbrx", 36)])
def test_of_experts_a_token_uses_what_is_published(name: str, active: float) -> None:
    """Chosen and shared experts and dense layers make the active parameters, in billions."""
    assert model_named(name).num_active / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("name, precision", KV_BYTES)
def test_kv_of_a_position_takes_the_published_bytes(name: str, precision: str) -> None:
    """Grouped, latent and plain attention keep as many bytes as papers count."""
    assert model_named(name).kv_bytes(precision) == KV_BYTES[name, precision]


@pytest.mark.parametrize(
    "name, attention, rest", [("step-3", 3.27e10, 2.07e10 + 5.33e10), ("qwen3-235b-a22b", 2.52e10, 1.34e10 + 2.84e10)]
)
def test_a_token_takes_the_operations_that_step_3_counts(name: str, attention: float, rest: float) -> None:
    """A decode behind 8,192 positions, against the report's table: attention, then projections and FFN."""
    model = model_named(name)
    assert 8192 * model.decode_flop == pytest.approx(attention, rel=0.01)
    assert 2 * model.token_weights == pytest.approx(rest, rel=0.02)


def test_latents_make_decodes_compute_more_than_prompts() -> None:
    """On latents a decode attends with their whole rank, a prompt with the heads' own width (3.4 times less)."""
    model = model_named("DeepSeek-R1")
    assert model.decode_flop / model.prefill_flop == pytest.approx((2 * 512 + 64) / (2 * 128 + 64))


def test_each_model_says_where_its_figures_come_from() -> None:
    """No entry without a source."""
    assert all(len(model.source) > 10 for model in models().values())


def test_what_is_wrong_names_the_field_and_the_nearest_name() -> None:
    """Unknown models and precisions, and tables with holes, are one line that says what to mend."""
    with pytest.raises(ConfigError, match=r"model: 'llama-3-80b' is unknown; did you mean 'llama-3-"):
        model_named("llama-3-80b")
    with pytest.raises(ConfigError, match=r"precision.kv: 'bf17' is unknown; did you mean 'bf16'"):
        model_named("dbrx").kv_bytes("bf17")
    with pytest.raises(ConfigError, match=r"own.source: a word is needed"):
        read_models("[own]\nnum_layers=1\nhidden=2\nnum_heads=1\nnum_kv_heads=1\nhead_dim=2\nffn=4\nvocab=9")
    with pytest.raises(ConfigError, match=r"own.ffm: no such key; did you mean 'ffn'"):
        read_models(
            "[own]\nnum_layers=1\nhidden=2\nnum_heads=1\nnum_kv_heads=1\nhead_dim=2\nffm=4\nvocab=9\nsource='me'"
        )
    with pytest.raises(ConfigError, match=r"own.num_chosen: from 1 to num_experts \(4\)"):
        read_models(
            "[own]\nnum_layers=1\nhidden=2\nnum_heads=1\nnum_kv_heads=1\nhead_dim=2\nexpert_ffn=4\nnum_experts=4\n"
            "vocab=9\nsource='me'"
        )

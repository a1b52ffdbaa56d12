"""The cost model of steps on machines that are not here."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from tokenmill.core.cost import CostModel, Work, work_of
from tokenmill.core.errors import ConfigError
from tokenmill.core.step import PlanRow
from tokenmill.sim.hardware import hardware_named
from tokenmill.sim.models import model_named
from tokenmill.sim.roofline import Coefficients, Parallel, Precision, Roofline

IDEAL = Coefficients(
    **dict.fromkeys(
        ("compute", "compute_8bit", "compute_4bit", "attention", "memory", "memory_4bit", "kv", "link"), 1.0
    ),
    **dict.fromkeys(("link_s", "step_s", "layer_s", "row_s", "experts_4bit_s"), 0.0),
    overlap=math.inf,
    imbalance=1.0,
    shared=1.0,
)
"""Peaks are reached, and nothing else takes time."""


def cost_model(
    model: str,
    hardware: str,
    parallel: Parallel = Parallel(),  # noqa: B008
    precision: Precision = Precision(),  # noqa: B008
    coefficients: Coefficients = IDEAL,
) -> Roofline:
    return Roofline(model_named(model), hardware_named(hardware), parallel, precision, coefficients)


def decodes(num_rows: int, context: int) -> Work:
    return work_of([PlanRow(i, context, (7,), sample=True) for i in range(num_rows)])


def prompt(num_tokens: int, start: int = 0) -> Work:
    return work_of([PlanRow(0, start, (7,) * num_tokens, sample=True)])


def test_at_the_peaks_it_is_bytes_over_bandwidth_and_operations_over_flop_s() -> None:
    """A decode reads all weights but the embedding and its KV, a prompt computes: both by hand."""
    read_bytes = 2 * (8.030e9 - 128256 * 4096) + 1000 * 131072
    assert cost_model("llama-3-8b", "h100").predict(decodes(1, 1000)) == pytest.approx(read_bytes / 3.35e12, rel=1e-3)
    matrices = 2 * 6.98e9 * 4096 + 2 * 128256 * 4096
    attention = 4 * 32 * 32 * 128 * (4096 * 4095 / 2)
    assert cost_model("llama-3-8b", "h100").predict(prompt(4096)) == pytest.approx(
        (matrices + attention) / 989e12, rel=1e-3
    )


def test_more_work_never_takes_less_time() -> None:
    """Along each quantity of a step, of dense, latent and mixed models, alone and spread."""
    cost_models: list[CostModel] = [
        cost_model("llama-2-70b", "a100", Parallel(4, 2), coefficients=Coefficients()),
        cost_model("deepseek-v3", "h800", Parallel(1, 1, 32, True), Precision("fp8"), Coefficients()),
        cost_model("mixtral-8x7b", "l40s", Parallel(4), coefficients=Coefficients()),
        cost_model("mixtral-8x7b", "a100", Parallel(4), Precision("int4"), Coefficients()),
        cost_model("deepseek-v3", "h800", Parallel(1, 1, 32, True, True), Precision("fp8"), Coefficients()),
    ]
    for each in cost_models:
        for before, after in itertools.pairwise([decodes(n, c) for n in (1, 8, 64) for c in (10, 1000)]):
            if after.num_rows >= before.num_rows and after.num_context >= before.num_context:
                assert each.predict(after) >= each.predict(before)
        sizes = [prompt(n, s) for n, s in ((1, 0), (16, 0), (512, 0), (512, 512), (4096, 512))]
        times = [each.predict(work) for work in sizes]
        assert times == sorted(times) and times[0] > 0


def test_devices_that_share_layers_divide_the_work_and_tell_each_other() -> None:
    """Four take a quarter of the time and what their all-reduces take; KV heads split no further than there are."""
    work = prompt(2048)
    alone, four = (
        cost_model("llama-3-70b", "h200").predict(work),
        cost_model("llama-3-70b", "h200", Parallel(4)).predict(work),
    )
    ring = 2 * 80 * 2 * 3 / 4 * 2048 * 8192 * 2 / 450e9
    assert four == pytest.approx(alone / 4 + ring, rel=1e-6)
    eight = cost_model("llama-3-70b", "h200", Parallel(8)).kv_token_bytes
    assert eight == cost_model("llama-3-70b", "h200", Parallel(16)).kv_token_bytes == 327_680 / 8
    beyond = (
        cost_model("llama-3-70b", "h200", Parallel(16)).predict(work)
        - cost_model("llama-3-70b", "h200").predict(work) / 16
    )
    # Rings of two nodes pass from one to the other on the networks of all eight devices: 400 GB/s.
    assert beyond == pytest.approx(2 * 80 * 2 * 15 / 16 * 2048 * 8192 * 2 / 400e9, rel=1e-6)


def test_a_mesh_has_as_many_links_as_there_are_others() -> None:
    """Two MI300X have one of seven links between them, where eight have all; by a switch two have as much as eight."""
    rates = [hardware_named("mi300x").link_rate(num) for num in (2, 4, 8)]
    assert rates == pytest.approx([64e9, 192e9, 448e9])
    assert hardware_named("h100").link_rate(2) == hardware_named("h100").link_rate(8) == 450e9
    assert hardware_named("l40s").link_rate(4) == 32e9


def test_the_logits_matrix_stays_in_16_bits() -> None:
    """Of weights in 8 bits too: it is read, kept and multiplied so."""
    coefficients = IDEAL._replace(compute_8bit=0.5)
    base = cost_model("llama-3-8b", "h100", precision=Precision("fp8"), coefficients=coefficients)
    model = base.model
    assert base.weight_bytes == model.weight_bytes("fp8") == model.fixed_weights + 2 * 2 * model.head_weights
    read_s = (model.fixed_weights + 2 * model.head_weights) / 3.35e12
    assert base.predict(decodes(1, 0)) == pytest.approx(read_s, rel=1e-3)
    many = decodes(8192, 0)
    flop_s = 2 * 8192 * (model.fixed_weights / 1979e12 / 0.5 + model.head_weights / 989e12)
    assert base.predict(many) == pytest.approx(flop_s, rel=1e-3)
    quantised = cost_model("llama-3-8b", "h100", precision=Precision("q8_0"))
    assert quantised.weight_bytes == pytest.approx((model.fixed_weights + 2 * model.head_weights) * 34 / 32)


def test_stages_have_the_embedding_or_the_logits() -> None:
    """Of a pipeline, no device has both."""
    model = model_named("llama-3-70b")
    one, two, four = (cost_model("llama-3-70b", "h200", Parallel(4, stages)).weight_bytes for stages in (1, 2, 4))
    layers = 2 * model.fixed_weights / 4
    assert one == pytest.approx(layers + 2 * 2 * model.head_weights / 4)
    assert (two, four) == pytest.approx(
        (layers / 2 + 2 * model.head_weights / 4, layers / 4 + 2 * model.head_weights / 4)
    )


def test_projections_to_latents_lie_whole_on_each_device() -> None:
    """Eight devices that share the heads of DeepSeek-V3 all need the latents of each position."""
    model = model_named("deepseek-v3")
    whole = model.num_layers * model.hidden * (1536 + 512 + 64)
    assert model.undivided_weights == whole and model_named("llama-3-8b").undivided_weights == 0
    one, eight = (cost_model("deepseek-v3", "b200", Parallel(num), Precision("fp8")) for num in (1, 8))
    assert eight.weight_bytes - one.weight_bytes / 8 == pytest.approx(whole * 7 / 8)
    more = eight.predict(decodes(1, 0)) - one.predict(decodes(1, 0)) / 8
    assert more == pytest.approx(whole * 7 / 8 / 7.7e12, rel=0.05)  # and all-reduces of one token


def test_copies_without_shared_experts_have_all_of_them() -> None:
    """Each reads those that its own tokens choose, and nothing is sent from copy to copy."""
    mixtral = model_named("mixtral-8x7b")
    alone, copies = cost_model("mixtral-8x7b", "h200"), cost_model("mixtral-8x7b", "h200", Parallel(1, 1, 4))
    assert copies.weight_bytes == alone.weight_bytes
    assert copies.predict(decodes(4, 0)) == pytest.approx(alone.predict(decodes(1, 0)), rel=1e-3)
    spread = cost_model("mixtral-8x7b", "h200", Parallel(1, 1, 4, True))
    assert spread.weight_bytes == pytest.approx(alone.weight_bytes - 2 * mixtral.routed_weights * 3 / 4)


def test_few_tokens_touch_few_experts() -> None:
    """Of Mixtral one token reads 2 experts of 8 in each layer, many tokens all."""
    mixtral = model_named("mixtral-8x7b")
    one, many = (cost_model("mixtral-8x7b", "h200").predict(decodes(n, 0)) for n in (1, 32))
    fixed = 2 * (mixtral.fixed_weights + mixtral.head_weights)
    assert one == pytest.approx((fixed + 2 * mixtral.routed_weights / 4) / 4.8e12, rel=1e-3)
    assert many == pytest.approx((fixed + 2 * mixtral.routed_weights) / 4.8e12, rel=1e-3)


def test_copies_of_the_attention_share_rows_and_experts() -> None:
    """Of 32 devices each does its own rows and has room for its own KV; the busiest device of experts is waited for."""
    spread = Parallel(1, 1, 32, True)
    work = decodes(64, 1000)
    base = cost_model("deepseek-v3", "h800", spread, Precision("fp8"))
    rows = cost_model("deepseek-v3", "h800", spread, Precision("fp8"), IDEAL._replace(row_s=1e-3))
    assert rows.predict(work) - base.predict(work) == pytest.approx(1e-3 * 64 / 32)
    one = base.hardware.memory_bytes * 0.9 - 2 * 2**30 - base.weight_bytes
    assert base.num_kv_blocks(16) == 32 * int(one // (16 * base.kv_token_bytes))
    many = prompt(100_000)
    uneven = cost_model("deepseek-v3", "h800", spread, Precision("fp8"), IDEAL._replace(imbalance=2.0))
    model = base.model
    more_flop = 2 * 1e5 * model.num_expert_layers * model.num_chosen * model.expert_weights / 32
    more_bytes = 1e5 * model.num_expert_layers * model.num_chosen * model.hidden * 3 * 24 / 32 / 32  # to other nodes
    more_s = more_flop / 1979e12 + more_bytes / 50e9
    assert uneven.predict(many) - base.predict(many) == pytest.approx(more_s, rel=1e-6)


def test_latent_decodes_of_many_heads_are_bound_by_computing() -> None:
    """A latent position costs its operations or its bytes, whichever take longer; on an H20 operations (Step-3)."""
    model = model_named("deepseek-v3")
    for name in ("h800", "h20"):
        device = hardware_named(name)
        base = Roofline(model, device, Parallel(1, 1, 8, True), Precision("fp8"), IDEAL)
        by = [base.predict(decodes(8, 100_000)) - base.predict(decodes(8, 0))]
        bytes_s = 8e5 * model.kv_bytes("bf16") / device.memory_bytes_s / 8
        flop_s = 8e5 * model.decode_flop / device.flop_s["bf16"] / 8
        assert by[0] == pytest.approx(max(bytes_s, flop_s), rel=1e-6)
    assert flop_s > bytes_s  # of the H20


def test_weights_of_4_bits_are_unpacked_where_a_device_cannot_multiply_them() -> None:
    """An H100 multiplies int4 in 16 bits and reaches less of both peaks; the logits' matrix stays in 16 bits."""
    coefficients = IDEAL._replace(compute_4bit=0.5, memory_4bit=0.6)
    base = cost_model("llama-3-8b", "h100", precision=Precision("int4"), coefficients=coefficients)
    model = base.model
    layers_bytes = model.fixed_weights * (0.5 + 2.5 / 128)
    read_s = layers_bytes / 0.6 / 3.35e12 + 2 * model.head_weights / 3.35e12
    assert base.predict(decodes(1, 0)) == pytest.approx(read_s, rel=1e-6)
    assert base.weight_bytes == pytest.approx(layers_bytes + 2 * 2 * model.head_weights)
    assert model.weight_bytes("int4") == pytest.approx(base.weight_bytes)
    half = cost_model("llama-3-8b", "h100", coefficients=IDEAL._replace(compute=0.5))
    whole, short = half.predict(prompt(8192)), base.predict(prompt(8192))
    assert short == pytest.approx(whole, rel=1e-4)


def test_what_a_device_multiplies_is_not_unpacked() -> None:
    """A B200 takes fp4 as it is, and an H100 fp8; experts in 4 bits have an overhead a layer, where unpacked."""
    slow = IDEAL._replace(compute_4bit=0.1, memory_4bit=0.1, experts_4bit_s=1e-3)
    for name, device, weights in (("deepseek-v3", "b200", "fp4"), ("deepseek-v3", "h100", "fp8")):
        spread, precision = Parallel(8), Precision(weights)
        with_it, without = (
            cost_model(name, device, spread, precision, each).predict(decodes(4, 9)) for each in (slow, IDEAL)
        )
        assert with_it == without
    model = model_named("deepseek-v3")
    layered = IDEAL._replace(experts_4bit_s=1e-3)
    more = [cost_model("deepseek-v3", "h100", Parallel(8), Precision("int4"), each) for each in (layered, IDEAL)]
    took = [each.predict(decodes(4, 9)) for each in more]
    assert took[0] - took[1] == pytest.approx(1e-3 * model.num_expert_layers)


def test_halves_of_a_batch_hide_the_all_to_all() -> None:
    """Two halves that take turns take the longer of computing and telling; without experts on several devices there is
    nothing to hide."""
    spread = Parallel(1, 1, 32, True)
    coefficients = IDEAL._replace(link_s=1e-5, layer_s=1e-5)
    plain = cost_model("deepseek-v3", "h800", spread, Precision("fp8"), coefficients)
    halves = cost_model("deepseek-v3", "h800", spread._replace(is_overlapped=True), Precision("fp8"), coefficients)
    few, many = decodes(32, 0), decodes(32 * 128, 0)
    assert halves.predict(few) > plain.predict(few)  # all is read twice
    assert halves.predict(many) < plain.predict(many)
    model = plain.model
    told = 4096 * model.num_expert_layers * model.num_chosen * model.hidden * 3 * 24 / 32 / 32 / 50e9
    told += 2 * 2 * model.num_expert_layers * 1e-5 * 5
    assert halves.predict(many) == pytest.approx(told + 2 * model.num_layers * 1e-5, rel=1e-6)
    long = decodes(32 * 128, 30_000)
    assert halves.predict(long) > halves.predict(many)  # attention does not fit behind it
    for parallel in (Parallel(1, 1, 32, False, True), Parallel(1, 1, 1, True, True)):
        with pytest.raises(ConfigError, match=r"parallel\.overlapped: only the all-to-all of experts"):
            cost_model("deepseek-v3", "h800", parallel, Precision("fp8"))


def test_speculated_tokens_cost_little_until_computing_binds() -> None:
    """Rows of five tokens take hardly more than rows of one while weights are read, and five times that beyond."""
    base = cost_model("llama-3-8b", "h100")

    def rows(num: int, num_tokens: int) -> float:
        return base.predict(work_of([PlanRow(i, 0, (7,) * num_tokens, sample=True) for i in range(num)]))

    assert rows(4, 5) < 1.02 * rows(4, 1)
    assert rows(4000, 5) > 4.5 * rows(4000, 1)


def test_shared_positions_are_read_once_where_the_kernel_can() -> None:
    """`shared` takes what rows share off the KV that is read."""
    work = decodes(8, 1000)._replace(num_shared=7000)
    spread = (
        cost_model("llama-3-8b", "h100").predict(work),
        cost_model("llama-3-8b", "h100", coefficients=IDEAL._replace(shared=0)),
    )
    assert spread[0] < spread[1].predict(work) == spread[1].predict(decodes(8, 1000))


def test_kv_blocks_fill_what_weights_leave() -> None:
    """An A100 has room for some 57,000 positions beside Llama 2 13B; one that has none says what to do."""
    num_blocks = cost_model("llama-2-13b", "a100-80gb").num_kv_blocks(16)
    left = 80 * 2**30 * 0.9 - 2 * 2**30 - 2 * 13.015e9
    assert num_blocks * 16 == pytest.approx(left / 819_200, rel=1e-3)
    with pytest.raises(ConfigError, match=r"hardware: llama-2-70b takes 130 GiB .* spread it over more devices"):
        cost_model("llama-2-70b", "a100-80gb").num_kv_blocks(16)
    assert cost_model("llama-2-70b", "a100-80gb", Parallel(4)).num_kv_blocks(16) > 1000
    halves = cost_model("llama-2-70b", "a100-80gb", Parallel(4, 2))
    assert halves.weight_bytes == pytest.approx(2 * 68.975e9 / 8, rel=0.01)


@pytest.mark.parametrize(
    "parallel, message",
    [
        (Parallel(0), "parallel.tensor: 1 or more is needed"),
        (Parallel(7), "parallel.tensor: llama-3-8b has 32 heads, which 7 devices cannot share"),
        (Parallel(1, 33), "parallel.pipeline: llama-3-8b has 32 layers, fewer than 33"),
    ],
)
def test_impossible_parts_name_the_field(parallel: Parallel, message: str) -> None:
    """A split that no engine could make is refused."""
    with pytest.raises(ConfigError, match=message):
        cost_model("llama-3-8b", "h100", parallel)


def test_devices_without_links_cannot_share() -> None:
    """A measured machine has no link: alone it serves, two of it do not."""
    machine = replace(hardware_named("h100"), link_bytes_s=0.0)
    assert Roofline(model_named("llama-3-8b"), machine).predict(decodes(1, 10)) > 0
    with pytest.raises(ConfigError, match="no link between devices of h100-sxm is known"):
        Roofline(model_named("llama-3-8b"), machine, Parallel(2))

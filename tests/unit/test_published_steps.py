"""Published durations of steps against the cost model, and the page about them."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from cost_model_page import LOADS, Closed, page, simulate
from published_steps import FITTED, PeakLoad, as_table, fit, published, read_series, with_interval, works_of
from tokenmill.core.errors import ConfigError
from tokenmill.sim.roofline import DENSE, USUAL, Variant, coefficients_by_software, coefficients_named

DOCS = Path(__file__).resolve().parents[2] / "docs"


def held_out(serves: str = "") -> list[float]:
    return [
        abs(error)
        for each in published()
        if not each.is_fitted and serves in ("", each.serves)
        for error in each.errors(each.coefficients)
    ]


def test_the_page_is_what_the_command_prints() -> None:
    """docs/operate/cost-model.md has the errors of this code and these tables; its whole loads are for the next
    test."""
    text = (DOCS / "operate" / "cost-model.md").read_text(encoding="utf8")
    loads = text[text.index("## Whole loads") : text.index("\n## Coefficients")]
    assert page(loads) == text


@pytest.mark.parametrize("load", LOADS[:2], ids=lambda load: f"{load.num_clients} clients")
def test_published_loads_are_simulated_to_near_their_rates(load: Closed) -> None:
    """Two H100 serve few clients with long prompts: tokens of each client and of all lie near what NVIDIA published."""
    found = simulate(load)
    assert found.itl_ms == pytest.approx(load.itl_ms, rel=0.06)
    assert found.tokens_s == pytest.approx(load.tokens_s, rel=0.06)


def test_held_out_steps_are_near_what_was_published() -> None:
    """Half of a hundred steps of models, spreads and devices that nothing was fitted to lie within 10 %, most within a
    quarter of what is published."""
    errors = held_out()
    assert len(errors) > 100
    assert statistics.median(errors) < 0.10
    assert sum(error < 0.25 for error in errors) > 0.8 * len(errors)


def test_held_out_peaks_are_near_what_was_published_on_each_generation() -> None:
    """Of TensorRT-LLM 1.0's throughput: all held-out loads within 30 %, half of them within 5 %, and no generation or
    family is off one way."""
    cells: dict[Variant, list[float]] = {}
    for each in published():
        if each.serves == "tensorrt-llm" and not each.is_fitted:
            cells.setdefault(each.variant, []).extend(each.errors(each.coefficients))
    errors = [abs(error) for some in cells.values() for error in some]
    assert len(cells) == 4 and len(errors) == 66
    assert statistics.median(errors) < 0.05 and max(errors) < 0.30
    assert sum(error > 0.25 for error in errors) == 1
    assert all(abs(statistics.median(some)) < 0.10 for some in cells.values())


def test_a_purchase_is_judged_as_published_loads_judge_it() -> None:
    """Llama 3 70B with 1,000 + 1,000 tokens: one B200 makes 2.4 times what one H200 makes, by either software."""
    for name in ("tensorrt-llm", "usual"):
        rates = {}
        for each in published():
            points = [point for point in each.points if point[:2] == (1000, 1000)]
            if each.serves == "tensorrt-llm" and each.model.name == "llama-3-70b" and points:
                one = each._replace(points=tuple(points))
                (rates[each.hardware.name],) = one.predicted(coefficients_named(name, each.variant))
        assert rates["b200-sxm"] / rates["h200-sxm"] == pytest.approx(7007 / 2909, rel=0.15), name


def test_the_steps_of_a_peak_load_draw_every_token_once() -> None:
    """Whatever fits at once: each request computes its prompt and draws its tokens, at most so many run, and a step has
    at most so many tokens."""
    for load in (PeakLoad(128, 128, 500, 64, 256), PeakLoad(1000, 3, 7, 2, 300), PeakLoad(5, 1, 9, 4, 16)):
        works = works_of(load)
        assert sum(num * work.num_drawn for num, work in works) == pytest.approx(load.num_requests * load.num_output)
        tokens = load.num_requests * (load.num_prompt + load.num_output - 1)
        assert sum(num * work.num_tokens for num, work in works) == pytest.approx(tokens)
        assert all(work.num_tokens <= load.max_tokens and work.num_rows <= load.max_rows for _, work in works)
    (one,) = works_of(PeakLoad(100, 1, 1, 1, 100))
    assert one[1][:4] == (1, 100, 5000, 0)


def test_the_interval_of_errors_leaves_one_of_ten_on_each_side() -> None:
    """Of eleven errors from -50 to +50 % the deciles are -40 and +40 %; of one nothing is known."""
    found = with_interval(USUAL, [(i - 5) / 10 for i in range(11)])
    assert (found.error_low, found.error_high, found.num_held_out) == pytest.approx((-0.4, 0.4, 11))
    assert found.uncertainty.startswith("8 of 10 predicted times are -40% to +40% off")
    assert with_interval(USUAL, [0.1]) == USUAL and USUAL.uncertainty == "not held against published times"


def test_held_out_steps_in_4_bits_are_near_what_was_published() -> None:
    """Of dense models of other sizes and numbers of devices within 5 %, of experts on other devices within 30 %."""
    for each in published():
        if each.serves == "vllm" and not each.is_fitted:
            errors = each.errors(each.coefficients)
            assert max(map(abs, errors)) < (0.30 if each.model.num_experts else 0.05), each.name


def test_what_is_fitted_is_what_the_fit_finds() -> None:
    """The table of coefficients is that of its command, for the software whose fit takes least."""
    points = [each for each in published() if each.serves == "lmdeploy" and each.is_fitted]
    found = fit(points)
    table = coefficients_by_software()["lmdeploy"][Variant()]
    assert all(getattr(found, name) == pytest.approx(getattr(table, name), rel=2e-3) for name in FITTED)
    text = as_table({("lmdeploy", Variant()): found, ("x", Variant("hopper", DENSE)): USUAL})
    assert "[lmdeploy]\ncompute = 0.6" in text and "[x.hopper.dense]\n" in text


def test_a_fit_finds_the_machine_that_made_the_points() -> None:
    """Points that the cost model itself made with other coefficients give these back, where points depend on them."""
    truth = USUAL._replace(compute=0.55, memory=0.6, kv=0.5, step_s=0.004)
    made = []
    for each in published():
        if each.serves == "lmdeploy" and each.parallel.tensor == 1:
            points = tuple((*point[:-1], ours) for point, ours in zip(each.points, each.predicted(truth), strict=True))
            made.append(each._replace(points=points))
    found = fit(made)
    assert [found.compute, found.memory, found.kv] == pytest.approx([0.55, 0.6, 0.5], rel=0.1)
    assert max(abs(error) for each in made for error in each.errors(found)) < 0.03


def test_points_with_holes_name_the_field() -> None:
    """A point of too few numbers, an unknown kind or model, a software without coefficients."""
    table = "[[series]]\nserves='x'\nmodel='dbrx'\nhardware='h100'\nkind='prompts'\nsource='me'\n"
    assert read_series(table + "points=[[1, 2, 3.5]]")[0].points == ((1.0, 2.0, 3.5),)
    with pytest.raises(ConfigError, match=r"series\[0\].points: a list of lists, each of 3 numbers above 0"):
        read_series(table + "points=[[1, 2]]")
    with pytest.raises(ConfigError, match=r"series\[0\].model: 'dbry' is unknown; did you mean 'dbrx'"):
        read_series(table.replace("dbrx", "dbry") + "points=[[1, 2, 3]]")
    with pytest.raises(ConfigError, match=r"software: 'lmdeplo' is unknown; did you mean 'lmdeploy'"):
        coefficients_named("lmdeplo", Variant())

"""Published durations of steps against the cost model, and the page about them."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.sim.published import as_table, fit, published, read_series
from tokenmill.sim.published_loads import LOADS, Closed, simulate
from tokenmill.sim.published_page import page
from tokenmill.sim.reached import USUAL, reached_by_software, reached_named

DOCS = Path(__file__).resolve().parents[2] / "docs"


def held_out(serves: str = "") -> list[float]:
    return [
        abs(error)
        for each in published()
        if not each.is_fitted and serves in ("", each.serves)
        for error in each.errors(reached_named(each.serves))
    ]


def test_the_page_is_what_the_command_prints() -> None:
    """docs/cost-model.md has the errors of this code and these tables; its whole loads are for the next test."""
    text = (DOCS / "cost-model.md").read_text(encoding="utf8")
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


def test_held_out_steps_in_4_bits_are_near_what_was_published() -> None:
    """Of dense models of other sizes and numbers of devices within 5 %, of experts on other devices within 30 %."""
    for each in published():
        if each.serves == "vllm" and not each.is_fitted:
            errors = each.errors(reached_named("vllm"))
            assert max(map(abs, errors)) < (0.30 if each.model.num_experts else 0.05), each.name


def test_what_is_fitted_is_what_the_fit_finds() -> None:
    """The table of coefficients is that of its command, for the software whose fit takes least."""
    points = [each for each in published() if each.serves == "lmdeploy" and each.is_fitted]
    found = fit(points)
    table = reached_by_software()["lmdeploy"]
    assert all(getattr(found, name) == pytest.approx(getattr(table, name), rel=2e-3) for name in found._fields)
    assert "[lmdeploy]\ncompute = 0.6" in as_table({"lmdeploy": found})


def test_a_fit_finds_the_machine_that_made_the_points() -> None:
    """Points that the law itself made with other coefficients give these back, where points depend on them."""
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
        reached_named("lmdeplo")

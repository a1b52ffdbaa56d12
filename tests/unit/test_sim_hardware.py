"""The table of hardware, and machines that were measured."""

from __future__ import annotations

import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.sim.hardware import all_hardware, hardware_named, measured_hardware, read_hardware

NAMES = (
    "a100-80gb a100-40gb a800 h100 h100-pcie h800 h200 h20 b200 l40s a10 a40 mi300x ascend-910b"  # as users say them
)


@pytest.mark.parametrize("name", NAMES.split())
def test_every_figure_has_a_source(name: str) -> None:
    """Each of a device's figures, its peaks among them, says where it comes from."""
    device = hardware_named(name)
    assert device.sources is not None
    figures = {"memory_bytes", "memory_bytes_s", "num_joined", "link_bytes_s", "pcie_bytes_s", "network_bytes_s"}
    assert {*figures, *(f"{each}_flop_s" for each in device.flop_s)} <= set(device.sources)
    assert all(len(source) > 20 for source in device.sources.values())


def test_figures_are_of_their_units() -> None:
    """A factor of a thousand or of eight in the table shows: bandwidths, peaks and links lie within what exists."""
    for device in all_hardware().values():
        assert 20e9 < device.memory_bytes < 300e9 and 0.3e12 < device.memory_bytes_s < 10e12
        assert all(10e12 < rate <= 10e15 for rate in device.flop_s.values())
        assert 1e9 < device.network_bytes_s <= device.link_bytes_s < 1e12
        assert not device.price_hour_usd or 0.3 < device.price_hour_usd < 20


def test_precisions_that_a_device_lacks_are_computed_in_16_bits() -> None:
    """An A100 has no 8-bit floats: their weights are read as 8 bits, and multiplied as 16."""
    assert hardware_named("A100").peak_flop_s("fp8") == 312e12
    assert hardware_named("h100").peak_flop_s("fp8") == 1979e12
    assert hardware_named("h100").peak_flop_s("int4") == 989e12
    assert hardware_named("h20").peak_flop_s("int8") == 296e12 and hardware_named("h800").peak_flop_s("fp32") == 67e12
    with pytest.raises(ConfigError, match="no FLOP/s for fp32; give fp32_flop_s"):
        hardware_named("b200").peak_flop_s("fp32")


def test_what_is_wrong_names_the_field_and_the_remedy() -> None:
    """Unknown hardware, a figure without source, and a source that is not there."""
    with pytest.raises(ConfigError, match=r"workers\[0\].hardware: 'h10' is unknown; did you mean 'h100'") as raised:
        hardware_named("h10", "workers[0].hardware")
    assert raised.value.param == "workers[0].hardware"
    with pytest.raises(ConfigError, match=r"own.bf16_flop_s.source: 'me' is unknown"):
        read_hardware("[sources]\nus='by hand'\n[own]\nbf16_flop_s={value=1,source='me'}")
    with pytest.raises(ConfigError, match=r"own.bf16_flop_s.value: a number that is more than 0"):
        read_hardware("[sources]\nus='by hand'\n[own]\nbf16_flop_s={value=0,source='us'}")


def test_a_measured_machine_is_hardware() -> None:
    """A report of the kernels gives peaks, and the bandwidth beside what read most: not that of a cache."""
    cases = [
        {"num_bytes": 1 << 20, "bandwidths": [9e10, 9e10]},
        {"num_bytes": 1 << 28, "bandwidths": [2e10, 3e10, 2.5e10]},
    ]
    report = {"kind": "kernels", "peaks": {"int8": 4e11, "f32": 1e11}, "cases": cases}
    device = measured_hardware(report, "kernels.json", 32 * 2**30)
    assert device.memory_bytes_s == 2.5e10 and device.flop_s == {"int8": 4e11, "fp32": 1e11}
    assert device.peak_flop_s("q4_1") == 4e11 and device.peak_flop_s("bf16") == 1e11
    with pytest.raises(ConfigError, match="no report of `tokenmill bench kernels"):
        measured_hardware({"kind": "load"}, "load.json")

"""Sections of a cluster's file on what workers share: they are read, and each worker finds its place."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.sim.cold_start import ColdStart
from tokenmill.sim.fields import Fields
from tokenmill.sim.parts import NO_PARTS
from tokenmill.sim.parts_file import Placer, read_cold, read_parts

FILE = """
[topology.spine]
oversubscription = 2
nodes_per_rack = 2
[[topology.nodes]]
count = 2
gpus = 4
nvlink = true
nics = 2
[[topology.nodes]]
name = "store"
has_workers = false
[[topology.nodes]]
name = "cpu"
count = 2
[[tiers]]
kind = "host"
bytes = "64GiB"
[[tiers]]
kind = "remote"
bytes = "1TB"
node = "store"
[host]
cores = 2
front_token_s = 3e-5
[[faults]]
kind = "crash"
mean_time_between_s = 3600
"""


def test_a_file_is_read() -> None:
    """Each section; a file without them has no parts."""
    parts = read_parts(Fields(tomllib.loads(FILE)))
    assert parts.topology is not None and list(parts.topology.nodes) == ["n0", "n1", "store", "cpu0", "cpu1"]
    assert parts.topology.oversubscription == 2 and parts.topology.nodes["store"].rack == "rack1"
    assert parts.tiers is not None and [tier.node for tier in parts.tiers.tiers] == ["", "store"]
    assert (parts.cores.cores, len(parts.faults)) == (2, 1)
    assert read_parts(Fields({})) == NO_PARTS


def placed(placer: Placer, table: dict[str, Any], num_gpus: int, count: int) -> list[tuple[str, tuple[int, ...]]]:
    return placer.place(Fields(table, "workers[0]"), num_gpus, count)


def test_workers_get_gpus_of_their_own() -> None:
    """In the order of the file, on the node that is named, none twice; workers without GPUs go where fewest are."""
    placer = Placer(read_parts(Fields(tomllib.loads(FILE))).topology)
    assert placed(placer, {"node": "n1"}, 1, 1) == [("n1", (0,))]
    assert placed(placer, {}, 2, 3) == [("n0", (0, 1)), ("n0", (2, 3)), ("n1", (1, 2))]
    assert placed(placer, {}, 0, 3) == [("cpu0", ()), ("cpu1", ()), ("cpu0", ())]
    with pytest.raises(ConfigError, match=r"workers\[0\].count: of 1 workers of 2 GPUs 0 fit on the topology's nodes"):
        placed(placer, {}, 2, 1)
    with pytest.raises(ConfigError, match=r"workers\[0\].node: 'n7' is unknown"):
        placed(placer, {"node": "n7"}, 1, 1)
    assert placed(Placer(None), {"node": "any"}, 8, 2) == [("any", ()), ("any", ())]


def test_weights_come_from_nodes_that_are_there() -> None:
    """Of the model that a worker has."""
    parts = read_parts(Fields(tomllib.loads(FILE)))
    table = {"cold_start_s": 5, "weights_node": "store"}
    assert read_cold(Fields(table), parts, 1e9) == ColdStart(5.0, 10**9, weights_node="store")
    with pytest.raises(ConfigError, match=r"workers\[0\].weights_node: 'stor' is unknown; did you mean 'store'"):
        read_cold(Fields({"weights_node": "stor"}, "workers[0]"), parts, 1e9)

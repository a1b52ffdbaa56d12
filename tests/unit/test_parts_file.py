"""Sections of a cluster's file on what workers share: they are read, and each worker finds its place."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tokenmill.core.errors import ConfigError
from tokenmill.plan.config import sources_beside
from tokenmill.sim.cluster_file import read_deployment
from tokenmill.sim.fields import Fields
from tokenmill.sim.parts import NO_PARTS, ColdStart, Placer, read_cold, read_parts

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


LINKS = "[spine]\nnodes_per_rack = 1\n[[nodes]]\ncount = 2\ngpus = 8\n"
CLUSTER = """
[model]
name = "llama-3-8b"
[[workers]]
count = 4
hardware = "h100-sxm"
[topology]
file = "links/racks.toml"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "racks.toml").write_text(LINKS)
    return tmp_path


def test_clusters_share_the_links_of_a_file(folder: Path) -> None:
    """It means what the same tables in the cluster's file mean."""
    inside = CLUSTER.replace('file = "links/racks.toml"\n', "") + LINKS.replace("[spine]", "[topology.spine]").replace(
        "[[nodes]]", "[[topology.nodes]]"
    )
    one, other = read_deployment(CLUSTER, sources_beside(folder)), read_deployment(inside)
    assert one.parts == other.parts and one.parts.topology is not None
    assert [(each.node, each.gpus) for each in one.workers] == [(each.node, each.gpus) for each in other.workers]


@pytest.mark.parametrize(
    ("cluster", "links", "told"),
    [
        ("", LINKS.replace("gpus = 8", "gpus = -8"), r"topology\.file: \S+racks\.toml: nodes\[0\]\.gpus: a whole"),
        ("", LINKS + "file = 'x'\n", r"topology\.file: \S+racks\.toml: nodes\[0\]\.file: no such key"),
        ("", "[[nodes", r"topology\.file: \S+racks\.toml is no TOML"),
        ("", None, r"topology\.file: \S+racks\.toml cannot be read: No such file"),
        ("[topology.spine]\n", LINKS, r"topology\.spine: links are described once"),
        ("nodse = 1\n", LINKS, r"topology\.nodse: no such key; did you mean 'nodes'"),
        ("", "", r"topology\.file: \S+racks\.toml: nodes: at least one"),
    ],
)
def test_a_bad_file_of_links_is_named_with_its_field(folder: Path, cluster: str, links: str | None, told: str) -> None:
    path = folder / "links" / "racks.toml"
    if links is None:
        path.unlink()
    else:
        path.write_text(links)
    with pytest.raises(ConfigError, match=told) as caught:
        read_deployment(CLUSTER + cluster, sources_beside(folder))
    assert "\n" not in caught.value.message
    with pytest.raises(ConfigError, match=r"topology\.\w+: "):
        read_deployment(CLUSTER + cluster)  # where nothing can be read


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

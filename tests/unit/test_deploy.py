"""deploy/: the unit of systemd and the compose file start commands that there are, with files that there are."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import yaml

from tokenmill.cli import main as cli

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose" / "compose.yml").read_text(encoding="utf8"))


def unit(name: str) -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read(DEPLOY / "systemd" / name, encoding="utf8")
    return parsed


def test_the_service_starts_a_command_that_there_is() -> None:
    service = unit("tokenmill.service")["Service"]
    words = shlex.split(service["ExecStart"].replace("${MODEL}", "smollm2").replace("$ARGS", ""))
    given = cli._parser(words[1:]).parse_args(words[1:])
    assert given.model == "smollm2" and service["Type"] == "notify"
    assert float(service["TimeoutStopSec"]) > given.drain_s
    assert unit("tokenmill.socket")["Socket"]["ListenStream"] == f"{given.host}:{given.port}"


def test_the_composition_starts_a_command_that_there_is() -> None:
    server = COMPOSE["services"]["tokenmill"]
    words = [word.replace("${MODEL:-smollm2}", "smollm2") for word in server["command"]]
    given = cli._parser(words).parse_args(words)
    assert server["ports"] == [f"127.0.0.1:{given.port}:{given.port}"]
    assert given.api_key_file == f"/run/secrets/{server['secrets'][0]}"
    assert float(server["stop_grace_period"].removesuffix("s")) > given.drain_s


def test_what_the_composition_mounts_is_there() -> None:
    here = DEPLOY / "compose"
    services = COMPOSE["services"].values()
    mounted = [each.split(":")[0] for service in services for each in service["volumes"]]
    assert {each for each in mounted if "/" not in each} == set(COMPOSE["volumes"])
    assert all((here / each).exists() for each in mounted if "/" in each)
    build = COMPOSE["services"]["tokenmill"]["build"]
    assert (here / build["context"] / build["dockerfile"]).is_file()


def test_prometheus_and_grafana_are_told_there_what_they_are_told_elsewhere() -> None:
    """But for the names of the services."""
    told = {
        name: each["content"].replace("tokenmill:8000", "localhost:8000") for name, each in COMPOSE["configs"].items()
    }
    prometheus = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf8"))
    assert yaml.safe_load(told["prometheus"]) == prometheus
    source = (DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yml").read_text(encoding="utf8")
    assert yaml.safe_load(told["datasource"].replace("prometheus:9090", "localhost:9090")) == yaml.safe_load(source)


def test_extras_of_the_image_are_those_of_the_package() -> None:
    package = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text(encoding="utf8"))["project"]
    told = [DEPLOY / "Dockerfile", DEPLOY / "README.md", DEPLOY.parent / "docs" / "operate" / "launchers.md"]
    for path in told:
        (named,) = re.findall(r"EXTRAS=([a-z][\w,-]*)", path.read_text(encoding="utf8"))
        assert set(named.split(",")) <= set(package["optional-dependencies"]), path

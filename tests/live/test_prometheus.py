"""deploy/ against a real Prometheus: rules and their tests, a scrape of a running server, the queries of the dashboard.

Skipped, with the reason, where promtool or prometheus is absent (Debian: apt-get install prometheus).
"""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kill
import pytest
from serving import Server

from ports import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
needs_promtool = pytest.mark.skipif(
    not (shutil.which("promtool") and shutil.which("prometheus")),
    reason="promtool and prometheus are not installed (apt-get install prometheus)",
)


def promtool(*args: str) -> str:
    done = subprocess.run(["promtool", *args], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_the_configuration_and_its_rules_are_valid_and_do_what_their_tests_say() -> None:
    """promtool takes the configuration, and the alerts fire for the series in rules_test.yml and for no others."""
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", "recording.yml", "alerts.yml")
    assert "SUCCESS" in promtool("test", "rules", "rules_test.yml")


def test_the_dashboard_is_what_its_list_of_panels_says() -> None:
    """The file that Grafana reads is up to date; every panel has queries, a unit and a place of its own."""
    made = runpy.run_path(str(DEPLOY / "grafana" / "make_dashboard.py"))["text"]()
    assert (DEPLOY / "grafana" / "tokenmill.json").read_text() == made, "run deploy/grafana/make_dashboard.py"
    panels = [panel for panel in json.loads(made)["panels"] if panel["type"] != "row"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels) == len({panel["id"] for panel in panels})
    assert all(panel["targets"] and panel["fieldConfig"]["defaults"]["unit"] for panel in panels)


def test_every_alert_is_explained() -> None:
    """docs/operate/operations.md says of each alert what to do, and of no other."""
    page = (DEPLOY.parent / "docs" / "operate" / "operations.md").read_text()
    alerts = re.findall(r"- alert: (\w+)", (PROMETHEUS / "alerts.yml").read_text())
    assert re.findall(r"^\| `(Tokenmill\w+)` \|", page, re.MULTILINE) == alerts


@contextmanager
def prometheus(folder: Path, target: str, key: str) -> Iterator[str]:
    """One that scrapes `target` each half second, with the rules of deploy/; its address."""
    config = (PROMETHEUS / "prometheus.yml").read_text()
    config = config.replace("scrape_interval: 5s", "scrape_interval: 500ms").replace("localhost:8000", target)
    config = config.replace("evaluation_interval: 15s", "evaluation_interval: 1s")
    config = config.replace("    # authorization:\n    #   credentials_file: /etc/prometheus/tokenmill.key",
                            f"    authorization:\n      credentials_file: {folder / 'key'}")  # fmt: skip
    assert target in config and "      credentials_file" in config
    (folder / "key").write_text(key)
    (folder / "prometheus.yml").write_text(config)
    for rules in ("recording.yml", "alerts.yml"):
        shutil.copy(PROMETHEUS / rules, folder)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            end_s = time.monotonic() + 30
            while True:
                try:
                    urllib.request.urlopen(f"{url}/-/ready", timeout=5).close()
                    break
                except OSError:
                    assert process.poll() is None and time.monotonic() < end_s, (folder / "log").read_text()
                    time.sleep(0.1)
            yield url
        finally:
            process.terminate()


def query(url: str, expression: str) -> list[float]:
    """The values of what an expression gives now, those that are numbers."""
    with urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}") as answer:
        data = json.load(answer)["data"]["result"]
    values = [float(each["value"][1]) for each in data]
    return [value for value in values if not math.isnan(value)]


def make_key(state: dict[str, str], *args: str) -> str:
    command = [sys.executable, "-m", "tokenmill.cli.main", "keys", "create", *args]
    done = subprocess.run(command, env=os.environ | state, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


class Traffic:
    """Calls without a pause, some of them refused, until the block ends."""

    def __init__(self, server: Server, key: str, limited: str) -> None:
        self._server = server
        self._keys = (key, limited)
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(3)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        key, limited = self._keys
        while not self._stopped.is_set():
            self._ask(key, {"prompt": "one two three" * 20, "max_tokens": 200, "ignore_eos": True})
            if number == 0:
                self._ask(key, {"prompt": "a", "max_tokens": -1})
                self._ask(limited, {"prompt": "a", "max_tokens": 1})

    def _ask(self, key: str, body: dict[str, Any]) -> None:
        heads = {"content-type": "application/json", "authorization": f"Bearer {key}", "x-slo-ttft-ms": "2000"}
        data = json.dumps(body).encode()
        call = urllib.request.Request(f"{self._server.url}/v1/completions", data, heads)
        try:
            with urllib.request.urlopen(call, timeout=60) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            error.close()


@needs_promtool
def test_each_query_of_the_dashboard_gives_data_of_a_running_server(tmp_path: Path) -> None:
    """With an admin key in the scrape, tenants included; and a healthy server sets no alert off."""
    (tmp_path / "model").mkdir()
    model = kill.write_model(tmp_path / "model")
    dashboard = json.loads((DEPLOY / "grafana" / "tokenmill.json").read_text())
    wanted = {target["expr"]: panel["title"] for panel in dashboard["panels"] for target in panel.get("targets", ())}
    state = {"TOKENMILL_STATE": str(tmp_path / "state")}  # its own: keys would shut other tests' servers
    wanted |= {rule: "a rule" for rule in ("model:output_tokens:rate_5m", "class:time_to_first_token_seconds:p99_5m")}
    with Server(*kill.ARGS, model=str(model), env=state) as server:
        admin = make_key(state, "operator", "--admin")
        keys = make_key(state, "acme"), make_key(state, "small", "--requests-per-minute", "1")
        with prometheus(tmp_path, f"127.0.0.1:{server.port}", admin) as url, Traffic(server, *keys):
            missing = dict(wanted)
            end_s = time.monotonic() + 40
            while missing and time.monotonic() < end_s:
                time.sleep(0.5)
                for expression in list(missing):
                    asked = expression.replace("$__rate_interval", "5s").replace("[1h]", "[5s]")
                    if query(url, asked.replace("$model", ".*").replace("$instance", ".*")):
                        del missing[expression]
            assert not missing, [(title, expression) for expression, title in missing.items()]
            assert query(url, 'tokenmill:tenant_tokens_total{tenant="acme",kind="output"}')[0] > 0
            assert not query(url, 'ALERTS{alertstate="firing"}')

"""Front ends and workers started by the commands, probes and preStop of the manifests that deploy/kubernetes renders.

This plays the part of a node: it expands variables, runs a pod's container, asks its probes, and ends it as a node
does, by preStop and then SIGTERM.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving import wait_until

from ports import free_port

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

CHART = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
SECRETS = {"tokenmill-workers": {"secret": "a secret of the tests only"}, "keys": {"api-key": "sk-of-the-tests"}}
NUM_STREAMS, NUM_TOKENS = 4, 120


def manifests(values: dict[str, Any]) -> list[dict[str, Any]]:
    spec = importlib.util.spec_from_file_location("render_chart", CHART / "render.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.Chart().manifests("mill", values))


class Pod:
    """One container of a workload, run here; `name` is the pod's."""

    def __init__(self, workload: dict[str, Any], name: str, folder: Path) -> None:
        spec = workload["spec"]["template"]["spec"]
        (self._container,) = spec["containers"]
        self._grace_s = spec["terminationGracePeriodSeconds"]
        ports = {each["name"]: each["containerPort"] for each in self._container["ports"]}
        self._ports = ports
        self.lines = folder / f"{name}.log"
        env = {each["name"]: self._value(each, name) for each in self._container["env"]}
        expand = lambda text: re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], text)  # noqa: E731
        assert self._container["command"] == ["tokenmill"]
        command = [sys.executable, "-m", "tokenmill.cli.main", *map(expand, self._container["args"])]
        folders = {"TOKENMILL_STATE": str(folder / f"{name}-state"), "TOKENMILL_CACHE": _cache(), "HOME": str(folder)}
        with self.lines.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **env, **folders}, start_new_session=True
            )

    def _value(self, given: dict[str, Any], name: str) -> str:
        if "value" in given:
            return str(given["value"])
        source = given["valueFrom"]
        if "fieldRef" in source:
            return {"metadata.name": name, "status.podIP": "127.0.0.1"}[source["fieldRef"]["fieldPath"]]
        reference = source["secretKeyRef"]
        return SECRETS[reference["name"]][reference["key"]]

    def probe(self, kind: str) -> bool:
        """What the node sees of it now."""
        assert self.process.poll() is None, self.lines.read_text()
        get = self._container[f"{kind}Probe"]["httpGet"]
        url = f"http://127.0.0.1:{self._ports[get['port']]}{get['path']}"
        try:
            with urllib.request.urlopen(
                url, timeout=self._container[f"{kind}Probe"].get("timeoutSeconds", 1)
            ) as answer:
                return 200 <= answer.status < 400
        except (urllib.error.HTTPError, OSError):
            return False

    def end(self) -> int:
        """As a node ends it; the exit status."""
        if self.process.poll() is None:
            subprocess.run(self._container["lifecycle"]["preStop"]["exec"]["command"], check=True)
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(self._grace_s)

    def remove(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _cache() -> str:
    return os.environ.get("TOKENMILL_CACHE", str(Path.home() / ".cache" / "tokenmill"))


@contextmanager
def cluster(model: Path, folder: Path) -> Iterator[tuple[int, Pod, dict[str, Any]]]:
    """A front end alone: its port, its pod and the values."""
    http, links, health = free_port(), free_port(), free_port()
    values = {
        "model": {"path": str(model), "maxModelLen": 1024},
        "front": {
            "replicas": 1, "host": "127.0.0.1", "port": http, "apiKeySecret": "keys", "drainSeconds": 20,
            "settleSeconds": 1,
        },
        "links": {"host": "127.0.0.1", "port": links, "insecure": True, "frontAddresses": [f"127.0.0.1:{links}"]},
        "pools": [
            {"name": "mixed", "replicas": 2, "threads": 1, "kvCacheMemory": "64MiB", "resources": {}, "args": []}
        ],
        "workers": {"healthHost": "127.0.0.1", "healthPort": health, "drainSeconds": 20},
    }  # fmt: skip
    front = Pod(next(each for each in manifests(values) if each["kind"] == "StatefulSet"), "mill-front-0", folder)
    try:
        yield http, front, values
    finally:
        front.remove()


def complete(port: int, number: int, path: str = "/v1/completions") -> str:
    body = {"prompt": f"Once upon a time, {number}", "max_tokens": NUM_TOKENS, "seed": number, "ignore_eos": True}
    headers = {"content-type": "application/json", "authorization": f"Bearer {SECRETS['keys']['api-key']}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return str(json.loads(response.read())["choices"][0]["text"])


@pytest.mark.sampled(1 / 3)
@pytest.mark.slow
def test_the_manifests_own_commands_serve_and_a_rollout_loses_nothing(smollm2: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tm") as name, ExitStack() as held:
        folder = Path(name)
        port, front, values = held.enter_context(cluster(smollm2, folder))
        wait_until(lambda: front.probe("startup"), "the front end's start")
        assert front.probe("liveness") and not front.probe("readiness"), "no worker has joined"

        workloads = []
        for _ in range(2):  # two pods on one machine, which in a cluster have addresses of their own
            health, kv = free_port(), free_port()
            again = values | {"workers": values["workers"] | {"healthPort": health, "kvPort": kv}}
            workloads.append(next(each for each in manifests(again) if each["kind"] == "Deployment"))
        workers = []
        for number, workload in enumerate(workloads):
            workers.append(Pod(workload, f"mill-mixed-{number}", folder))
            held.callback(workers[-1].remove)
        for pod in (*workers, front):
            wait_until(lambda pod=pod: pod.probe("readiness"), "readiness")  # type: ignore[misc]
        assert all(pod.probe("liveness") for pod in workers)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10)

        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            expected = list(pool.map(lambda number: complete(port, number), range(NUM_STREAMS)))
            texts = [pool.submit(complete, port, number) for number in range(NUM_STREAMS)]
            assert workers[0].end() == 0, "as in a rollout: the pod leaves while it has requests"
            assert [text.result() for text in texts] == expected
            assert front.probe("readiness") and workers[1].probe("readiness")

            text = pool.submit(complete, port, 0)
            os.kill(workers[1].process.pid, signal.SIGSTOP)
            wait_until(lambda: not workers[1].probe("liveness"), "the probe's failure: its process stands still")
            os.kill(workers[1].process.pid, signal.SIGCONT)
            assert text.result() == expected[0]
            wait_until(lambda: front.probe("readiness"), "readiness")

            text = pool.submit(complete, port, 1)
            wait_until(lambda: _num_running(port) > 0, "the request's start")
            assert front.end() == 0, front.lines.read_text()
            assert text.result() == expected[1], "the front end ends what it has"
        wait_until(lambda: not workers[1].probe("readiness"), "the worker's sight of that")
        assert workers[1].probe("liveness") and workers[1].end() == 0


def _num_running(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_requests_running"))

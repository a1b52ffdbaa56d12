"""The chart of deploy/kubernetes: what it renders is valid, complete, and says what the flags of the commands say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest

from tokenmill.cli import main as cli

HERE = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
VALUES: dict[str, Any] = {"front": {"apiKeySecret": "keys"}}
STATE = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "9Gi"}}}
NUMBER = {"type": "integer", "minimum": 1, "maximum": 65535}
POOL_SCHEMA = {  # of InferencePool, inference.networking.k8s.io/v1: its fields that are needed or that the chart writes
    "type": "object",
    "required": ["selector", "targetPorts", "endpointPickerRef"],
    "additionalProperties": False,
    "properties": {
        "selector": {
            "type": "object",
            "required": ["matchLabels"],
            "properties": {"matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}},
        },
        "targetPorts": {
            "type": "array",
            "minItems": 1,
            "maxItems": 8,
            "items": {"type": "object", "required": ["number"], "properties": {"number": NUMBER}},
        },
        "endpointPickerRef": {
            "type": "object",
            "required": ["name", "port"],
            "properties": {
                "name": {"type": "string"},
                "port": {"type": "object", "required": ["number"], "properties": {"number": NUMBER}},
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
        },
    },
}


@pytest.fixture(scope="module")
def render() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_chart", HERE / "render.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find(manifests: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in manifests if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (found,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize("version", ["1.29", "1.33", "1.36"])
@pytest.mark.parametrize(
    "values",
    [
        VALUES,
        {"front": {"insecure": True, "state": STATE}},
        {
            **VALUES,
            "pools": [
                {"name": "prefill", "replicas": 3, "threads": 8, "kvCacheMemory": "8GiB", "resources": {}},
                {"name": "decode", "replicas": 1, "threads": 2, "kvCacheMemory": "8GiB", "resources": {},
                 "args": ["-t"], "tolerations": [{"operator": "Exists"}], "nodeSelector": {"disk": "ssd"}},
            ],
            "links": {"insecure": True, "tlsSecretName": ""},
            "podLabels": {"team": "a"},
            "podAnnotations": {"note": "b"},
            "podDisruptionBudget": {"enabled": False},
        },
    ],
    ids=["as it is", "state, no key", "two pools, no TLS"],
)  # fmt: skip
def test_what_is_rendered_is_what_kubernetes_takes(render: ModuleType, values: dict[str, Any], version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for each in render.Chart().manifests("mill", values):
        kubernetes_validate.validate(each, version, strict=True)


def test_selectors_select_what_they_are_for(render: ModuleType) -> None:
    values = {**VALUES, "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}}}
    manifests = render.Chart().manifests("mill", values)
    pods = {
        name: find(manifests, kind, name)["spec"]["template"]["metadata"]["labels"]
        for kind, name in (("StatefulSet", "mill-front"), ("Deployment", "mill-mixed"))
    }
    selectors = [
        each["spec"]["selector"].get("matchLabels", each["spec"]["selector"]) | {"_": each["metadata"]["name"]}
        for each in manifests
        if "selector" in each["spec"]
    ]
    assert len(selectors) == 7
    for selector in selectors:
        name = selector.pop("_")
        chosen = [pod for pod, labels in pods.items() if selector.items() <= labels.items()]
        assert chosen == [name if name in pods else "mill-front"], (name, chosen)
    pool = find(manifests, "InferencePool", "mill")
    jsonschema.validate(pool["spec"], POOL_SCHEMA)
    ports = {
        each["name"]: each["containerPort"] for each in container(find(manifests, "StatefulSet", "mill-front"))["ports"]
    }
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]


def test_commands_are_ones_that_tokenmill_takes(render: ModuleType) -> None:
    manifests = render.Chart().manifests("mill", {**VALUES, "front": {"apiKeySecret": "keys", "replicas": 3}})
    front = container(find(manifests, "StatefulSet", "mill-front"))
    worker = container(find(manifests, "Deployment", "mill-mixed"))
    assert front["command"] == worker["command"] == ["tokenmill"]
    worker["args"] = [each.replace("$(POD_NAME)", "mill-mixed-0") for each in worker["args"]]  # as a node does
    serving, working = (cli._parser(each["args"]).parse_args(each["args"]) for each in (front, worker))
    assert (serving.host, serving.port, serving.listen_workers) == ("0.0.0.0", 8000, ("0.0.0.0", 7000))
    assert serving.max_model_len == working.max_model_len and serving.kv_cache_dtype == working.kv_cache_dtype
    assert list(working.connect) == [(f"mill-front-{number}.mill-front", 7000) for number in range(3)]
    grace_s = find(manifests, "StatefulSet", "mill-front")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > serving.drain_s + 5
    names = {each["name"] for each in worker["env"]}
    assert {"TOKENMILL_WORKER_SECRET", "POD_NAME"} <= names


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "front.apiKeySecret is needed, or front.insecure"),
        ({**VALUES, "links": {"tlsSecretName": ""}}, "links.tlsSecretName is needed, or links.insecure"),
        ({**VALUES, "links": {"secretName": ""}}, "links.secretName is needed"),
    ],
)
def test_what_is_missing_is_named(render: ModuleType, values: dict[str, Any], message: str) -> None:
    with pytest.raises(render.ChartError, match=message):
        render.Chart().render("mill", values)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ if .Values.a }}", "no `end`"),
        ("{{ end }}", "without a beginning"),
        ("{{ lookup .Values.a }}", "'lookup' is not one"),
        ("{{ $a }}", r"\$a has no value"),
        ("{{ (.Values.a }}", "a bracket is open"),
        ('{{ include "b" . }}', "no template is called 'b'"),
    ],
)
def test_templates_that_cannot_be_read_are_refused(
    render: ModuleType, tmp_path: Path, template: str, message: str
) -> None:
    (tmp_path / "Chart.yaml").write_text("appVersion: '1'")
    (tmp_path / "values.yaml").write_text("a: 1")
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "a.yaml").write_text(template)
    with pytest.raises(render.ChartError, match=message):
        render.Chart(tmp_path).render("mill", {})


def test_the_language_of_templates(render: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "Chart.yaml").write_text("appVersion: '1'")
    (tmp_path / "values.yaml").write_text("{a: 1, b: {c: [x, y], d: ''}, e: {k2: 2, k1: 1}}")
    (tmp_path / "templates").mkdir()
    text = (
        '{{- define "n" -}}\n<{{ .c }}>\n{{- end }}\n'
        '{{- $v := default "z" .Values.b.d }}{{ $v }} {{ printf "%s-%v" $v (add 1 .Values.a) | quote }}\n'
        "{{- range $i, $x := .Values.b.c }} {{ $i }}{{ $x }}{{ $.Values.a }}{{ end }}"
        "{{- range $k, $x := .Values.e }} {{ $k }}={{ $x }}{{ end }}"
        "{{ with .Values.b }}{{ if .d }}no{{ else if eq 1 2 }}no{{ else }} {{ .c | toYaml | nindent 2 }}{{ end }}"
        "{{ end }}\n"
        '{{ include "n" (dict "c" 5) }} {{ if not (and true .Values.b.d) }}yes{{ end }}{{/* said */}}\n'
    )
    (tmp_path / "templates" / "a.yaml").write_text(text)
    rendered = render.Chart(tmp_path).render("mill", {"b": {"d": ""}})
    assert rendered == 'z "z-2" 0x1 1y1 k1=1 k2=2 \n  - x\n  - y\n<5> yes\n'

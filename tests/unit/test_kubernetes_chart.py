"""The chart of deploy/kubernetes: what it renders is valid, complete, and says what the flags of the commands say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

from tokenmill.cli import main as cli

HERE = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
VALUES: dict[str, Any] = {"front": {"apiKeySecret": "keys"}}
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


SETS = sorted((HERE / "ci").glob("*-values.yaml"))
MONITOR_SCHEMA = {  # of ServiceMonitor, monitoring.coreos.com/v1: the fields that the chart writes
    "type": "object",
    "required": ["selector", "endpoints"],
    "additionalProperties": False,
    "properties": {
        "selector": POOL_SCHEMA["properties"]["selector"],  # type: ignore[index]
        "endpoints": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "port": {"type": "string"},
                    "path": {"type": "string"},
                    "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
                },
            },
        },
    },
}
OF_OTHERS = {"InferencePool": POOL_SCHEMA, "ServiceMonitor": MONITOR_SCHEMA}


def nulls(value: Any, path: str = "") -> list[str]:
    """Where a manifest says nothing, which Kubernetes takes for a deletion."""
    if isinstance(value, dict):
        return [each for key, inner in value.items() for each in nulls(inner, f"{path}.{key}")]
    if isinstance(value, list):
        return [each for inner in value for each in nulls(inner, f"{path}[]")]
    return [path] if value is None else []


@pytest.mark.parametrize("version", ["1.29", "1.33", "1.36"])
@pytest.mark.parametrize("values", SETS, ids=[path.stem for path in SETS])
def test_what_is_rendered_is_what_kubernetes_takes(render: ModuleType, values: Path, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    assert len(SETS) == 3
    for each in render.Chart().manifests("mill", yaml.safe_load(values.read_text())):
        assert not nulls(each), each["metadata"]["name"]
        if each["kind"] in OF_OTHERS:
            jsonschema.validate(each["spec"], OF_OTHERS[each["kind"]])
        else:
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("values", SETS, ids=[path.stem for path in SETS])
def test_no_container_may_more_than_it_needs(render: ModuleType, values: Path) -> None:
    """As the Pod Security Standard `restricted` asks; what is written lies on volumes."""
    manifests = render.Chart().manifests("mill", yaml.safe_load(values.read_text()))
    pods = [each["spec"]["template"]["spec"] for each in manifests if "template" in each.get("spec", {})]
    assert len(pods) >= 2
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        volumes = {each["name"] for each in pod["volumes"]} | {"state"}
        for each in (*pod["containers"], *pod.get("initContainers", ())):
            allowed = each["securityContext"]
            assert allowed["readOnlyRootFilesystem"] and allowed["allowPrivilegeEscalation"] is False
            assert allowed["capabilities"] == {"drop": ["ALL"]}
            assert {mount["name"] for mount in each["volumeMounts"]} <= volumes
            assert "/tmp" in {mount["mountPath"] for mount in each["volumeMounts"]}


def test_a_model_may_be_fetched_before_anything_starts(render: ModuleType) -> None:
    manifests = render.Chart().manifests("mill", {**VALUES, "model": {"pull": {"name": "smollm2"}}})
    for kind, name in (("StatefulSet", "mill-front"), ("Deployment", "mill-mixed")):
        workload = find(manifests, kind, name)
        (pull,) = workload["spec"]["template"]["spec"]["initContainers"]
        assert cli._parser(pull["args"]).parse_args(pull["args"]).model == "smollm2"
        serving = container(workload)
        assert serving["args"][1] == "smollm2"
        caches = [[each for each in one["env"] if each["name"] == "TOKENMILL_CACHE"] for one in (pull, serving)]
        assert caches[0] == caches[1] != []


def test_kv_moves_between_pods_at_their_own_addresses(render: ModuleType) -> None:
    manifests = render.Chart().manifests("mill", VALUES)
    worker = container(find(manifests, "Deployment", "mill-mixed"))
    assert "--kv-address=$(POD_IP):7001" in worker["args"]
    (ip,) = (each for each in worker["env"] if each["name"] == "POD_IP")
    assert ip["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    ports = {each["name"]: each["containerPort"] for each in worker["ports"]}
    (kv, _) = find(manifests, "NetworkPolicy", "mill-workers")["spec"]["ingress"]
    assert ports["kv"] == 7001 and kv["ports"] == [{"port": "kv"}]


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
        if "selector" in each.get("spec", {})
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
    worker["args"] = [
        each.replace("$(POD_NAME)", "mill-mixed-0").replace("$(POD_IP)", "10.0.0.1") for each in worker["args"]
    ]  # as a node does
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
        ({**VALUES, "frnt": {}}, "'frnt' was unexpected"),
        ({**VALUES, "front": {"replicas": "two"}}, "front.replicas: 'two' is not of type 'integer'"),
        ({**VALUES, "pools": [{"name": "A"}]}, "pools.0"),
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

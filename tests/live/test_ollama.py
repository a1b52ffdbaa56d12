"""Ollama's API as its clients meet it: real sockets, the model scripted."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from scripted import Served


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as running:
        yield running


def ask(served: Served, path: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
    """(status, body); of several lines, all of them."""
    data = None if body is None else json.dumps(body).encode()
    call = urllib.request.Request(served.url + path, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(call, timeout=20) as answer:
            status, text, kind = answer.status, answer.read().decode(), answer.headers["content-type"]
    except urllib.error.HTTPError as error:
        with error:
            status, text, kind = error.code, error.read().decode(), error.headers["content-type"]
    if kind == "application/x-ndjson":
        return status, [json.loads(line) for line in text.splitlines()]
    return status, json.loads(text) if kind == "application/json" else text


# ---- models ----


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_somebody_is_there(served: Served, method: str) -> None:
    status, text = ask(served, "/", method=method)
    assert status == 200 and ("Ollama is running" in text) == (method == "GET")


def test_liveness_needs_no_key() -> None:
    with Served(api_keys=("secret",)) as running:
        assert ask(running, "/")[0] == 200
        status, body = ask(running, "/api/tags")
        assert status == 401 and list(body) == ["error"]


def test_models_are_listed_with_their_tag(served: Served) -> None:
    (model,) = ask(served, "/api/tags")[1]["models"]
    assert model["name"] == model["model"] == "toy:latest" and len(model["digest"]) == 64
    assert datetime.fromisoformat(model["modified_at"])
    assert set(model["details"]) == {
        "parent_model", "format", "family", "families", "parameter_size", "quantization_level",
    }  # fmt: skip


def test_the_model_is_loaded_for_good(served: Served) -> None:
    (model,) = ask(served, "/api/ps")[1]["models"]
    assert model["context_length"] == served.engine.max_model_len and model["size_vram"] == 0
    assert datetime.fromisoformat(model["expires_at"]).year == 9999


@pytest.mark.parametrize("field", ["model", "name"])
@pytest.mark.parametrize("name", ["toy", "toy:latest"])
def test_what_a_model_is(served: Served, field: str, name: str) -> None:
    status, body = ask(served, "/api/show", {field: name})
    assert status == 200 and body["capabilities"] == ["completion"]
    assert "<|im_start|>" in body["template"]
    (length,) = [value for key, value in body["model_info"].items() if key.endswith(".context_length")]
    assert length == served.engine.max_model_len


def test_another_model_is_not_found(served: Served) -> None:
    status, body = ask(served, "/api/show", {"model": "other"})
    assert status == 404 and "'other'" in body["error"]


def test_a_version_that_clients_can_compare(served: Served) -> None:
    version = ask(served, "/api/version")[1]["version"]
    assert tuple(map(int, version.split("."))) >= (0, 12, 0)


def test_a_served_model_needs_no_pulling(served: Served) -> None:
    assert ask(served, "/api/pull", {"model": "toy"}) == (200, [{"status": "success"}])
    status, body = ask(served, "/api/pull", {"model": "llama3.2"})
    assert status == 400 and "tokenmill pull" in body["error"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/push"),
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("DELETE", "/api/delete"),
        ("POST", "/api/blobs/sha256:00"),
    ],
)
def test_models_are_not_managed_over_http(served: Served, method: str, path: str) -> None:
    status, body = ask(served, path, {"model": "toy"}, method=method)
    assert status == 400 and list(body) == ["error"] and body["error"].endswith(".")


def test_errors_have_ollamas_shape_wherever_they_arise(served: Served) -> None:
    for path, body, status in (("/api/nothing", None, 404), ("/api/show", {}, 400), ("/api/version", {}, 405)):
        found, answer = ask(served, path, body)
        assert found == status and list(answer) == ["error"] and isinstance(answer["error"], str)

"""Errors in the shape of the API that was asked for, also where no endpoint is reached."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from typing import Any

import pytest

from scripted import Served
from tokenmill.api.errors import Fault, anthropic_style, ollama_style, openai_style, style_of
from tokenmill.server.http import nearest_path

VERSION = {"anthropic-version": "2023-06-01"}


def ask(
    served: Served, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> tuple[int, Mapping[str, str], dict[str, Any]]:
    connection = http.client.HTTPConnection(*served.address, timeout=20)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
        response = connection.getresponse()
        return response.status, response.headers, json.loads(response.read())
    finally:
        connection.close()


def is_anthropic(body: dict[str, Any]) -> bool:
    return body["type"] == "error" and set(body["error"]) == {"type", "message"} and "request_id" in body


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"),
        (404, "not_found_error"), (405, "invalid_request_error"), (408, "timeout_error"), (413, "request_too_large"),
        (429, "rate_limit_error"), (500, "api_error"), (503, "overloaded_error"), (505, "api_error"),
    ],
)  # fmt: skip
def test_anthropics_words_for_a_status(status: int, kind: str) -> None:
    told = anthropic_style(Fault(status, "A field is wrong.", "x", "field", request_id="req_1"))
    assert told == {
        "type": "error", "error": {"type": kind, "message": "A field is wrong."}, "request_id": "req_1"
    }  # fmt: skip


def test_a_shape_without_a_place_for_it_names_the_field_in_its_message() -> None:
    """Once: most messages begin with it."""
    bare, named = Fault(400, "It is too long.", "x", "stop[1]"), Fault(400, "stop is too long.", "x", "stop[1]")
    assert anthropic_style(bare)["error"]["message"] == ollama_style(bare)["error"] == "stop[1]: It is too long."
    assert anthropic_style(named)["error"]["message"] == ollama_style(named)["error"] == "stop is too long."
    assert ollama_style(Fault(500, "Sorry.", "x")) == {"error": "Sorry."}


def test_the_path_decides_whose_shape_an_error_has() -> None:
    assert style_of("/v1/messages") is style_of("/v1/messages/count_tokens") is anthropic_style
    assert style_of("/v1/chat/completions") is style_of("/nowhere") is style_of("") is openai_style


def test_every_refusal_has_the_shape_of_its_api() -> None:
    """No or a wrong key, no such path or method, a body too large, ...: by path, or by Anthropic's header."""
    with Served(api_keys=("one", "two"), max_body_bytes=2000) as served:
        key = {"x-api-key": "two"}
        refusals = [
            (401, "POST", {}, None),
            (401, "POST", {"x-api-key": "three"}, None),
            (403, "POST", key | {"host": "evil.com"}, None),
            (405, "PUT", key, None),
            (413, "POST", key, b"x" * 3000),
        ]
        for status, method, headers, body in refusals:
            got = ask(served, method, "/v1/messages", body, headers)
            assert got[0] == status and is_anthropic(got[2]), got
            assert got[2]["request_id"] == got[1]["request-id"] and got[1]["request-id"].startswith("req_")
            got = ask(served, method, "/v1/chat/completions", body, headers)
            assert got[0] == status and set(got[2]["error"]) == {"message", "type", "param", "code"}, got
            assert "request-id" not in got[1] and got[1]["x-request-id"].startswith("req_")
        assert is_anthropic(ask(served, "GET", "/v1/messages/nothing", headers=key)[2])
        assert is_anthropic(ask(served, "GET", "/v1/nothing", headers=key | VERSION)[2])
        assert not is_anthropic({"type": "", **ask(served, "GET", "/v1/nothing", headers=key)[2]})


def test_a_wrong_path_or_method_is_told_what_is_right_in_the_shape_of_its_api() -> None:
    with Served() as served:

        def told(method: str, path: str) -> tuple[int, str, str | None]:
            status, headers, body = ask(served, method, path)
            error = body["error"]
            return status, error if isinstance(error, str) else error["message"], headers["allow"]

        wrong = ask(served, "POST", "/v1/chat/completion")
        assert wrong[0] == 404 and wrong[2]["error"] == {
            "message": "There is no path /v1/chat/completion; did you mean /v1/chat/completions?",
            "type": "invalid_request_error", "param": None, "code": "unknown_url",
        }  # fmt: skip
        assert told("GET", "/images") == (404, "There is no path /images; /docs lists all paths.", None)
        assert told("POST", "/api/chats") == (404, "There is no path /api/chats; did you mean /api/chat?", None)
        method = ask(served, "GET", "/v1/chat/completions")
        assert method[0] == 405 and method[1]["allow"] == "POST" and method[2]["error"] == {
            "message": "/v1/chat/completions takes POST, not GET.",
            "type": "invalid_request_error", "param": None, "code": "method_not_supported",
        }  # fmt: skip
        assert told("PUT", "/v1/responses/resp_1")[::2] == (405, "DELETE, GET, HEAD")  # of two routes
        assert len(told("GET", "/v1/" + "x" * 5000)[1]) < 300
        assert told("GET", "/admin/requests/none")[1].startswith("No such request is open")


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat", "/v1/chat/completions"),  # it begins only one
        ("/v1/models/", "/v1/models"),
        ("/v1/file/file-1/contents", "/v1/files/file-1/content"),
        ("/v1/images/generations", ""),  # not /v1/files/generations, though most letters are the same
        ("/v1", ""),
        ("/", ""),
        ("/v1/files/" + "x" * 300, ""),
    ],
)
def test_the_path_nearest_to_a_wrong_one(path: str, nearest: str) -> None:
    known = ["/v1/chat/completions", "/v1/models", "/v1/files/{file_id}", "/v1/files/{file_id}/content", "/v1/score"]
    assert nearest_path(path, known) == nearest


def test_a_key_is_taken_from_either_header() -> None:
    """One good key is enough; a good key of the wrong kind of authorization is none."""
    with Served(api_keys=("one", "two")) as served:

        def status(**headers: str) -> int:
            return ask(served, "GET", "/v1/models", headers={k.replace("_", "-"): v for k, v in headers.items()})[0]

        assert status(authorization="Bearer one") == status(x_api_key="two") == status(x_api_key=" one ") == 200
        assert status(authorization="Bearer placeholder", x_api_key="two") == 200
        assert status(authorization="Bearer one", x_api_key="placeholder") == 200
        assert (
            status() == status(x_api_key="") == status(authorization="Basic one") == status(x_api_key="one two") == 401
        )
        assert status(authorization="Bearer ", x_api_key="on") == 401


def test_the_callers_own_name_of_a_request_is_what_it_is_told() -> None:
    with Served() as served:
        _, headers, body = ask(served, "GET", "/v1/messages", headers={"x-request-id": "mine"})
        assert headers["request-id"] == headers["x-request-id"] == body["request_id"] == "mine"


def test_what_the_connection_refuses_has_the_shape_of_the_path() -> None:
    """Headers beyond the limit, before any endpoint is chosen."""
    with Served() as served:
        for path, shaped in ((b"/v1/messages?beta=true", True), (b"/v1/completions", False)):
            with socket.create_connection(served.address, timeout=20) as client:
                client.sendall(b"POST " + path + b" HTTP/1.1\r\nHost: x\r\n" + b"a: %b\r\n\r\n" % (b"x" * 70_000))
                answer = client.recv(65536)
            assert b" 431 " in answer.splitlines()[0]
            body = json.loads(answer.partition(b"\r\n\r\n")[2])
            assert is_anthropic({"type": "", **body}) == shaped

"""Anthropic's message batches over HTTP: made, answered, cancelled, read, listed and forgotten, each owner's own."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripted import Served

PATH = "/v1/messages/batches"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "f")


@pytest.fixture
def served(folder: str) -> Iterator[Served]:
    with Served(lambda prompt: prompt.split("user\n")[-1].split("<")[0].upper(), files_dir=folder) as one:
        yield one


def request(number: int, **params: Any) -> dict[str, Any]:
    body = {"model": "toy", "max_tokens": 30, "messages": [{"role": "user", "content": f"word {number}"}]}
    return {"custom_id": f"call-{number}", "params": body | params}


def ask(served: Served, path: str = PATH, body: Any = None, method: str | None = None, key: str = "") -> Any:
    status, text, _ = served.ask(path, body, method, {"x-api-key": key} if key else None)
    told = json.loads(text)
    return told if status == 200 else (status, told["error"]["type"], told["error"]["message"])


def start(served: Served, requests: list[Any], **more: Any) -> Any:
    return ask(served, body={"requests": requests}, **more)


def ended(served: Served, batch: Any, **more: Any) -> Any:
    while (found := ask(served, f"{PATH}/{batch['id']}", **more))["processing_status"] != "ended":
        pass
    return found


def results(served: Served, batch: Any) -> dict[str, Any]:
    status, text, kind = served.ask(batch["results_url"])
    assert status == 200 and kind == "application/x-jsonl", text
    return {line["custom_id"]: line["result"] for line in map(json.loads, text.splitlines())}


def test_calls_are_answered_and_their_errors_are_theirs_alone(served: Served) -> None:
    """A call to an unknown model, or with a wrong field, fails by itself."""
    made = start(served, [request(1), request(2, model="other"), request(3, max_tokens=0.5), request(4, system="x")])
    assert (made["type"], made["processing_status"], made["request_counts"]["processing"]) == (
        "message_batch", "in_progress", 4,
    )  # fmt: skip
    assert made["results_url"] is made["ended_at"] is made["archived_at"] is made["cancel_initiated_at"] is None
    batch = ended(served, made)
    assert batch["request_counts"] == {"processing": 0, "succeeded": 2, "errored": 2, "canceled": 0, "expired": 0}
    found = results(served, batch)
    assert found["call-1"]["type"] == "succeeded" and found["call-1"]["message"]["content"][0]["text"] == "WORD 1"
    assert found["call-4"]["message"]["usage"]["output_tokens"] > 0
    errors = {name: found[name]["error"]["error"]["type"] for name in ("call-2", "call-3")}
    assert errors == {"call-2": "not_found_error", "call-3": "invalid_request_error"}


def test_what_is_cancelled_is_told_of_each_call(served: Served) -> None:
    served.call(served.script.go.clear)
    made = start(served, [request(number) for number in range(40)])
    served.wait_until(lambda: served.client.num_open > 0)
    assert served.ask(f"{PATH}/{made['id']}/results")[0] == 400
    assert ask(served, f"{PATH}/{made['id']}", method="DELETE")[0] == 400
    assert ask(served, f"{PATH}/{made['id']}/cancel", method="POST")["processing_status"] == "canceling"
    batch = ended(served, made)
    served.call(served.script.go.set)
    assert batch["request_counts"]["canceled"] == 40 and batch["cancel_initiated_at"] is not None
    assert {each["type"] for each in results(served, batch).values()} == {"canceled"}
    assert ask(served, f"{PATH}/{made['id']}/cancel", method="POST")[0] == 400


def test_batches_are_listed_in_pages_and_forgotten_with_their_files(served: Served, folder: str) -> None:
    made = [start(served, [request(number)])["id"] for number in range(3)]
    for identifier in made:
        ended(served, {"id": identifier})
    page = ask(served, f"{PATH}?limit=2")
    assert ([each["id"] for each in page["data"]], page["has_more"]) == (made[:0:-1], True)
    page = ask(served, f"{PATH}?limit=2&after_id={page['last_id']}")
    assert ([each["id"] for each in page["data"]], page["has_more"]) == (made[:1], False)
    page = ask(served, f"{PATH}?limit=1&before_id={made[0]}")
    assert ([each["id"] for each in page["data"]], page["has_more"]) == (made[1:2], True)
    assert ask(served, "/v1/batches")["data"] == ask(served, "/v1/files")["data"] == []
    assert ask(served, f"/v1/batches/{made[0]}")[0] == 404
    for identifier in made:
        assert ask(served, f"{PATH}/{identifier}", method="DELETE")["type"] == "message_batch_deleted"
        assert ask(served, f"{PATH}/{identifier}")[:2] == (404, "not_found_error")
    assert not list((Path(folder) / "contents").iterdir())
    for query in ("limit=0", "limit=x", "after_id=none", "before_id=a&after_id=b"):
        assert ask(served, f"{PATH}?{query}")[:2] == (400, "invalid_request_error")


def test_a_batch_goes_on_in_the_next_server(folder: str) -> None:
    with Served(lambda prompt: "one", files_dir=folder) as served:
        served.call(served.script.go.clear)
        made = start(served, [request(number) for number in range(5)])
        served.wait_until(lambda: served.client.num_open > 0)
    with Served(lambda prompt: "two", files_dir=folder) as served:
        batch = ended(served, made)
        assert batch["request_counts"]["succeeded"] == 5 and len(results(served, batch)) == 5


def test_a_key_sees_its_own_batches_alone(folder: str) -> None:
    with Served(lambda prompt: "hi", files_dir=folder, api_keys=("one", "two")) as served:
        batch = ended(served, start(served, [request(1)], key="one"), key="one")
        for path, method in (("", "GET"), ("", "DELETE"), ("/results", "GET"), ("/cancel", "POST")):
            assert ask(served, f"{PATH}/{batch['id']}{path}", method=method, key="two")[0] == 404
        assert ask(served, key="two")["data"] == [] and len(ask(served, key="one")["data"]) == 1


@pytest.mark.parametrize(
    "body",
    [
        {}, {"requests": []}, {"requests": [{"custom_id": "a"}]}, {"requests": [request(1), request(1)]},
        {"requests": [request(1) | {"custom_id": "a b"}]}, {"requests": [request(1, stream=True)]},
        {"requests": [request(1, model=3)]}, {"requests": [request(1)], "odd": 1},
        {"requests": [{"custom_id": "a", "params": []}]},
    ],
)  # fmt: skip
def test_what_is_no_batch_is_refused_at_once(served: Served, body: Any) -> None:
    assert ask(served, body=body)[:2] == (400, "invalid_request_error")
    assert ask(served)["data"] == []


def test_without_a_folder_it_says_so() -> None:
    with Served(lambda prompt: "hi") as served:
        assert "--files-dir" in start(served, [request(1)])[2]


def test_results_are_streamed_to_whoever_leaves(served: Served) -> None:
    """A client that reads the first lines and leaves does no harm."""
    batch = ended(served, start(served, [request(number) for number in range(20)]))
    with contextlib.closing(urllib.request.urlopen(served.url + batch["results_url"], timeout=20)) as answer:
        answer.readline()
    assert len(results(served, batch)) == 20

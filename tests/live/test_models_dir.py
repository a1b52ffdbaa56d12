"""Models of a folder, loaded when calls name them: three models with room for two."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kill import write_model
from serving import Server, wait_until

from browser import Browser
from tokenmill.cli.main import main

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, outside = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("outside")
    write_model(outside)
    for name in NAMES:
        shutil.copytree(outside, folder / name, ignore=shutil.ignore_patterns("lora"))
    (folder / "damaged.gguf").write_bytes(b"GGUF" + bytes(100))
    (folder / "linked").symlink_to(outside)
    shutil.copytree(folder / "a", folder / "leads-out")
    (folder / "leads-out" / "model.safetensors").unlink()
    (folder / "leads-out" / "model.safetensors").symlink_to(outside / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("chat") / "template.jinja"
    template.write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    how = ("--kv-cache-memory-bytes", "16MiB", "--max-num-seqs", "4", "--chat-template", str(template))
    with Server("--models-dir", str(folder), "--models-max", "2", *how, model="") as server:
        yield server


def ask(server: Server, name: str | None, **more: Any) -> tuple[int, Any]:
    body = {"model": name, "prompt": "abc", "max_tokens": 8, "seed": 3, "ignore_eos": True} | more
    status, text = server.request("POST", "/v1/completions", body)
    return status, json.loads(text)


def post(server: Server, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    status, text = server.request("POST", path, body)
    return status, json.loads(text)


def states(server: Server) -> dict[str, str]:
    cards = json.loads(server.request("GET", "/v1/models")[1])["data"]
    return {card["id"]: card["status"]["value"] for card in cards}


def loads(server: Server) -> dict[str, int]:
    found = re.findall(
        r'model_loads_total\{model_name="(\w+)",outcome="loaded"\} (\d+)', server.request("GET", "/metrics")[1]
    )
    return {name: int(number) for name, number in found}


def engines(server: Server) -> set[int]:
    found = set()
    for pid in server.pids():
        with contextlib.suppress(OSError):  # it has gone meanwhile
            if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def test_calls_one_after_another_load_what_they_name(server: Server) -> None:
    """Of three models in turn with room for two each call loads one; answers are those of equal weights."""
    assert states(server) == {name: "unloaded" for name in (*NAMES, "damaged")}
    assert server.request("GET", "/health")[0] == 200
    said = []
    for number in range(4):
        status, told = ask(server, NAMES[number % 3])
        assert status == 200 and told["model"] == NAMES[number % 3], told
        said.append(told["choices"])
    assert all(each == said[0] for each in said) and loads(server) == {"a": 2, "b": 1, "c": 1}
    assert states(server) | {"damaged": ""} == {"a": "loaded", "b": "unloaded", "c": "loaded", "damaged": ""}
    assert ask(server, None)[1]["model"] == "a", "the first answers for who names none"


def test_what_calls_wait_for_is_measured(server: Server, tmp_path: Path) -> None:
    """Models are found by themselves; with room for two of three, every call waits for a load."""
    before, out = sum(loads(server).values()), tmp_path / "waits.json"
    how = ("--num-calls", "4", "--max-tokens", "4", "--json", str(out))
    assert main(["bench", "on-demand", "--url", server.url, *how]) == 0
    calls = json.loads(out.read_text())["calls"]
    assert [call["model"] for call in calls] == ["a", "b", "c", "a"]
    assert sum(call["num_loads"] for call in calls) == sum(loads(server).values()) - before
    assert all(call["load_s"] > 0 for call in calls[1:]) and not any(call["error"] for call in calls)


def test_eight_callers_at_once_all_come_to_their_end(server: Server) -> None:
    before = sum(loads(server).values())
    with ThreadPoolExecutor(8) as pool:
        turns = pool.map(lambda caller: [ask(server, NAMES[(caller + turn) % 3]) for turn in range(2)], range(8))
        answers = [answer for turn in turns for answer in turn]
    assert [status for status, _ in answers] == [200] * 16
    assert len({json.dumps(told["choices"]) for _, told in answers}) == 1
    assert sum(loads(server).values()) - before < 16, "calls that wait for one model share its load"


def test_a_killed_engine_loses_nothing(server: Server) -> None:
    """Neither a call that is under way, nor one that waits for the model to be loaded."""
    whole, before = ask(server, "b", max_tokens=600), engines(server)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(ask, server, "b", max_tokens=600)
        shown = "/admin/requests?model=b"
        wait_until(lambda: len(json.loads(server.request("GET", shown)[1])["data"]) > 0, "the call's begin")
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        assert call.result()[0] == 200 and call.result()[1]["choices"] == whole[1]["choices"]
        (unloaded,) = (name for name in NAMES if states(server)[name] == "unloaded")
        before = engines(server)
        call = pool.submit(ask, server, unloaded)
        wait_until(lambda: bool(engines(server) - before), "the load's begin")
        for pid in engines(server) - before:
            os.kill(pid, signal.SIGKILL)
        assert call.result()[0] == 200


def test_a_model_that_is_not_loaded_has_nothing_to_show(server: Server) -> None:
    """But for the first, which answers as the server's own, loaded or not."""
    ask(server, "b")
    for name, state in list(states(server).items())[1:]:
        for path in ("/props", "/slots"):
            status, text = server.request("GET", f"{path}?model={name}")
            assert status == (200 if state == "loaded" else 503), (path, name, state, text)
            assert path == "/slots" or state != "loaded" or json.loads(text)["model_path"] == name


def test_only_what_lies_in_the_folder_is_loaded_and_by_name_alone(server: Server, folder: Path) -> None:
    for name in ("linked", "leads-out", "../outside0", str(folder / "a"), "./a", "a/", "smollm2", "org/name"):
        status, told = ask(server, name)
        assert status == 404 and "does not exist here" in told["error"]["message"], (name, told)
    assert "leads out of" in server.output


def test_a_damaged_model_tells_why_and_blocks_nobody(server: Server, folder: Path) -> None:
    before = states(server)
    for _ in range(2):
        status, told = ask(server, "damaged")
        assert status == 500 and "damaged" in told["error"]["message"], told
        assert str(folder) not in told["error"]["message"], "where it lies is the operator's"
    assert states(server) == before, "no other makes room for it"
    assert ask(server, "a")[0] == 200
    card = json.loads(server.request("GET", "/v1/models/damaged")[1])
    assert card["status"]["value"] == "unloaded" and card["status"]["failed"]


def test_operators_load_and_unload(server: Server) -> None:
    for name in NAMES:
        assert post(server, "/models/load", {"model": name}) == (200, {"success": True})
    assert states(server)["b"] == states(server)["c"] == "loaded"
    assert post(server, "/models/unload", {"model": "c"}) == (200, {"success": True})
    assert states(server)["c"] == "unloaded"
    status, told = post(server, "/models/unload", {"model": "c"})
    assert status == 400 and "not loaded" in told["error"]["message"]
    assert post(server, "/models/load", {"model": "none"})[0] == 404
    assert post(server, "/models/load", {"model": "damaged"})[0] == 400


def test_a_response_in_the_background_is_found_whichever_model_answers_it(server: Server) -> None:
    """Its events are read again, and it is cancelled at once: neither has the first model loaded for it."""
    body = {"model": "b", "input": "abc", "background": True, "stream": True, "max_output_tokens": 900}
    _, begun = server.request("POST", "/v1/responses", body | {"max_output_tokens": 2, "ignore_eos": True})
    assert '"type":"response.incomplete"' in begun
    before = loads(server)
    status, made = post(server, "/v1/responses", body | {"stream": False, "ignore_eos": True})
    assert status == 200 and made["status"] == "queued", made
    named = f"/v1/responses/{made['id']}"
    status, told = post(server, f"{named}/cancel", {})
    assert (status, told["status"]) == (200, "cancelled")
    assert json.loads(server.request("GET", named)[1])["status"] == "cancelled"
    messages = [{"role": "user", "content": "abc"}]
    batch = {"requests": [{"custom_id": "x", "params": {"model": "b", "max_tokens": 1, "messages": messages}}]}
    assert post(server, "/v1/messages/batches", batch)[0] == 200
    assert loads(server) == before


def test_operators_load_and_unload_in_the_console(server: Server, browser: Browser) -> None:
    """By keyboard too: the focus stays where it was. Why a model cannot be loaded is told."""
    if states(server)["c"] == "loaded":
        post(server, "/models/unload", {"model": "c"})
    with browser.page(f"{server.url}/console/#/models") as page:
        page.wait("[...document.querySelectorAll('button')].find(each => each.ariaLabel == 'Load c')")
        page.click("Load c")
        page.wait("document.activeElement.ariaLabel == 'Unload c'")
        assert states(server)["c"] == "loaded"
        page.press("Enter")
        page.wait("document.activeElement.ariaLabel == 'Load c'")
        assert states(server)["c"] != "loaded"
        page.click("Load damaged")
        page.wait("document.querySelector('.toast')?.innerText.includes('damaged')")
        assert not page.complaints


def test_ollamas_clients_keep_and_unload(server: Server) -> None:
    """keep_alive is true, also where it is all that a call asks for."""
    status, told = post(server, "/api/generate", {"model": "a", "stream": False})
    assert status == 200 and told["done_reason"] == "load" and states(server)["a"] == "loaded"
    status, told = post(server, "/api/generate", {"model": "a", "keep_alive": 0})
    assert status == 200 and told["done_reason"] == "unload"
    wait_until(lambda: states(server)["a"] == "sleeping", "the unload")
    before = loads(server)
    assert post(server, "/api/chat", {"model": "a:latest", "keep_alive": 0})[1]["done_reason"] == "unload"
    assert loads(server) == before, "what is not loaded is not loaded to be unloaded"
    status, told = post(server, "/api/generate", {"model": "a", "prompt": "x", "keep_alive": "soon"})
    assert status == 400 and "keep_alive" in told["error"]


def test_ollamas_lists_are_true(server: Server) -> None:
    """All that a call may name, what of it is in memory, and what a model is like: none of it loads anything."""
    post(server, "/models/load", {"model": "b"})
    before, shown = loads(server), states(server)
    tags, running = (json.loads(server.request("GET", path)[1])["models"] for path in ("/api/tags", "/api/ps"))
    assert {each["name"] for each in tags} == {f"{name}:latest" for name in shown}
    sizes = {each["name"]: each["size"] for each in tags}
    assert sizes["a:latest"] > 100_000 and tags[0]["details"]["family"] == "qwen2"
    assert {each["name"] for each in running} == {f"{name}:latest" for name in NAMES if shown[name] == "loaded"}
    assert all(each["size"] > 0 and each["expires_at"].startswith("9999") for each in running)
    unloaded = next(name for name in NAMES if shown[name] != "loaded")
    told = post(server, "/api/show", {"model": f"{unloaded}:latest"})[1]
    assert told["details"]["family"] == "qwen2" and "completion" in told["capabilities"]
    assert post(server, "/api/show", {"model": "none"})[0] == 404
    assert loads(server) == before
    asked = post(server, "/api/generate", {"model": "b", "prompt": "x", "stream": False, "keep_alive": "1h"})
    (kept,) = (each for each in json.loads(server.request("GET", "/api/ps")[1])["models"] if each["name"] == "b:latest")
    assert asked[0] == 200 and not kept["expires_at"].startswith("9999")


def test_a_model_that_is_put_there_is_there(server: Server, folder: Path) -> None:
    shutil.copytree(folder / "a", folder / "later")
    wait_until(lambda: "later" in states(server), "the new model")
    assert ask(server, "later")[0] == 200

"""The command keeps responses: over kill -9 and a new start, in the file that it was told, or not at all."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
from serving import Server

pytestmark = pytest.mark.usefixtures("smollm2")


def create(server: Server, **body: Any) -> dict[str, Any]:
    status, text = server.request("POST", "/v1/responses", {"max_output_tokens": 8, "temperature": 0} | body)
    assert status == 200, text
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_conversation_goes_on_after_kill_9(tmp_path: Path) -> None:
    """With the same words as one that was never interrupted."""
    store = tmp_path / "kept" / "responses.db"
    with Server("--responses-store", str(store)) as server:
        first = create(server, input="Name a color.")
        expected = create(server, input="And another?", previous_response_id=first["id"])
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
    assert {stat.S_IMODE(path.stat().st_mode) for path in store.parent.iterdir()} == {0o600}
    with Server("--responses-store", str(store)) as server:
        second = create(server, input="And another?", previous_response_id=first["id"])
        assert second["output"][0]["content"] == expected["output"][0]["content"]
        assert json.loads(server.request("GET", f"/v1/responses/{expected['id']}")[1]) == expected


def test_no_view_of_the_server_tells_the_id_of_a_response() -> None:
    """Without keys, all who reach the server see its views, and whoever knows the id of a response may read it."""
    with Server() as server:
        found = create(server, input="Name a color.")
        shown = "".join(server.request("GET", path)[1] for path in ("/admin/requests", "/admin/flight"))
        (call,) = {each["call"] for each in json.loads(server.request("GET", "/admin/requests")[1])["data"]}
        shown += server.request("GET", f"/admin/requests/{call}")[1]
        assert call in shown and found["id"].removeprefix("resp_") not in shown
        assert server.request("GET", f"/v1/responses/{call.replace('-', '_', 1)}")[0] == 404


def test_a_server_may_keep_nothing(tmp_path: Path) -> None:
    """Each thing that is kept can be turned off, and what is off leaves no folder behind."""
    kept = ("responses-store", "files-dir", "tenants", "usage-dir", "idempotency-store", "flight-recorder")
    args = [word for name in kept for word in (f"--{name}", "off")]
    with Server(*args, env={"TOKENMILL_STATE": str(tmp_path / "state")}) as server:
        first = create(server, input="Name a color.")
        status, text = server.request("POST", "/v1/responses", {"input": "x", "previous_response_id": first["id"]})
        assert (status, json.loads(text)["error"]["param"]) == (400, "previous_response_id")
    left = [path.name for path in (tmp_path / "state").iterdir()]
    assert left == ["servers"], "by which run, ps and stop find servers: no text of anybody"


def test_a_file_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database " * 100)
    with (
        pytest.raises(AssertionError, match="--responses-store"),
        Server("--responses-store", str(tmp_path / "text" / "x.db")),
    ):
        pass

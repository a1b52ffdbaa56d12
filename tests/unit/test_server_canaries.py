"""Canaries over HTTP: sessions keep their version, what came of calls is judged, a bad version is taken back."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import time
import urllib.parse
from dataclasses import replace
from typing import Any, cast
from unittest.mock import AsyncMock

import openai
import pytest
from test_upstream import CHAT, samples

from hostile_upstream import Hostile, reply
from scripted import READY, Served
from tokenmill.cli.hosting import Hosting
from tokenmill.cli.upstream_options import UpstreamOptions, _canary
from tokenmill.cluster.canary import Version
from tokenmill.control.models.canaries import Canaries
from tokenmill.control.models.registry import ModelRegistry
from tokenmill.control.models.served import LOCAL, ServedModel
from tokenmill.core.errors import BadCheckpoint, ConfigError, InvalidRequest, NotFound
from tokenmill.core.events import Ready
from tokenmill.core.slo import Targets
from tokenmill.net.system import MonotonicClock
from tokenmill.server.adapters import ServedAdapter
from tokenmill.server.upstream.connection import UpstreamAddress
from tokenmill.server.upstream.upstream import Upstream

NAMED = {"name": "chat", "versions": [{"model": "toy", "weight": 50}, {"model": "far", "weight": 50}]}


def fronting(url: str, **given: Any) -> Served:
    return Served(upstreams=[Upstream("far", UpstreamAddress.of(url), MonotonicClock())], **given)


def ask(front: Served, user: int, **more: Any) -> tuple[int, str]:
    status, text, _ = front.ask("/v1/chat/completions", CHAT | {"model": "chat", "user": f"u{user}"} | more)
    return status, text


def post(front: Served, body: dict[str, Any]) -> tuple[int, str | None]:
    """The status of a chat, and when to come back."""
    address = urllib.parse.urlsplit(front.url)
    with contextlib.closing(http.client.HTTPConnection(address.hostname or "", address.port)) as connection:
        path, headers = "/v1/chat/completions", {"content-type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["retry-after"]


def shown(front: Served) -> dict[str, Any]:
    (canary,) = json.loads(front.ask("/admin/canaries")[1])["data"]
    return {version["model"]: version for version in canary["versions"]}


def test_what_is_still_loading_is_503_and_what_is_not_here_404() -> None:
    """Models, canaries and adapters that the flags name; each serves once it is there."""
    with (
        Served(lambda prompt: "from afar", model_names=("far",), allowed_hosts=("127.0.0.1",)) as far,
        fronting(far.url) as front,
    ):
        front.client.adapters._wanted.append(ServedAdapter("adapter", "somewhere"))
        front.app.state.models.expect(cast(Any, None), {"chat", "soon", "toy"})
        for name, wanted in (("chat", 503), ("soon", 503), ("adapter", 503), ("never", 404), ("toy", 200)):
            status, told = post(front, CHAT | {"model": name})
            assert (status, told) == (wanted, "1" if wanted == 503 else None), name
        assert front.ask("/admin/canaries", NAMED)[0] == 201
        assert ask(front, 1)[0] == 200


def test_a_name_deals_its_sessions_to_versions() -> None:
    """The same user gets the same version each time, and answers say which."""
    with (
        Served(lambda prompt: "from afar", model_names=("far",), allowed_hosts=("127.0.0.1",)) as far,
        fronting(far.url) as front,
    ):
        assert front.ask("/admin/canaries", NAMED)[0] == 201
        client = openai.OpenAI(base_url=front.url + "/v1", api_key="x", max_retries=0)
        assert [model.id for model in client.models.list()] == ["toy", "far", "chat"]
        call = client.chat.completions.with_raw_response.create
        chosen: dict[str, set[str]] = {}
        for _ in range(2):
            for user in map(str, range(16)):
                answer = call(model="chat", messages=[{"role": "user", "content": "hi"}], user=user)
                version = answer.headers["x-tokenmill-version"]
                text = answer.parse().choices[0].message.content
                assert text == {"toy": "hello world", "far": "from afar"}[version]
                chosen.setdefault(user, set()).add(version)
        assert all(len(versions) == 1 for versions in chosen.values())
        assert {version for versions in chosen.values() for version in versions} == {"toy", "far"}
        parts = client.chat.completions.create(
            model="chat", messages=[{"role": "user", "content": "hi"}], stream=True, user="0"
        )
        assert "".join(part.choices[0].delta.content or "" for part in parts) in ("hello world", "from afar")
        while sum(version["num_calls"] for version in shown(front).values()) < 33:
            time.sleep(0.01)  # a stream is counted a moment after its last part
        assert not any(version["num_errors"] for version in shown(front).values())
        assert front.ask("/admin/canaries/chat", method="DELETE")[0] == 200
        assert ask(front, 0)[0] == 404


@pytest.mark.parametrize("streams", [False, True])
def test_a_failing_version_is_taken_back_and_sessions_move(streams: bool) -> None:
    """Its first calls fail, with the reason; then everybody gets the stable version, and /admin/canaries says why."""
    with Hostile(reply(b"{}", status="500 No")) as far, fronting(far.url) as front:
        front.ask("/admin/canaries", NAMED)
        statuses = [ask(front, user, stream=streams)[0] for user in range(60)]
        assert 5 <= len([status for status in statuses if status != 200]) < 20 and statuses[-20:] == [200] * 20
        version = shown(front)["far"]
        assert (version["state"], version["weight"]) == ("rolled_back", 0)
        assert "100.0% errors, against 0.0%" in version["why"]
        assert list(samples(front, "tokenmill:canary_rollbacks_total").values()) == [1.0]
        assert samples(front, "tokenmill:canary_weight")['model_name="chat",version="far"'] == 0.0


def test_a_slow_version_is_taken_back() -> None:
    """A version whose streams come three times as slowly is found by its times, without a single error."""
    with (
        Served(
            lambda prompt: "a b c d e f g h", step_s=0.012, model_names=("far",), allowed_hosts=("127.0.0.1",)
        ) as far,
        Served(lambda prompt: "a b c d e f g h", step_s=0.004, upstreams=[up(far)]) as front,
    ):
        front.ask("/admin/canaries", NAMED)
        for user in range(200):
            assert ask(front, user, stream=True)[0] == 200
            if shown(front)["far"]["state"] == "rolled_back":
                break
        version = shown(front)["far"]
        assert version["state"] == "rolled_back" and version["num_errors"] == 0
        assert "later than" in version["why"] or "slower than" in version["why"]


def up(far: Served) -> Upstream:
    return Upstream("far", UpstreamAddress.of(far.url), MonotonicClock())


def test_what_clients_do_wrong_is_no_evidence() -> None:
    """400s are the client's, for either version."""
    with Hostile(reply(b'{"error": {"message": "no"}}', status="400 No")) as far, fronting(far.url) as front:
        front.ask("/admin/canaries", NAMED)
        assert {ask(front, user, messages=[])[0] for user in range(20)} == {400}
        assert all(version["num_calls"] == 0 for version in shown(front).values())


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"name": "toy"}, "already"),
        ({"versions": [{"model": "toy", "weight": 1}]}, "2 to 8"),
        ({"versions": [{"model": "toy", "weight": 1}, {"model": "none", "weight": 1}]}, "no model 'none'"),
        ({"versions": [{"model": "toy", "weight": 0}, {"model": "far", "weight": 1}]}, "Weights"),
        ({"versions": [{"model": "toy", "weight": 1}, {"model": "far", "weight": -1}]}, "Weights"),
        ({"versions": [{"model": "toy", "weight": 1}, {"model": "far"}]}, "weight"),
        ({"versions": ["toy", "far"]}, "objects"),
        ({"alpha": 0}, "alpha"),
        ({"ttft_ms": -1}, "ttft_ms"),
        ({"temperature": 1}, "not known"),
    ],
)
def test_what_cannot_be_a_canary_is_refused(body: dict[str, Any], why: str) -> None:
    with fronting("http://127.0.0.1:1") as front:
        status, text, _ = front.ask("/admin/canaries", NAMED | body)
        assert status == 400 and why in text
        assert json.loads(front.ask("/admin/canaries")[1])["data"] == []


class Loaded:
    """A ServedModel with a call that does not end."""

    name, kind, num_open, memory_bytes = "two", LOCAL, 1, 100

    def __init__(self) -> None:
        self.was_ended: list[str] = []

    def end_calls(self) -> None:
        self.was_ended.append("calls")

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.was_ended.append("model")


def test_a_model_that_is_unloaded_ends_whoever_waits_for_that() -> None:
    """Its memory counts until it has gone, and it goes also where the operator's call is cut off."""

    async def main() -> None:
        models, model = ModelRegistry(("toy",)), Loaded()
        models.add(cast(ServedModel, model))
        going = asyncio.create_task(models.unload("two", 1000.0))
        await asyncio.sleep(0)
        assert models.find("two") is None and [each.memory_bytes for each in models.local()] == [100]
        assert models.num_open == 1
        going.cancel()
        await asyncio.gather(going, models.close(), return_exceptions=True)  # the server may end at the same time
        assert model.was_ended == ["calls", "model"] and not models.local()

    asyncio.run(main())


def test_a_model_whose_name_was_given_away_while_it_was_loaded_is_ended() -> None:
    async def main() -> None:
        models, model = ModelRegistry(("toy",)), Loaded()

        class Loading(Hosting):
            async def _load(self, *_: Any) -> Any:
                models.aliases["two"] = ("toy",)
                return model

        none = cast(Any, None)
        given = dict.fromkeys(("machine", "new_client", "build", "own"), none)
        hosting = Loading(none, none, none, engine_timeout_s=0.0, models=models, **given)
        with pytest.raises(InvalidRequest, match="already"):
            await hosting.load("two", "path", None)
        assert model.was_ended == ["model"] and not models.models

    asyncio.run(main())


def test_what_an_earlier_process_had_loaded_is_kept_until_it_is_unloaded() -> None:
    """Whether it is there, is still expected, is being loaded or could not be loaded; what flags name is theirs."""
    what = {"model": "path", "kv_cache_memory_bytes": None}

    async def main() -> None:
        models, model, loads = ModelRegistry(("toy",)), Loaded(), asyncio.Event()
        models.keep = keep = AsyncMock()
        models.kept = dict.fromkeys(("broken", "two", "later", "flag", "toy"), what)
        tried: list[str] = []

        class Loading(Hosting):
            async def _load(self, name: str, *_: Any) -> Any:
                tried.append(name)
                if name == "broken":
                    raise BadCheckpoint("no such folder")
                await loads.wait()
                return model

        none = cast(Any, None)
        given = dict.fromkeys(("machine", "new_client", "build", "own"), none)
        hosting = Loading(none, none, none, engine_timeout_s=0.0, models=models, **given)
        models.expect(hosting, {"flag"})
        loading = asyncio.create_task(hosting.load_all(()))
        await asyncio.sleep(0)
        for name in ("broken", "two", "later"):
            assert await models.unload(name, 0.0) == 0
            keep.assert_awaited_with(name, None)
            with pytest.raises(NotFound):
                await models.unload(name, 0.0)
        assert models.expected == {"flag"}
        loads.set()
        await loading
        assert tried == ["broken", "two"] and not models.models and model.was_ended == ["model"]

        models.add(cast(ServedModel, model))
        going = asyncio.create_task(models.unload("two", 1000.0))
        keep.reset_mock()
        await asyncio.sleep(0)
        keep.assert_awaited_once_with("two", None)  # its calls have not ended yet
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)

    asyncio.run(main())


def test_what_the_servers_own_engines_may_take_is_left_to_them() -> None:
    """What they say once, for all of them together; a model that is loaded before they are there waits for that."""

    async def main() -> None:
        own: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        seen: list[int] = []

        class Loading(Hosting):
            async def _load(self, *_: Any) -> Any:
                seen.append(await self._taken_bytes())
                return Loaded()

        none = cast(Any, None)
        given = dict.fromkeys(("machine", "new_client", "build"), none)
        hosting = Loading(none, none, none, engine_timeout_s=0.0, models=ModelRegistry(("toy",)), own=own, **given)
        loading = asyncio.create_task(hosting.load("two", "path", None))
        await asyncio.sleep(0)
        assert not seen
        own.set_result(replace(READY, memory=(("weights", 30), ("KV of 2 workers", 12))))
        await loading
        assert seen == [42]

    asyncio.run(main())


def test_missed_targets_are_evidence() -> None:
    """Those of the canary, else those of the server."""
    for targets, usual in ((Targets(0.1, 0.0), Targets()), (Targets(), Targets(0.1, 0.0))):
        models = ModelRegistry(("a", "b"))
        canaries = Canaries(models, None, lambda usual=usual: usual)  # type: ignore[misc]
        canary = canaries.put("n", [Version("a", 1), Version("b", 1)], targets=targets)
        for _ in range(40):
            canaries.note(canary, "a", False, 0.09, None)
            canaries.note(canary, "b", False, 0.0901 if canary.verdicts else 0.2, None)
        assert canary.verdicts["b"].sign in ("targets", "ttft") and canary.counts["b"][1] == 0
        assert canary.judges["b"].tests["targets"].canary.num_bad


def test_the_flag_says_versions_with_weights() -> None:
    assert _canary("n=95:a,5:b:c") == ("n", (Version("a", 95.0), Version("b:c", 5.0)))
    for text in ("n", "n=a,b", "n=1:", "=1:a", "n=inf:a,1:b", "n=-1:a", "n=x:a"):
        with pytest.raises(ValueError, match="NAME=WEIGHT:MODEL"):
            _canary(text)
    canaries = Canaries(ModelRegistry(("a",)), None, Targets)
    with pytest.raises(ConfigError, match="--canary n: There is no model 'b'"):
        UpstreamOptions(canary=(_canary("n=1:a,1:b"),)).put_canaries(canaries)
    with pytest.raises(InvalidRequest):
        canaries.put("a", [])

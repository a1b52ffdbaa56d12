"""What an operator sees of a request whose prompt and answer two engines compute: one trace, two lives, the reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from kill import ARGS, write_model
from serving import Server, wait_until
from test_traces import Receiver, values

from tokenmill.cli.top import Server as Watched
from tokenmill.cli.top import page

POOLS = ("--prefill-workers", "1", "--decode-workers", "1", "--disaggregation", "always")


def states(server: Server) -> list[str]:
    return [each["state"] for each in json.loads(server.request("GET", "/admin/workers")[1])["workers"]]


def test_a_request_is_followed_through_both_of_its_workers(tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": [5, 6, 7] * 40, "max_tokens": 40, "ignore_eos": True}
    model = write_model(tmp_path)
    with Receiver() as receiver:
        with Server(*ARGS, *POOLS, "--otlp-traces-endpoint", receiver.url, model=str(model)) as server:
            wait_until(lambda: states(server) == ["ready", "ready"], "both workers serve")
            assert server.request("POST", "/v1/completions", body)[0] == 200
            wait_until(server.idle, "the engine confirms the end")
            (shown,) = json.loads(server.request("GET", "/admin/requests")[1])["data"]
            decisions = json.loads(server.request("GET", "/admin/decisions")[1])["data"]
            text = server.request("GET", "/metrics/workers")[1]
            seen = page(server.url, Watched(server.url, "").read(), 200)
        first, second = shown["lives"]
        assert (first["ended_by"], second["ended_by"], second["why"]) == ("move", None, "split")
        assert first["engine"] != second["engine"] and shown["num_moves"] == 1 and shown["num_resumptions"] == 0
        moved = next(each for each in decisions if each["kind"] == "moved")
        assert (moved["worker"], moved["to"], moved["why"], moved["request"]) == ("w0", "w1", "split", shown["id"])
        assert moved["tokens"] == second["copied_tokens"]
        assert 'vllm:generation_tokens_total{model_name="tiny",pool="decode",worker="w1"} 39.0' in text
        assert 'vllm:generation_tokens_total{model_name="tiny",pool="prefill",worker="w0"} 1.0' in text
        assert f"moved w0 -> w1 (split), KV of {moved['tokens']} tokens" in seen
        (call,) = receiver.named("POST /v1/completions")
        (request,) = receiver.named("text_completion tiny")
        assert request.parent_span_id == call.span_id
        assert values(request.attributes)["tokenmill.num_moves"] == 1
        parts = [span for span in receiver.spans if span.parent_span_id == request.span_id]
        parts.sort(key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))
        names = [span.name for span in parts]
        assert [name for name in names if name != "decode"] == ["queue", "prefill", "move"] and names[-1] == "decode"
        assert values(parts[-1].attributes)["tokenmill.engine"] == second["engine"]
        (move,) = (span for span in parts if span.name == "move")
        event = next(each for each in move.events if each.name == "moved")
        assert values(event.attributes)["tokenmill.why"] == "split"

"""The console's pages of data, against the real API: load, requests, tenants, models, batches and reports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tenants import ask, models, serving
from test_console import give_key, opened

from browser import Browser, Page
from scripted import Served
from tokenmill.control.tenants.store import TenantStore
from tokenmill.control.usage.accounting import Accounting
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig

KEPT = "".join(
    json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions",
                "body": {"model": "toy", "messages": [{"role": "user", "content": f"word {number}"}]}}) + "\n"
    for number in range(3)
)  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("console")
    for name in ("files", "adapters", "reports"):
        (folder / name).mkdir()
    for name, report in REPORTS.items():
        (folder / "reports" / f"{name}.json").write_text(json.dumps(report))
    engine = EngineConfig(groups=full_groups(64), max_model_len=512)
    settings = {"files_dir": str(folder / "files"), "lora_dir": str(folder), "reports_dir": str(folder / "reports")}
    with Served(lambda prompt: "hello world", engine=engine, **settings) as running:
        yield running


def chat(served: Served, text: str, **more: Any) -> str:
    """The id of the call."""
    status, body, _ = served.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **more})
    assert status == 200, body
    identifier: str = json.loads(body)["id"]
    return identifier


def test_load_shows_what_the_api_tells(browser: Browser, served: Served) -> None:
    """Figures, charts that draw, and the prefix tree with what two prompts share."""
    same = "The same beginning of two prompts, long enough for blocks. "
    for end in ("One", "Two"):
        chat(served, same + end, slo={"ttft_ms": 30_000, "tpot_ms": 30_000})
    with opened(browser, served, "load") as page:
        page.wait_text("Prefix cache")
        tiles = (
            "Object.fromEntries([...document.querySelectorAll('.tile')].map(e => e.innerText.split('\\n').slice(0, 2)))"
        )
        page.wait(f"({tiles})['Running'] == '0'")
        assert page.run(tiles)["Met targets"] == "100.0 %"
        page.wait("document.querySelectorAll('.chart canvas').length == 6")
        drawn = """[...document.querySelectorAll(".chart canvas")].every(each => each.getContext("2d")
          .getImageData(0, 0, each.width, each.height).data.some(value => value))"""
        page.wait(drawn)
        page.wait_text("TTFT 30 s, TPOT 30 s")
        shown = json.loads(served.ask("/admin/kv")[1])["data"][0]
        shared = max(shown["runs"], key=lambda run: run["num_children"])
        assert shared["num_uses"] >= 2 and shared["num_children"] >= 2
        titles = "[...document.querySelectorAll('.icicle title')].map(each => each.textContent)"
        assert any(f"served {shared['num_uses']} sequences" in title for title in page.run(titles))
        page.click("As a table")
        page.wait_text("shared beginning")
        seen = "performance.getEntriesByType('resource').map(e => e.name.split('history_s=')[1]).filter(Boolean)"
        page.wait(f"{seen}.length > 1")
        assert page.run(seen)[:2] == ["300", "0"], "what was before the page, once"
        page.click("Pause")
        page.wait_text("Go on")
        assert not page.complaints


def test_a_time_without_steps_is_a_gap_in_the_charts(browser: Browser, served: Served) -> None:
    """No line is drawn over it; a point with nothing beside it shows as a mark."""
    script = """import("./lib/charts.js").then(({ History }) => {
      const history = new History(1, 100);
      for (const x of [0, 1, 2, 20, 21, 200]) history.add(x, x);
      return [history.xs, history.ys];
    })"""
    with opened(browser, served, "load") as page:
        assert page.run(script) == [[110.5, 200], [[None, 200]]]
        assert page.run(script.replace("200]", "40]")) == [
            [0, 1, 2, 11, 20, 21, 30.5, 40], [[0, 1, 2, None, 20, 21, None, 40]]
        ]  # fmt: skip
        assert not page.complaints


def test_the_audit_log_shows_its_signed_head(browser: Browser, tmp_path: Path) -> None:
    """Where none is kept, how to keep one; else the head that belongs elsewhere, and a failure for all to see."""
    pytest.importorskip("cryptography")
    from tokenmill.control.audit import chain as segments
    from tokenmill.control.audit.log import AuditLog
    from tokenmill.control.signing import load_signer, make_key

    def full(fd: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    make_key(tmp_path / "key.pem")
    log = AuditLog(str(tmp_path / "log" / "audit.jsonl"), load_signer(str(tmp_path / "key.pem"), "KEY"))
    log.open()
    with Served(audit=log) as audited, opened(browser, audited, "audit") as page:
        page.wait_text("No head yet")
        for _ in range(100):
            log.note({"action": "test", "outcome": "done"})
        page.wait_text("Copy head")
        head = log.status()["head"]
        assert f"--head {head['seq']}:{head['hash']}" in page.text() and "heads are not sent" in page.text()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(segments, "_write", full)
            log.note({"action": "test", "outcome": "done"})
            page.wait_text("cannot be written: No space left on device. Calls are refused until it can.")
        page.wait("!document.querySelector('main .notice')")
        assert not page.complaints
    log.close()


def test_a_request_shows_where_its_time_went(browser: Browser, served: Served) -> None:
    """From the list to the timeline: spans as the API tells them, running and ended; a missed target is marked."""
    script = served.script
    served.call(script.go.clear)
    try:
        with opened(browser, served, "requests") as page:
            page.run("""fetch("/v1/chat/completions", {method: "POST", headers: {"content-type": "application/json"},
              body: JSON.stringify({messages: [{role: "user", content: "Hi"}], slo: {ttft_ms: 200}})}); 0""")
            page.wait_text("prefill")
            page.run("document.querySelector('tbody a').click()")
            page.wait("document.querySelector('.timeline .span-prefill')")
            page.wait_text("so far")
            served.call(script.go.set)
            page.wait("document.querySelector('.timeline .span-decode')")
            page.wait_text("missed its target")
            identifier = page.run("document.querySelector('main h2').textContent")
            told = json.loads(served.ask(f"/admin/requests/{identifier}")[1])
            bars = "[...document.querySelectorAll('.timeline rect[class^=span-]')].map(e => e.getAttribute('class'))"
            assert page.run(bars) == [f"span-{span['name']}" for span in told["timeline"]]
            widths = "[...document.querySelectorAll('.timeline rect[class^=span-]')].map(e => e.getBBox().width)"
            total = page.run("document.querySelector('.timeline').getBoundingClientRect().width")
            seconds = [span["end_s"] - span["start_s"] for span in told["timeline"]]
            for width, span_s in zip(page.run(widths), seconds, strict=True):
                assert width / total == pytest.approx(span_s / sum(seconds), abs=0.03)
            assert "Timeline of" in page.run("document.querySelector('.timeline').getAttribute('aria-label')")
            page.click("All requests")
            page.wait_text("Those that are open")
            assert not page.complaints
    finally:
        served.call(script.go.set)


def test_chunks_and_preemptions_are_on_the_timeline(browser: Browser, tmp_path: Path) -> None:
    """Of an engine with room for one and a half requests: what was computed when, and what was lost and done again."""
    engine = EngineConfig(groups=full_groups(12), max_model_len=128, max_num_batched_tokens=32)
    with Served(lambda prompt: "x" * 60, engine=engine, flight_dir=tmp_path, step_s=0.002) as small:
        with ThreadPoolExecutor() as pool:
            calls = [pool.submit(chat, small, f"Prompt {number}", max_tokens=60) for number in range(3)]
            ids = [call.result() for call in calls]
        told = [json.loads(small.ask(f"/admin/requests/{identifier}")[1]) for identifier in ids]
        request = max(told, key=lambda each: each["num_preemptions"])
        assert request["num_preemptions"] > 0
        events = [event["name"] for span in request["timeline"] for event in span["events"]]
        with opened(browser, small, f"requests/{request['id']}") as page:
            page.wait("document.querySelector('.timeline')")
            for kind in ("chunk", "preempted"):
                shown = page.run(f"document.querySelectorAll('.timeline .mark-{kind}').length")
                assert shown == events.count(kind) > 0
            page.wait_text("tokens to compute again")
            page.run("location.hash = '#/load'")
            page.tell("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
            page.click("Download steps")
            trace = tmp_path / "tokenmill-steps.json"
            for _ in range(1000):
                if trace.exists():
                    break
                page.run("new Promise(told => setTimeout(told, 10))")
            assert json.loads(trace.read_text())["traceEvents"]
            page.wait_text("Recognised traffic")
            assert page.run("[...document.querySelectorAll('td')].some(each => each.textContent.startsWith('chat'))")
            assert not page.complaints


def test_a_request_that_is_not_known_is_told_so(browser: Browser, served: Served) -> None:
    with opened(browser, served, "requests/nobody") as page:
        page.wait_text("No such request")


def test_tenants_and_keys_are_made_changed_rotated_and_revoked(browser: Browser, tmp_path: Path) -> None:
    """Against the real store: the key that is shown once works, the one it replaces and a revoked one do not."""
    store = TenantStore(str(tmp_path / "tenants.db"))
    admin = store.create_key("ops", "ops", is_admin=True)[1]
    accounting = Accounting(tmp_path / "usage", fold_s=0.01)
    accounting.open()
    with serving(store.path, accounting=accounting) as closed, opened(browser, closed, "tenants") as page:
        give_key(page, admin)
        page.wait_text("Nothing used in this time")
        page.click("New tenant")
        page.fill("Id", "acme")
        page.fill("Name", "Acme <b>Ltd</b>")
        page.fill("Requests a minute", "60")
        page.fill("Class", "2")
        page.click("Create")
        page.wait_text("Acme <b>Ltd</b>")
        page.wait_text("60 requests/min")
        page.click("Edit acme")
        page.fill("Weight", "x")
        page.click("Save")
        page.wait_text("must be a number")
        page.fill("Weight", "0")
        page.click("Save")
        page.wait_text("weight must be positive")
        page.fill("Weight", "3")
        page.click("Save")
        page.wait("!document.querySelector('dialog')")
        settings = ask(closed, "GET", "/admin/tenants/acme", key=admin)[1]
        assert (settings["weight"], settings["requests_per_minute"], settings["priority_class"]) == (3, 60, 2)
        page.click("New key")
        page.fill("Name", "laptop")
        page.fill("Tenant", "acme")
        page.click("Create")
        first = told_key(page, "laptop")
        assert models(closed, first) == 200
        asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 7}
        usage = ask(closed, "POST", "/v1/chat/completions", asked, first)[1]["usage"]
        page.fill("Time", "week")
        row = """[...document.querySelectorAll('tr')].map(each => each.innerText.split('\\t'))
          .find(each => each[0] == 'acme' && each[1] == 'toy')"""
        assert page.wait(row)[2:] == ["1", str(usage["prompt_tokens"]), "0", "7"]
        page.click("Rotate laptop")
        page.click("Rotate")
        second = told_key(page, "laptop")
        assert (models(closed, first), models(closed, second)) == (401, 200)
        page.wait_text("replaced by")
        assert second not in page.run("document.documentElement.outerHTML"), "a key is shown once"
        page.click("Revoke laptop")
        page.click("Revoke")
        page.wait("!document.querySelector('dialog')")
        assert models(closed, second) == 401
        page.click("Delete acme")
        page.click("Delete")
        page.wait("![...document.querySelectorAll('button')].some(e => e.getAttribute('aria-label') == 'Edit acme')")
        assert ask(closed, "GET", "/admin/tenants/acme", key=admin)[0] == 404
        assert all(each not in json.dumps(page.requests) for each in (first, second))
        assert not page.complaints
    accounting.close()
    store.close()


def told_key(page: Page, name: str) -> str:
    """From the dialog that shows it, which is then closed."""
    key: str = page.wait("document.querySelector('dialog input[readonly]')?.value")
    assert key.startswith("tm-") and f"Key {name}" in page.text()
    page.click("Close")
    page.wait("!document.querySelector('dialog')")
    return key


def test_a_key_without_the_scope_sees_no_tenants(browser: Browser, tmp_path: Path) -> None:
    store = TenantStore(str(tmp_path / "tenants.db"))
    plain = store.create_key("plain", "t")[1]
    with serving(store.path) as closed, opened(browser, closed, "tenants") as page:
        give_key(page, plain)
        page.wait_text("needs an API key of scope admin")
        page.run("location.hash = '#/requests'")
        page.wait_text("Not allowed with this key")
    store.close()


def test_without_keys_the_page_tells_the_commands(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path / "tenants.db") as open_to_all, opened(browser, open_to_all, "tenants") as page:
        page.wait_text("tokenmill keys create NAME --admin")
        page.wait_text("No keys are given out")
        names = page.run("[...document.querySelectorAll('main button')].map(each => each.textContent)")
        assert not {"New key", "New tenant"} & set(names)


def test_workers_are_shown_with_what_was_decided_about_them(browser: Browser, served: Served) -> None:
    """The only worker cannot be drained: the dialog says why, and stays."""
    with opened(browser, served, "workers") as page:
        page.wait_text("engine-0")
        page.wait_text("Decisions")
        page.click("Drain engine-0")
        page.click("Drain")
        page.wait_text("is the only one that serves")


def test_adapters_are_loaded_and_unloaded(browser: Browser, served: Served) -> None:
    """A folder that is none is told in the dialog, which stays."""
    with opened(browser, served, "models") as page:
        page.wait_text("No adapter is loaded")
        page.click("Load adapter")
        page.fill("Name", "style")
        page.fill("Folder", "missing")
        page.click("Load")
        page.wait_text("is no adapter")
        page.fill("Folder", "adapters")
        page.click("Load")
        page.wait_text("style is loaded")
        assert "style" in served.ask("/v1/models")[1]
        page.click("Unload style")
        page.click("Unload")
        page.wait_text("style is unloaded")
        page.wait_text("No adapter is loaded")
        assert not page.complaints


def test_a_batch_is_uploaded_run_and_fetched(browser: Browser, served: Served, tmp_path: Path) -> None:
    """From a file on the reader's disk to the answers on it; one without calls is told and starts nothing."""
    (tmp_path / "calls.jsonl").write_text(KEPT)
    (tmp_path / "bad.jsonl").write_text("no calls\n")
    with opened(browser, served, "batches") as page:
        page.wait_text("No batches yet")
        page.click("New batch")
        choose(page, tmp_path / "bad.jsonl")
        page.click("Upload and start")
        page.wait_text("not JSON")
        choose(page, tmp_path / "calls.jsonl")
        page.click("Upload and start")
        page.wait_text("3 of 3")
        page.wait_text("completed")
        page.tell("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        page.click("Answers of calls")
        answers = tmp_path / "calls-answers.jsonl"
        page.wait("1")
        for _ in range(1000):
            if answers.exists() and answers.read_text().count("\n") == 3:
                break
            page.run("new Promise(told => setTimeout(told, 10))")
        assert {json.loads(line)["custom_id"] for line in answers.read_text().splitlines()} == {"c0", "c1", "c2"}
        page.click("Delete calls.jsonl")
        page.click("Delete")
        page.wait("![...document.querySelectorAll('button')].some(e => e.ariaLabel == 'Delete calls.jsonl')")
        assert not page.complaints


def choose(page: Page, path: Path) -> None:
    page.wait("document.querySelector('dialog input[type=file]')")
    node = page.tell("Runtime.evaluate", expression="document.querySelector('dialog input[type=file]')")["result"]
    page.tell("DOM.setFileInputFiles", files=[str(path)], objectId=node["objectId"])


def distribution(scale: float) -> dict[str, Any]:
    values = {name: scale * factor for name, factor in (("mean", 1), ("p50", 1), ("p90", 2), ("p99", 3), ("max", 4))}
    return {"num": 9, **values}


def run_report(rate: float) -> dict[str, Any]:
    buckets = [
        {"t_s": t / 2, "num_due": 3, "num_sent": 3, "num_ok": 2, "num_failed": 1, "output_tokens": 20 * t,
         "in_flight": 1.5, "ttft_p50_s": None if t == 2 else 0.1, "itl_p50_s": 0.01}
        for t in range(8)
    ]  # fmt: skip
    return {
        "schema": 2, "kind": "run", "name": "a run", "num_requests": 10, "num_ok": 9, "requests_per_s": rate,
        "output_tokens_per_s": 123.4 * rate, "ttft_s": distribution(0.1), "tpot_s": distribution(0.01),
        "itl_s": distribution(0.01), "e2el_s": distribution(1.0), "slo": {"objectives": {}, "attainment": 0.875},
        "errors": [{"kind": "timeout", "num": 1, "example": "<i>late</i>"}], "warnings": ["careful"],
        "timeline_bucket_s": 0.5, "timeline": buckets,
    }  # fmt: skip


RUNS = [run_report(rate) for rate in (1.0, 2.0, 4.0)]
REPORTS = {
    "run": RUNS[0],
    "sweep": {"schema": 2, "kind": "sweep", "by": "request_rate", "points": [1.0, 2.0, 4.0], "runs": RUNS},
    "goodput": {
        "schema": 2, "kind": "goodput", "slo": {"ttft_s": 0.5}, "target_attainment": 0.9, "request_rate": 2.5,
        "output_tokens_per_s": 300.0, "warnings": [],
        "probes": [
            {"request_rate": rate, "attainment": 0.95, "attainment_low": 0.9, "attainment_high": 1.0, "stable": True,
             "passed": rate < 3, "run": run}
            for rate, run in zip((1.0, 2.0, 4.0), RUNS, strict=True)
        ],
    },
    "compare": {
        "schema": 2, "kind": "compare", "warnings": ["2 repeats are too few"], "figures": [], "runs": RUNS,
        "ratios": [
            {"phase": "cold", "metric": metric, "higher_is_better": more, "baseline": "old", "candidate": "new",
             "baseline_value": 0.25, "candidate_value": 0.5, "ratio": 2.0, "low": 1.5, "high": 250.0,
             "confidence": 0.97, "is_primary": more, "verdict": "better" if more else "worse"}
            for metric, more in (("output_tokens_per_s", True), ("ttft_s.p99", False))
        ],
    },
    "kernels": {"schema": 1, "kind": "kernels", "cases": [{"case": "matmul", "us": 12.5}], "cores": 2},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "num_charts", "texts"),
    [
        ("run", 3, ("9 of 10", "87.5 %", "100 ms", "careful", "<i>late</i>", "timeout")),
        ("sweep", 3, ("494", "requests/s")),
        ("goodput", 3, ("2.5 requests/s", "failed", "TTFT at most", "500 ms")),
        ("compare", 0, ("new against old", "TTFT p99", "250 ms", "500 ms", "1.500 to 100 and above", "too few")),
        ("kernels", 0, ("matmul", "12.5")),
    ],
)
def test_a_report_is_drawn(
    browser: Browser, served: Served, name: str, num_charts: int, texts: tuple[str, ...]
) -> None:
    """Opened from the list; its figures, charts where it has a load, and all of it as JSON."""
    with opened(browser, served, "reports") as page:
        page.click(f"{name}.json")
        for text in texts:
            page.wait_text(text)
        assert page.run("document.querySelectorAll('canvas').length") == num_charts
        page.click("As JSON")
        page.wait_text(f'"kind": "{name}"')
        page.resize(360, 740)
        page.wait("document.documentElement.scrollWidth <= 360")
        assert not page.complaints

"""The console in a browser: a conversation, keys, hostile texts, the keyboard, small and dark screens."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tenants import serving
from test_http_tools import Model, serve

from browser import Browser, Page
from scripted import Served
from tokenmill.control.tenants.store import TenantStore

PAGES = ("playground", "load", "workers", "requests", "tenants", "models", "batches", "reports", "audit")
HOSTILE = "<img src=x onerror=pwned()><script>pwned()</script>\u202e</b>'\"&amp;"
ANSWER = f"One two {HOSTILE} three."
SHOWN = ANSWER.replace("&amp;", "&")
"""Tags show as they are written; characters by name are what they stand for."""
MARKDOWN = """# Title

Some **bold** text, `x < y`, &lt;tag&gt; and a [link](https://example.org/a).
![picture](https://example.org/p.png) [bad](javascript:pwned()) [bad](data:text/html,x) <img src=x onerror=pwned()>

### Deeper

1. one
   - inner
2. [x] two

> quoted

```js
let a = "<b>";

let b;
```

| a | b |
|---|--:|
| 1 | [late] |

[late]: https://example.org/late
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(lambda prompt: ANSWER, step_s=0.005, files_dir=str(tmp_path_factory.mktemp("files"))) as running:
        yield running


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    """The playground, ready; in the end nothing was refused by the policy, raised, or asked for elsewhere."""
    with opened(browser, served) as page:
        yield page
        assert not page.complaints
        away = [request["url"] for request in page.requests if not request["url"].startswith((served.url, "data:"))]
        assert not away


def opened(browser: Browser, served: Served, name: str = "playground", **how: Any) -> Any:
    return browser.page(f"{served.url}/console/#/{name}", **how)


def ask(page: Page, text: str = "Hello") -> None:
    page.wait("document.querySelector('option[value=toy]')")
    page.fill("Message", text)
    page.click("Send")


def done(page: Page) -> None:
    page.wait("document.querySelectorAll('.turn.assistant').length && !document.querySelector('[aria-busy=true]')")


def said(page: Page) -> str:
    text: str = page.run("[...document.querySelectorAll('.turn.assistant > .said')].at(-1).textContent")
    return text


def test_an_answer_shows_as_it_comes_and_can_be_stopped(page: Page, served: Served) -> None:
    """With the model held in the middle, what it has said is there; Stop cancels the request in the engine, and the
    tokens that came are counted."""
    script = served.script
    script.step_s = 0.05
    try:
        ask(page)
        page.wait("document.querySelector('.turn.assistant > .said')?.textContent.startsWith('One')")
        served.call(script.go.clear)
        assert said(page) != SHOWN and page.run("!document.querySelector('.turn .foot').childElementCount")
        served.wait_until(lambda: served.client.num_open == 1)
        page.click("Stop")
        page.wait_text("stopped")
        assert page.wait("document.querySelector('.turn .num').innerText.match(/(\\d+) tokens/)?.[1]") == str(
            len(said(page))
        )
        assert page.run("[...document.querySelectorAll('button')].find(e => e.textContent == 'Stop').disabled")
    finally:
        script.step_s = 0.005
        served.call(script.go.set)
    served.wait_until(lambda: served.client.num_open == 0)
    first = said(page)
    ask(page, "Go on")
    done(page)
    assert said(page) == SHOWN
    sent = [json.loads(each["postData"]) for each in page.requests if each["method"] == "POST"]
    assert [message["role"] for message in sent[1]["messages"]] == ["user", "assistant", "user"]
    assert sent[1]["messages"][1]["content"] == first, "what was said before is part of the conversation"


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl to try the command with")
def test_the_command_for_curl_sends_the_same(browser: Browser, tmp_path: Path) -> None:
    """Whatever is in the message; the key comes from the environment and is not in the command."""
    store = TenantStore(str(tmp_path / "tenants.db"))
    key = store.create_key("a", "t")[1]
    text = "It's \"$HOME\" `id` \\ ' '' \n\u00e9 !"
    heard: list[str] = []
    with serving(store.path, lambda prompt: heard.append(prompt) or "yes") as closed, opened(browser, closed) as page:
        give_key(page, key)
        page.wait("document.querySelector('option[value=toy]')")
        page.fill("Message", text)
        page.click("Send")
        done(page)
        page.run("navigator.clipboard.writeText = () => Promise.reject(new Error('not allowed'))")
        page.click("Copy as curl")
        command = page.wait("document.querySelector('dialog textarea')?.value")
        assert key not in command
        run = {"env": os.environ | {"TOKENMILL_API_KEY": key}, "capture_output": True, "text": True, "timeout": 20}
        said = subprocess.run(["sh", "-c", f"{command} -s"], check=True, **run).stdout  # type: ignore[call-overload]
        assert said.rstrip().endswith("data: [DONE]")
        assert len(heard) == 2 and heard[0] == heard[1] and text in heard[0]
        assert not page.complaints
    store.close()


def test_it_works_under_the_path_of_a_proxy(browser: Browser) -> None:
    """Files and calls are found below it, also from the address without the last slash."""
    with Served(lambda prompt: ANSWER, root_path="/llm") as below, browser.page(f"{below.url}/llm/console") as page:
        ask(page)
        done(page)
        assert said(page) == SHOWN and page.run("location.pathname") == "/llm/console/"
        assert all("/llm/" in request["url"] for request in page.requests)
        assert not page.complaints


def test_a_question_without_an_answer_is_no_part_of_what_is_said(page: Page, served: Served) -> None:
    """A failure is told under the question; the next question takes its place, in the page and in the request."""
    served.script.failure = RuntimeError("planted")
    try:
        ask(page, "First")
        page.wait("document.querySelector('.turn.assistant .notice.bad')")
        done(page)
    finally:
        served.script.failure = None
    ask(page, "Second")
    done(page)
    page.wait("document.querySelector('.turn .foot')")
    assert said(page) == SHOWN and page.run("document.querySelectorAll('.turn.user').length") == 1
    sent = [json.loads(each["postData"]) for each in page.requests if each["method"] == "POST"]
    assert sent[-1]["messages"] == [{"role": "user", "content": "Second"}]


def test_parameters_go_out_as_set_and_bad_ones_do_not(page: Page) -> None:
    """A number out of range names its range, gets the focus, and nothing is sent."""
    page.fill("System message", "Be brief")
    page.fill("Max tokens", "5")
    page.fill("Temperature", "3")
    ask(page)
    page.wait_text("from 0 to 2")
    assert page.focused() == "Temperature" and page.run("document.activeElement.getAttribute('aria-invalid')") == "true"
    page.fill("Temperature", "0.5")
    page.fill("Answer", "json_schema")
    page.fill("Schema", '{"type": "object"')
    page.click("Send")
    page.wait_text("Not JSON")
    page.fill("Answer", "text")
    page.click("More parameters")
    page.fill("Stop texts", "###\nEND")
    page.fill("Further fields", '{"ignore_eos": true}')
    page.click("Send")
    done(page)
    assert said(page) == ANSWER[:5]
    (sent,) = [json.loads(each["postData"]) for each in page.requests if each["method"] == "POST"]
    assert sent == {
        "model": "toy", "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_tokens": 5, "temperature": 0.5, "stop": ["###", "END"], "ignore_eos": True,
        "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}],
    }  # fmt: skip
    page.click("Request and response")
    page.wait_text("chat.completion.chunk")
    assert '"max_tokens": 5' in page.text()


def test_each_token_has_its_probability_and_alternatives(page: Page) -> None:
    """One stop for the keyboard; arrows move; the panel names the token and what else was likely."""
    page.fill("Probabilities of tokens", "1")
    ask(page)
    done(page)
    page.click("Probabilities")
    shown = "[...document.querySelectorAll('.token')].map(each => each.textContent).join('')"
    assert page.run(shown) == ANSWER.replace("\u202e", r"\xe2\x80\xae"), "a part of a character shows as its bytes"
    assert page.run("document.querySelectorAll('.token[tabindex=\"0\"]').length") == 1
    page.run("document.querySelector('.token').focus()")
    for _ in range(9):
        page.press("ArrowRight")
    drawn = page.wait("document.querySelector('.alternatives tr.drawn')?.innerText")
    assert '"i"' in drawn and "36.8" in drawn and ANSWER[9] == "i"
    assert page.run("document.querySelectorAll('.alternatives tbody tr').length") == 4
    beside = """(() => { const token = document.querySelector(".token.chosen").getBoundingClientRect(),
      panel = document.querySelector(".alternatives").getBoundingClientRect();
      return panel.top >= token.bottom || panel.bottom <= token.top; })()"""
    assert page.run(beside) and page.run("document.querySelector('.alternatives').checkVisibility()")
    page.press("Escape")
    assert page.run("document.querySelector('.alternatives').checkVisibility()") is False
    where = page.run("(({x, y}) => [x, y])(document.querySelectorAll('.token')[8].getBoundingClientRect())")
    page.tell("Input.dispatchMouseEvent", type="mouseMoved", x=where[0] + 2, y=where[1] + 5)
    assert '"<"' in page.wait("document.querySelector('.alternatives tr.drawn')?.innerText")


def test_two_models_answer_side_by_side(browser: Browser) -> None:
    """The same is said to both, each has its own answers before it, and the second begins with what was said so far."""
    two = Served(lambda prompt: f"Answer {len(prompt)}", model_names=("toy", "other"))
    with two as served, opened(browser, served) as page:
        ask(page, "First")
        done(page)
        page.fill("Compare with", "other")
        page.wait("document.querySelectorAll('.turns').length == 2")
        assert page.run("document.querySelectorAll('.turns')[1].innerText.includes('First')")
        ask(page, "Second")
        page.wait("document.querySelectorAll('.turn .foot button.again').length == 2")
        sent = [json.loads(each["postData"]) for each in page.requests if each["method"] == "POST"]
        assert [each["model"] for each in sent] == ["toy", "toy", "other"]
        assert sent[1]["messages"] == sent[2]["messages"] and len(sent[1]["messages"]) == 3
        columns = page.run("[...document.querySelectorAll('.turns')].map(e => e.getBoundingClientRect().x)")
        assert columns[0] < columns[1]
        page.resize(360, 740)
        assert page.run("document.documentElement.scrollWidth") <= 360
        page.fill("Compare with", "")
        page.wait("document.querySelectorAll('.turns').length == 1")
        assert not page.complaints


def test_a_conversation_is_kept_as_a_file_and_opened_again(browser: Browser, tmp_path: Path) -> None:
    """The file is the body of a call that goes on with it. Opened elsewhere it brings all of that; what is
    no conversation changes nothing."""
    model = Model()
    model.answer = 'I **look**.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    with serve("<tool_call><think>", model) as served:
        with opened(browser, served) as page:
            page.fill("System message", "Be brief")
            page.fill("Temperature", "0.5")
            page.click("More parameters")
            page.fill("Further fields", '{"ignore_eos": false}')
            page.click("Tools")
            page.click("Fill in an example")
            ask(page, "Weather?")
            page.wait_text("Call get_weather")
            model.answer = "It **rains**."
            page.fill("Result of get_weather", "rain")
            page.click("Send results")
            page.wait("[...document.querySelectorAll('.said strong')].at(-1)?.innerText == 'rains'")
            done(page)
            page.tell("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
            page.click("Save")
            kept = tmp_path / "conversation.json"
            for _ in range(1000):
                if kept.exists():
                    break
                page.run("new Promise(told => setTimeout(told, 10))")
        body = json.loads(kept.read_text())
        status, answer, _ = served.ask("/v1/chat/completions", body)
        assert status == 200, answer
        assert [each["role"] for each in body["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
        with opened(browser, served) as page:
            page.wait("document.querySelector('option[value=toy]')")
            for bad, why in (
                ("{", "JSON"),
                ("[]", "one conversation"),
                ('{"messages": [{"role": "x"}]}', "none of the roles"),
            ):
                choose_file(page, bad)
                page.wait_text(why)
            assert "Nothing said yet" in page.text()
            choose_file(page, kept.read_text())
            page.wait("[...document.querySelectorAll('.said strong')].at(-1)?.innerText == 'rains'")
            page.wait_text("Call get_weather")
            ask(page, "And then?")
            done(page)
            (sent,) = [json.loads(each["postData"]) for each in page.requests if each["method"] == "POST"]
            assert {name: value for name, value in sent.items() if not name.startswith("stream")} == body | {
                "messages": [*body["messages"], {"role": "user", "content": "And then?"}]
            }
            further = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "user": "u"}
            choose_file(page, json.dumps(body | further))
            field = "[...document.querySelectorAll('label')].find(e => e.textContent == 'Further fields').control.value"
            page.wait(f"{field}.includes('get_weather')")
            choose_file(page, json.dumps(body | {"model": "gone"}))
            page.wait_text("Not served here: gone")
            assert not page.complaints


def choose_file(page: Page, content: str) -> None:
    """As if the reader chose a file of this content from the disk, for the next file that is asked for."""
    page.run(f"""HTMLInputElement.prototype.click = function () {{
      const given = new DataTransfer();
      given.items.add(new File([{json.dumps(content)}], "conversation.json"));
      this.files = given.files;
      this.dispatchEvent(new Event("change"));
    }}""")
    page.click("Open")


def test_what_models_and_users_write_is_text(browser: Browser, served: Served, tmp_path: Path) -> None:
    """Answers, questions, names of models, files and reports: no element is made of them and no script runs."""
    (tmp_path / "a.json").write_text(json.dumps({"kind": HOSTILE, "name": HOSTILE, HOSTILE: HOSTILE}))
    (tmp_path / "b.json").write_text(json.dumps({"kind": "engine", "cases": [{HOSTILE: HOSTILE}]}))
    settings = {"model_names": (HOSTILE,), "reports_dir": str(tmp_path), "files_dir": str(tmp_path / "files")}
    with Served(lambda prompt: ANSWER, lora_dir="/", **settings) as hostile, opened(browser, hostile) as page:
        page.wait(f"document.querySelector('.settings option')?.textContent == {json.dumps(HOSTILE)}")
        page.fill("Probabilities of tokens", "1")
        page.fill("Message", HOSTILE)
        page.click("Send")
        done(page)
        page.click("Probabilities")
        page.click("Request and response")
        assert said(page) == SHOWN and HOSTILE in page.run("document.querySelector('.turn.user').textContent")
        hostile.ask("/v1/load_lora_adapter", {"lora_name": HOSTILE, "lora_path": "/" + HOSTILE})
        upload(hostile, "<img src=x onerror=pwned()>", b'{"custom_id": "1"}\n')
        for name in (*PAGES, "reports/a.json", "reports/b.json"):
            page.run(f"location.hash = '#/{name}'")
            page.wait("!document.querySelector('main').innerText.includes('Loading')")
            if name not in ("playground", "load", "workers", "requests", "tenants", "audit"):
                page.wait_text(HOSTILE[:8] if name != "reports/b.json" else "cases")
        assert page.run("[...document.querySelectorAll('main img, main script, main b')].length") == 0
        assert not page.complaints


def upload(served: Served, name: str, content: bytes) -> None:
    edge = "x7y"
    head = f'--{edge}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{edge}\r\n'
    head += f'Content-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    connection = http.client.HTTPConnection(*served.address, timeout=20)
    body = head.encode() + content + f"\r\n--{edge}--\r\n".encode()
    connection.request("POST", "/v1/files", body, {"content-type": f"multipart/form-data; boundary={edge}"})
    assert connection.getresponse().status == 200
    connection.close()


def test_an_answer_is_read_as_markdown(browser: Browser) -> None:
    """Tags are text, links lead to web addresses alone, and pictures are not loaded."""
    with Served(lambda prompt: MARKDOWN) as served, opened(browser, served) as page:
        ask(page)
        done(page)

        def num(selector: str) -> int:
            found: int = page.run(f"document.querySelectorAll('.turn.assistant > .said {selector}').length")
            return found

        kinds = (
            "h3",
            "strong",
            "ol > li",
            "ol ul > li",
            "blockquote p",
            "td.right",
            ":not(pre) > code",
            ":is(img, b, script)",
        )
        assert [num(kind) for kind in kinds] == [2, 1, 2, 1, 1, 1, 1, 0]
        code = 'let a = "<b>";\n\nlet b;'
        assert page.run("document.querySelector('.said pre').textContent") == code
        links = page.run(
            "[...document.querySelectorAll('.said a')].map(each => [each.textContent, each.href, each.rel])"
        )
        assert links == [
            [text, f"https://example.org/{path}", "noopener noreferrer nofollow"]
            for text, path in (("link", "a"), ("Picture: picture", "p.png"), ("late", "late"))
        ]
        for text in ("x < y", "<tag>", "<img src=x onerror=pwned()>", "☑ two"):
            assert text in said(page)
        page.click("As written")
        assert page.run("document.querySelector('.turn .foot + div pre').textContent") == MARKDOWN
        page.run("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
        page.click("Copy")
        page.wait_text("Code copied")
        assert page.run("window.copied") == code
        assert all(each["url"].startswith(served.url) for each in page.requests if not each["url"].startswith("data:"))
        assert not page.complaints


def test_markdown_grows_as_it_would_be_drawn_at_once(page: Page) -> None:
    """After each character, with line ends of either kind; quotes in quotes by the thousand are shown as they are."""
    script = f"""import("./lib/markdown.js").then(({{ Markdown }}) => {{
      for (const text of [{json.dumps(MARKDOWN)}, {json.dumps(MARKDOWN.replace(chr(10), chr(13) + chr(10)))}]) {{
        const growing = new Markdown();
        for (let num = 1; num <= text.length; num++) {{
          growing.text = text.slice(0, num);
          growing.draw();
          const whole = new Markdown();
          whole.end(growing.text);
          if (num < text.indexOf("[late]:") && !whole.element.isEqualNode(growing.element)) return growing.text;
        }}
      }}
      const deep = ">".repeat(20000) + "x", plain = new Markdown(), nested = new Markdown();
      plain.end(deep);
      nested.end(">".repeat(500) + "x");
      return [plain.element.textContent === deep, nested.element.querySelectorAll("blockquote").length];
    }})"""
    assert page.run(script) == [True, 500]


def test_the_policy_stops_what_a_page_must_not_do(browser: Browser, served: Served) -> None:
    """Inline scripts, scripts and calls to other places, markup made of text: a hole in the pages opens nothing."""
    with opened(browser, served) as page:
        refused = """(() => { try { document.body.innerHTML = "<b>x</b>"; return false; } catch { return true; } })()"""
        assert page.run(refused)
        page.run("""(() => { const style = document.createElement("style"); style.textContent = "body{color:red}";
            document.body.append(style); })()""")
        assert page.run("fetch('http://127.0.0.1:9/').then(() => false, () => true)")
        assert page.run("""new Promise(told => { const image = new Image(); image.onerror = () => told(true);
            image.onload = () => told(false); image.src = "http://127.0.0.1:9/x.png"; })""")
        assert page.run("getComputedStyle(document.body).color") != "rgb(255, 0, 0)"
        deadline = time.monotonic() + 30
        while len(page.complaints) < 4 and time.monotonic() < deadline:
            page.run("1")
        assert len(page.complaints) >= 4


def test_a_key_is_in_this_tab_and_headers_alone(browser: Browser, tmp_path: Path) -> None:
    """Not in an address, a cookie or lasting storage. A reload keeps it; it can be forgotten; one that is not known is
    told so where it is given, and where it was revoked."""
    store = TenantStore(str(tmp_path / "tenants.db"))
    key = store.create_key("ops", "ops", is_admin=True)[1]
    with serving(store.path, lambda prompt: ANSWER) as closed, opened(browser, closed, "load") as page:
        page.wait_text("asks for an API key")
        page.run("document.getElementById('key').click()")
        page.wait("document.querySelector('dialog[open]')")
        page.fill("API key", "wrong")
        page.click("Use this key")
        page.wait("document.querySelector('dialog .notice')?.innerText.includes('does not know this API key')")
        page.fill("API key", key)
        page.click("Use this key")
        page.wait("!document.querySelector('dialog')")
        page.wait_text("Tokens a second")
        for name in PAGES:
            page.run(f"location.hash = '#/{name}'")
            page.wait("!document.querySelector('main').innerText.includes('Loading')")
        page.run("location.hash = '#/playground'")
        ask(page)
        done(page)
        assert said(page) == SHOWN
        page.click("Request and response")
        assert key not in page.run("document.documentElement.outerHTML")
        kept = "JSON.stringify([{...localStorage}, document.cookie, location.href, history.state])"
        assert page.run("JSON.stringify({...sessionStorage})") == json.dumps(
            {"tokenmill-api-key": key}, separators=(",", ":")
        )
        assert key not in page.run(kept) and page.run("indexedDB.databases().then(each => each.length)") == 0
        assert page.tell("Network.getCookies")["cookies"] == []
        carried = [each for each in page.requests if key in json.dumps(each["headers"])]
        assert carried and all(key not in each["url"] + each.get("postData", "") for each in page.requests)
        assert {name for each in carried for name, value in each["headers"].items() if key in value} == {
            "Authorization"
        }
        page.reload()
        page.wait("document.getElementById('key').innerText == 'API key set'")
        page.run("location.hash = '#/load'")
        page.wait_text("Tokens a second")
        store.revoke_keys("ops")
        page.run("location.hash = '#/requests'")
        page.wait_text("does not know this API key")
        give_key(page, "")
        page.wait_text("asks for an API key")
        assert page.run("sessionStorage.length") == 0
    store.close()


def test_a_page_that_is_not_there_says_so(browser: Browser, served: Served) -> None:
    """404 by address, also below folders that are none, with a way back; and by the part behind the #."""
    with browser.page(f"{served.url}/console/no/such/page") as page:
        assert page.wait("document.querySelector('h1').innerText") == "404: no such page"
        status = "performance.getEntriesByType('navigation')[0].responseStatus"
        assert page.run(status) == 404 and page.run("document.styleSheets.length") == 1
        page.click("Go to the console")
        page.loaded()
        page.wait("document.querySelector('main h1')?.innerText == 'Playground'")
        for name in ("nothing", "constructor", "nothing/%E0%A4%A"):
            page.run(f"location.hash = '#/{name}'")
            page.wait("document.querySelector('main h1').innerText == '404: no such page'")
            assert "404" in page.run("document.title")
            page.click("Playground", "main a")
            page.wait("document.querySelector('main h1').innerText == 'Playground'")
        assert not page.complaints


def test_a_refusal_is_asked_for_once(browser: Browser, tmp_path: Path) -> None:
    """A page left open without a key does not fill the audit log; a key, or another page, asks again."""
    store = TenantStore(str(tmp_path / "tenants.db"))
    key = store.create_key("ops", "ops", is_admin=True)[1]
    with serving(store.path, lambda prompt: ANSWER) as closed, opened(browser, closed, "requests") as page:

        def num_asked() -> int:
            return sum("/admin/requests" in each["url"] for each in page.requests)

        page.wait_text("asks for an API key")
        page.run("new Promise(told => setTimeout(told, 1500))")
        assert num_asked() == 1
        page.run("location.hash = '#/models'")
        page.run("location.hash = '#/requests'")
        page.wait_text("asks for an API key")
        give_key(page, key)
        page.wait_text("What is asked of this server")
        assert num_asked() >= 3
    store.close()


def give_key(page: Page, key: str) -> None:
    page.run("document.getElementById('key').click()")
    page.wait("document.querySelector('dialog[open]')")
    page.fill("API key", key)
    page.click("Use this key")
    page.wait("!document.querySelector('dialog')")


def test_all_can_be_done_by_keyboard(page: Page) -> None:
    """A link past the frame comes first; Enter sends; a dialog takes the focus, gives it back on Escape; no traps."""
    page.press("Tab")
    assert page.focused() == "Skip to content"
    page.press("Enter")
    assert page.run("document.activeElement.id") == "main"
    page.wait("document.querySelector('option[value=toy]')")
    for _ in range(40):
        page.press("Tab")
        if page.focused() == "Message":
            break
    assert page.focused() == "Message"
    outline = page.run("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "what has the focus can be seen"
    page.type("Hello")
    page.press("Enter", shift=True)
    page.type("again")
    page.press("Enter")
    done(page)
    assert page.run("document.querySelector('.turn.user .said').textContent") == "Hello\nagain"
    page.run("document.getElementById('key').focus()")
    page.press("Enter")
    page.wait("document.querySelector('dialog[open]')")
    assert page.focused() == "API key"
    page.press("Escape")
    page.wait("!document.querySelector('dialog')")
    assert page.run("document.activeElement.id") == "key"
    seen = []
    for _ in range(80):
        page.press("Tab")
        seen.append(page.focused())
        if seen[-1] == "Skip to content":
            break
    assert seen[-1] == "Skip to content", "the focus goes all the way round"


@pytest.mark.parametrize("name", PAGES)
def test_controls_have_names_and_pages_one_heading(browser: Browser, served: Served, name: str) -> None:
    """What a screen reader needs: names of controls and pictures, one h1, the current page marked, no id twice."""
    with opened(browser, served, name) as page:
        page.wait("document.querySelector('main h1') && !document.querySelector('main').innerText.includes('Loading')")
        nameless = page.run("""[...document.querySelectorAll("button, a, input, select, textarea, [role=img]")]
          .filter(each => each.checkVisibility())
          .filter(each => !(each.getAttribute("aria-label") || each.labels?.length || each.textContent.trim()))
          .map(each => each.outerHTML)""")
        assert nameless == []
        assert page.run("document.querySelectorAll('h1').length") == 1
        assert page.run("document.querySelectorAll('nav [aria-current=page]').length") == 1
        assert page.run("""[...document.querySelectorAll("[id]")].length
          == new Set([...document.querySelectorAll("[id]")].map(each => each.id)).size""")
        assert page.run("document.title").endswith("tokenmill") and page.run("document.documentElement.lang") == "en"
        assert not page.complaints


@pytest.mark.skipif("AXE" not in os.environ, reason="AXE names no copy of axe-core's axe.min.js")
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_axe_finds_nothing(browser: Browser, theme: str, width: int) -> None:
    """On every page, with two models' answers, alternatives of a token, and a dialog open."""
    script = Path(os.environ["AXE"]).read_text()
    how = {"width": width, "height": 740, "prefers_color_scheme": theme}
    with (
        Served(lambda prompt: MARKDOWN, model_names=("toy", "other")) as served,
        opened(browser, served, **how) as page,
    ):

        def check() -> None:
            page.run(f"{script}; 0")
            found = page.run("axe.run().then(each => each.violations.map(one => [one.id, one.nodes.map(n => n.html)]))")
            assert found == []

        page.wait("document.querySelector('option[value=toy]')")
        page.run("document.querySelector('details.panel').open = true")
        page.fill("Probabilities of tokens", "1")
        page.fill("Compare with", "other")
        check()
        ask(page)
        page.wait("document.querySelectorAll('.turn .foot button.again').length == 2")
        check()
        page.click("Probabilities")
        page.run("document.querySelector('.token').focus()")
        page.wait("document.querySelector('.alternatives').checkVisibility()")
        check()
        page.run("document.getElementById('key').click()")
        page.wait("document.querySelector('dialog[open]')")
        check()
        page.press("Escape")
        for name in (*PAGES, "nothing"):
            page.run(f"location.hash = '#/{name}'")
            page.wait("!document.querySelector('main').innerText.includes('Loading')")
            check()


@pytest.mark.parametrize("name", PAGES)
def test_a_phone_shows_all_of_it_without_scrolling_sideways(browser: Browser, served: Served, name: str) -> None:
    with opened(browser, served, name, width=360, height=740) as page:
        page.wait("document.querySelector('main h1') && !document.querySelector('main').innerText.includes('Loading')")
        if name == "playground":
            ask(page, "A" * 200)
            done(page)
            page.click("Request and response")
        assert page.run("document.documentElement.scrollWidth") <= 360
        assert page.run("document.getElementById('nav').checkVisibility()") is False
        page.click("Menu")
        assert page.run("document.getElementById('nav').checkVisibility()") is True
        page.run("document.querySelector('nav a[data-page=models]').click()")
        page.wait_text("Parameters")
        assert page.run("document.getElementById('nav').checkVisibility()") is False
        assert page.run("document.documentElement.scrollWidth") <= 360


def test_it_is_dark_where_the_system_is_or_the_reader_says_so(browser: Browser, served: Served) -> None:
    """The choice outlasts a reload; nothing else is kept in the browser."""
    ground = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, served, prefers_color_scheme="dark") as page:
        dark = page.run(ground)
    with opened(browser, served, prefers_color_scheme="light") as page:
        light = page.run(ground)
        assert dark != light
        page.fill("Theme", "dark")
        assert page.run(ground) == dark
        page.reload()
        page.wait(f"{ground} == {json.dumps(dark)}")
        assert page.run("JSON.stringify({...localStorage})") == '{"theme":"dark"}'
        page.fill("Theme", "")
        assert page.run(ground) == light and page.run("localStorage.length") == 0


def test_nothing_moves_for_those_who_want_no_motion(browser: Browser, served: Served) -> None:
    script = served.script
    for wanted, moves in (("reduce", False), ("no-preference", True)):
        with opened(browser, served, prefers_reduced_motion=wanted) as page:
            served.call(script.go.clear)
            try:
                ask(page)
                page.wait_text("Waiting for the first token")
                running = "document.getAnimations().filter(each => each.playState == 'running').length > 0"
                assert page.run(running) is moves
                page.click("Stop")
            finally:
                served.call(script.go.set)


def test_calls_of_tools_are_shown_and_answered(browser: Browser) -> None:
    """The model waits for results; they go back with the call they answer, and the conversation goes on."""
    model = Model()
    model.answer = 'I look.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo<b>"}}\n</tool_call>'
    with serve("<tool_call><think>", model) as served, opened(browser, served) as page:
        page.click("Tools")
        page.click("Fill in an example")
        ask(page, "Weather?")
        page.wait_text("Call get_weather")
        page.wait_text('"city": "Oslo<b>"')
        page.fill("Result of get_weather", "rain")
        model.answer = "It rains."
        page.click("Send results")
        page.wait_text("It rains.")
        done(page)
        sent = [json.loads(each["postData"]) for each in page.requests if each["method"] == "POST"][-1]["messages"]
        assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
        assert sent[2]["content"] == "rain" and sent[2]["tool_call_id"] == sent[1]["tool_calls"][0]["id"]
        assert json.loads(sent[1]["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo<b>"}
        assert not page.complaints

"""What README and pages of docs tell to do is done, as it stands there: commands in one shell a page, programs in
Python.

Only what must differ here does: ports are free ones, the model is a small one wherever a page leaves it to the reader,
and loads are short.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from doc_commands import ROOT, blocks, shown
from ports import free_port

CLIENTS = ROOT / ".venv-clients" / "bin" / "python"
PORTS = re.compile(r"(?<=[:\s])(7000|8000|8001|8080|9000|9001|11434)\b")

SHELL = r"""
set -eEuo pipefail
failed() { echo "FAILED: $1" >&2; tail -n 20 "$HERE"/serve-*.log >&2 || true; exit 1; }
trap 'failed "$BASH_COMMAND"' ERR
NUM=0 SERVERS=()
run() { "$PYTHON" -m tokenmill.cli.main "$@"; }
# A server or worker goes on in the background, as in another terminal, until the page starts another on its port.
background() {
    local port=$DEFAULT_PORT log="$HERE/serve-$((NUM += 1)).log" words=("$@") i
    for ((i = 0; i < $#; i++)); do [[ ${words[i]} != --port ]] || port=${words[i + 1]}; done
    if [ "$1" = worker ]; then
        run "$@" >"$log" 2>&1 &
    else
        [ -z "${SERVERS[port]-}" ] || { kill "${SERVERS[port]}" || true; wait "${SERVERS[port]}" || true; }
        "$PYTHON" -m tokenmill.cli.main "$@" --port "$port" >"$log" 2>&1 &
        SERVERS[port]=$!
    fi
    local pid=$!
    case " $* " in *" --no-engine "*) return ;; esac
    until grep -q -E "ready at|computes .* from" "$log"; do
        kill -0 $pid 2>/dev/null || { cat "$log" >&2; return 1; }
        sleep 0.05
    done
}
tokenmill() {
    case "$1 ${2-}" in
    serve* | worker*) background "$@" ;;
    chat*) run "$@" </dev/null ;;
    top*) run top "http://127.0.0.1:$DEFAULT_PORT" --once ;;
    "rm "*) run "$@"; cp -rsf "$MODELS"/* "$TOKENMILL_CACHE/models" ;; # other pages need it
    "bench serve") run "$@" "${SHORT[@]}" ;;
    "bench "*) case " $* " in *--help*) run "$@" ;; esac ;; # each has tests of its own, and takes minutes
    *) run "$@" ;;
    esac
}
SHORT=(--num-prompts 2 --random-input-len 8 --random-output-len 4)
make() { case "$*" in serve*) tokenmill serve ;; *) : ;; esac; } # `make test` runs this
"""


@dataclass(frozen=True)
class Page:
    """before: commands that the page takes as done. instead: what is the reader's to fill in, or is done in another
    terminal. skipped: blocks that begin so need what is not here. is_shown: what it shows as printed is printed."""

    path: str
    before: str = ""
    instead: dict[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    is_shown: bool = False


SERVER = "tokenmill serve smollm2"
KEYS = """
ADMIN=$(tokenmill keys create ops --admin | awk '{print $NF}')
KEY=$(tokenmill keys create own | awk '{print $NF}')
ALICE=$KEY BOB=$KEY
"""
PAGES = (
    Page(
        "README.md",
        instead={
            " MODEL ": " smollm2 ",
            ". .venv/bin/activate": ":",
            "run smollm2  ": "run smollm2 hello  ",
        },
        is_shown=True,
    ),
    Page("docs/use/structured-output.md", SERVER, skipped=("llm.chat", "SCHEMA=")),
    Page("docs/use/responses.md", SERVER),
    Page("docs/use/tools.md", SERVER),
    Page("docs/use/messages.md", SERVER),
    Page("docs/use/batches.md", f"{SERVER}; echo '{{}}' >calls.jsonl"),
    Page("docs/use/idempotency.md", SERVER),
    Page("docs/use/resume.md", instead={"~/": "./"}),
    Page("docs/use/migrate.md", 'mkdir models; cp "$MODELS"/smollm2/*.gguf models', {"llama3.2": "smollm2"}),
    Page("docs/operate/result-cache.md"),
    Page("docs/operate/usage.md", SERVER + KEYS),
    Page(
        "docs/operate/tenants.md",
        f"{SERVER}; BOB=key\nfor name in search assistant; do tokenmill keys create $name; done",
        is_shown=True,
    ),
    Page("docs/operate/operations.md", SERVER, skipped=("prometheus",)),
    Page("docs/operate/simulate.md", f"ln -s {ROOT}/deploy deploy", skipped=("tokenmill bench speculation",)),
    Page(
        "docs/use/terminal.md",
        "echo 'A mill grinds.' >notes.txt; trap 'run stop --all >&2 || true' EXIT",
        {
            "run smollm2  ": "run smollm2 hello  ",
            "tokenmill chat --url": "tokenmill serve smollm2; tokenmill chat --url",
        },
    ),
    Page("docs/operate/workers.md", skipped=("tokenmill serve ...",)),
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
@pytest.mark.sampled(0.3)
def test_what_a_page_tells_to_do_can_be_done(page: Page, smollm2: Path, tmp_path: Path) -> None:
    models, cache = smollm2.parents[1], tmp_path / "cache"
    cache.mkdir()
    subprocess.run(["cp", "-rs", models, cache / "models"], check=True)
    if not (models / "minilm").is_dir():  # fetched by the tests that need it
        page = replace(page, instead={**page.instead, "tokenmill serve minilm": ":"})
    (tmp_path / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    script = "\n".join([SHELL, page.before, *commands(page)])
    ports: dict[str, str] = {"8000": str(free_port())}
    script = PORTS.sub(lambda found: ports.setdefault(found[0], str(free_port())), script)
    environment = {
        **os.environ,
        "HERE": str(tmp_path),
        "HOME": str(tmp_path),
        "CURL_HOME": str(tmp_path),
        "PYTHON": sys.executable,
        "CLIENTS": str(CLIENTS) if CLIENTS.exists() else "true",
        "DEFAULT_PORT": ports["8000"],
        "MODELS": str(models),
        "TOKENMILL_CACHE": str(cache),
        "TOKENMILL_STATE": str(tmp_path / "state"),
    }
    with subprocess.Popen(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            said, _ = shell.communicate(timeout=850)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, said
    if page.is_shown:
        said += "".join(log.read_text(encoding="utf8") for log in sorted(tmp_path.glob("serve-*.log")))
        expected = list(shown(ROOT / page.path))
        missing = [line.pattern for line in expected if not line.search(said)]
        assert expected and not missing, f"{missing} in:\n{said}"


def commands(page: Page) -> list[str]:
    """The page as commands of a shell. Programs in Python go on from one another, so they are one, at the place of the
    first."""
    found = [block for block in blocks(ROOT / page.path) if not block.text.startswith(page.skipped or ("\0",))]
    program = "\n".join(block.text for block in found if block.kind == "python")
    lines = []
    for i, block in enumerate(found):
        text = block.text
        if block.kind == "python":
            if any(earlier.kind == "python" for earlier in found[:i]):
                continue
            python = "$CLIENTS" if re.search("^(import|from) anthropic", program, re.M) else "$PYTHON"
            text = f"cat >program.py <<'END OF PROGRAM'\n{program}\nEND OF PROGRAM\n{python} program.py"
        for given, instead in page.instead.items():
            text = text.replace(given, instead)
        lines.append(text)
    return lines

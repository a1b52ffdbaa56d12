"""Clients that others made, each in scripts as their public documentation shows them: only URL, key and model are ours.

A script is a file of tests that the clients' own environment runs (`make clients`, pinned in requirements.txt), in a
process of its own, without our settings and any way out of this machine.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from serving import Server

SCRIPTS = Path(__file__).parent / "scripts"
ALL = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "conftest")
NEWEST = [name for name in ALL if name.startswith(("openai_", "vllm_"))]
"""Run with the openai package of the tests' own environment: in that of the clients, others hold it back."""


def run(script: str, python: str, server: Server, model: str, folder: Path) -> None:
    """The script's tests pass; its files go to `folder`."""
    ran = subprocess.run(
        [python, "-m", "pytest", "--timeout", "180", "-c", str(SCRIPTS / "pytest.ini"), str(SCRIPTS / f"{script}.py")],
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SERVER_URL": server.url,
            "SERVER_MODEL": model,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LLM_USER_PATH": str(folder / "llm"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n--- the server:\n{server.output[-3000:]}"


@pytest.mark.parametrize("script", NEWEST)
def test_the_openai_package(script: str, chat_server: Server, tmp_path: Path) -> None:
    """Every call of the script is answered as the newest openai package expects."""
    run(script, sys.executable, chat_server, "smollm2", tmp_path)


@pytest.mark.sampled(1 / 6)
@pytest.mark.parametrize("script", [name for name in ALL if name not in NEWEST])
def test_a_client(script: str, clients_python: str, chat_server: Server, tmp_path: Path) -> None:
    """The same of the clients that have an environment of their own."""
    run(script, clients_python, chat_server, "smollm2", tmp_path)


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("family", ["hermes", "llama3_json", "mistral"])
def test_tools_in_the_form_of_a_family(family: str, smollm2: Path, tmp_path: Path) -> None:
    """A template is all that tells the family; clients see the same calls whatever form the model writes them in."""
    template = SCRIPTS.parent / "templates" / f"{family}.jinja"
    with Server("--chat-template", str(template), model="smollm2") as server:
        run("openai_tools", sys.executable, server, "smollm2", tmp_path)

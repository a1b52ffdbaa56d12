"""guidellm against the server, off line: its own rates, requests of a file, and what it counts by our usage.

It brings torch with CUDA (6 GB), so it is looked for and never installed: TOKENMILL_GUIDELLM names the program, or it
is on the PATH. A request that ends when the benchmark does is sometimes in none of its lists.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from serving import Server

COMMAND = os.environ.get("TOKENMILL_GUIDELLM") or shutil.which("guidellm")
ROWS = [{"prompt": f"Write a sentence about mill {number}.", "output_tokens_count": 12} for number in range(6)]


@pytest.mark.skipif(COMMAND is None, reason="no guidellm: neither TOKENMILL_GUIDELLM nor PATH has it")
@pytest.mark.parametrize("api", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_every_request_counts_with_the_tokens_that_it_asked_for(api: str, chat_server: Server, tmp_path: Path) -> None:
    """The model is the server's own, found by /v1/models; no tokenizer is needed."""
    assert COMMAND is not None
    data, out = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    backend = f"kind=openai_http,target={chat_server.url},request_format={api}"
    ran = subprocess.run(
        [
            *(COMMAND, "run", "--backend", backend, "--profile", "kind=constant,rate=5", "--disable-console"),
            *("--constraint", f"kind=max_requests,count={len(ROWS)}", "--data", f"kind=json_file,path={data}"),
            *("--output", f"kind=json,path={out}"),
        ],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, f"{ran.stdout[-5000:]}\n--- the server:\n{chat_server.output[-3000:]}"
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"] and not requests["incomplete"], requests
    assert {row["output_tokens"] for row in requests["successful"]} == {12}
    assert all(row["prompt_tokens"] > 0 and row["time_to_first_token_ms"] > 0 for row in requests["successful"])

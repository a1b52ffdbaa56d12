"""`tokenmill kv ...` against running servers: documents are warmed, found, carried elsewhere, damaged and forgotten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving import Server

from tokenmill.cli.main import main

TEXT = " ".join(f"Part {number} of the machine costs {number * 7 % 50} coins." for number in range(18))
SYSTEM = "You answer from the list."


@pytest.mark.sampled(1 / 3)
def test_documents_are_computed_once_and_carried_to_where_they_are_wanted(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document, archive = tmp_path / "list.txt", tmp_path / "list.kv"
    document.write_text(TEXT, encoding="utf8")
    how = ["--as", "user", "--system", SYSTEM, str(document)]

    def run(server: Server, *words: str) -> tuple[int, str]:
        status = main(["kv", words[0], "--url", server.url, *words[1:]])
        return status, capsys.readouterr().out

    asked = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TEXT + "\nWhat costs most?"}]
    body = {"messages": asked, "max_tokens": 8, "temperature": 0, "logprobs": True}
    with Server("--kv-cache-memory-bytes", "20MiB", "--kv-disk", f"{tmp_path / 'kv'}:100MB") as server:
        assert run(server, "ls", *how)[0] == 1
        status, said = run(server, "warm", "--pin", *how)
        assert status == 0 and "0 stored already" in said
        status, said = run(server, "warm", *how)
        assert status == 0 and "1 stored already; 0 tokens computed" in said
        assert run(server, "ls", *how)[0] == 0
        assert "disk" in run(server, "stat")[1] and "all blocks are sound" in run(server, "verify")[1]
        assert run(server, "ls", "--limit", "3")[1].count("yes") == 3
        status, said = run(server, "export", "-o", str(archive), *how)
        assert status == 0 and archive.stat().st_mode & 0o777 == 0o600
        first = json.loads(server.request("POST", "/v1/chat/completions", body)[1])
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] > 150
    with Server("--kv-cache-memory-bytes", "20MiB", "--kv-host", "100MB") as other:
        status, said = run(other, "import", str(archive))
        assert status == 0 and "are in the store now" in said
        again = json.loads(other.request("POST", "/v1/chat/completions", body)[1])
        assert again["choices"] == first["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 150
        status, said = run(other, "rm", *how)
        assert status == 0 and "are forgotten" in said and " 0 of" not in said and run(other, "ls", *how)[0] == 1
        data = archive.read_bytes()
        archive.write_bytes(data[: len(data) // 2] + bytes(8) + data[len(data) // 2 + 8 :])
        assert run(other, "import", str(archive))[0] == 1
    with Server("--kv-cache-memory-bytes", "20MiB", "--kv-host", "100MB", "--kv-cache-dtype", "int8") as unlike:
        archive.write_bytes(data)
        assert main(["kv", "import", "--url", unlike.url, str(archive)]) == 2
        assert "KV of another model" in capsys.readouterr().err

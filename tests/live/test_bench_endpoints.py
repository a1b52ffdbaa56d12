"""The load generator on other endpoints than text, and over https."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from raw_server import STREAM
from tokenmill.bench.load import datasets
from tokenmill.bench.load.body import BodyFormat
from tokenmill.bench.load.datasets import Batch, Lengths
from tokenmill.bench.load.http import Client, make_tls, parse_url
from tokenmill.bench.load.material import token_material, word_material
from tokenmill.bench.load.run import Load, run_load
from tokenmill.bench.load.schedule import Schedule
from tokenmill.bench.load.target import Target, find_model, send_one
from tokenmill.bench.result import Run
from tokenmill.core.errors import ConfigError, Unavailable

ANSWERS = {
    "embeddings": {"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 9, "total_tokens": 9}},
    "rerank": {"results": [{"index": 0, "relevance_score": 0.5}], "usage": {"total_tokens": 7}},
}


def measure(api: str, answer: dict[str, Any], batch: Batch, prompt_format: str = "text") -> tuple[Run, list[Any]]:
    """A run of six requests on a server that always answers so, and the bodies it got."""
    bodies: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                data = await reader.readexactly(int(length or b"0"))
                text = json.dumps(answer).encode()
                if head.startswith(b"POST"):
                    assert head.startswith(b"POST /v1/%b " % api.encode())
                    bodies.append(json.loads(data))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(text), text))
        except asyncio.IncompleteReadError:
            writer.close()

    async def go() -> Run:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        url = f"127.0.0.1:{port}"
        target = Target(url, parse_url(url), BodyFormat(api, prompt_format, "m"), f"http://{url}/metrics", 10.0)
        load = Load(
            lambda num, seed, rate: datasets.random_prompts(num, seed, Lengths(5, 1), batch=batch),
            lambda seed, form: token_material(seed, 9, 99) if form == "tokens" else word_material(seed, None),
            Schedule(concurrency=2),
            6,
            seed=0,
            objectives={"e2el_s": 5.0},
            num_warmups=0,
        )
        try:
            return await run_load(target, load)
        finally:
            server.close()
            await asyncio.sleep(0.02)

    return asyncio.run(go()), bodies


def test_embeddings_have_a_latency_and_no_tokens() -> None:
    """One text or several in a request, as text or ids; E2EL and input tokens are measured, and nothing more."""
    for batch, form, num_items in ((1, "text", None), (3, "text", 3), (1, "tokens", 5)):
        run, bodies = measure("embeddings", ANSWERS["embeddings"], Batch(batch), form)
        assert run.num_ok == 6 and run.e2el_s.num == 6 and run.input_tokens == 54 and run.slo.attainment == 1.0
        assert (run.ttft_s.num, run.tpot_s.num, run.output_tokens) == (0, 0, 0)
        given = bodies[0]["input"]
        assert bodies[0].keys() == {"model", "input"} and (len(given) if isinstance(given, list) else None) == num_items
        assert not any("whole" in warning or "wanted length" in warning for warning in run.warnings)


def test_a_rerank_has_a_query_and_documents() -> None:
    """As many documents as were asked for; other data sets have no query and are refused."""
    run, bodies = measure("rerank", ANSWERS["rerank"], Batch(4, query_len=3))
    assert run.num_ok == 6 and run.input_tokens == 42 and bodies[0].keys() == {"model", "query", "documents"}
    assert len(bodies[0]["documents"]) == 4 and len(bodies[0]["query"].split()) == 3
    with pytest.raises(ConfigError, match="query and documents"):
        measure("rerank", ANSWERS["rerank"], Batch())
    with pytest.raises(ConfigError, match="text only"):
        BodyFormat("rerank", "tokens", "m")


@pytest.mark.parametrize("answer", [{}, {"data": []}, {"results": None}, {"data": 3}])
def test_an_answer_without_vectors_is_a_failure(answer: dict[str, Any]) -> None:
    """Whatever its status."""
    run, _ = measure("embeddings", answer, Batch())
    assert run.num_ok == 0 and {error.kind for error in run.errors} <= {"no_results", "bad_response"}


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """One that names 127.0.0.1 and is signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make a certificate with")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    return tmp_path / "cert.pem"


def test_https_is_spoken_and_certificates_are_checked(certificate: Path) -> None:
    """With the certificate's own file, or without a check; by default an unknown certificate is refused."""
    secure = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secure.load_cert_chain(certificate, certificate.with_name("key.pem"))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        models = b'HTTP/1.1 200 OK\r\nContent-Length: 26\r\n\r\n{"data": [{"id": "mine"}]}'
        writer.write(models if head.startswith(b"GET") else STREAM)
        writer.close()

    async def go() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=secure)
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for tls, error in ((make_tls(certificate), None), (make_tls(insecure=True), None), (None, "connect_error")):
            address = parse_url(url, tls=tls)
            client = Client(address, "/completions", timeout_s=5.0)
            exchange = await send_one(client, b"{}")
            await client.close()
            assert exchange.error == error, exchange.error_detail
        assert await asyncio.to_thread(find_model, parse_url(url, tls=make_tls(certificate))) == "mine"
        with pytest.raises(Unavailable, match="certificate"):
            await asyncio.to_thread(find_model, parse_url(url))
        server.close()
        await asyncio.sleep(0.05)

    asyncio.run(go())


def test_a_file_without_certificates_is_refused(tmp_path: Path) -> None:
    """In one line that names it."""
    (tmp_path / "x.pem").write_text("nothing")
    for path in (tmp_path / "x.pem", tmp_path / "absent"):
        with pytest.raises(ConfigError, match=str(path)):
            make_tls(path)

"""Answers that a server signs verify, in every form they have, and nothing else does."""

from __future__ import annotations

import base64
import gzip
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

from openai import OpenAI

from scripted import Served
from tokenmill.cli.main import main
from tokenmill.control.signing import (
    BadSignature,
    Signer,
    check,
    load_signer,
    make_key,
    sign,
    take_comment,
    verifier_of,
)
from tokenmill.server.idempotency.store import AnswerStore
from tokenmill.server.layers import KEYS_PATH, SIGNATURE

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    make_key(tmp_path / "key.pem")
    return load_signer(str(tmp_path / "key.pem"), "KEY")


def post(served: Served, path: str, body: Any) -> tuple[bytes, bytes, str | None]:
    """(request, response, signature in its head)."""
    data = json.dumps(body).encode()
    call = urllib.request.Request(served.url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(call, timeout=20) as answer:
        return data, answer.read(), answer.headers[SIGNATURE]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "hi", "n": 2}),
        ("/v1/responses", {"input": "hi", "store": False}),
        ("/v1/messages", {"max_tokens": 5, "messages": MESSAGES}),
        ("/completion", {"prompt": "hi"}),
        ("/inference/v1/generate", {"token_ids": [5, 6]}),
        ("/generate", {"text": "hi"}),
    ],
)
def test_whole_answers_and_streams_are_signed(signer: Signer, path: str, body: dict[str, Any]) -> None:
    """A stream at its end, all of it but for that line."""
    with Served(signer=signer) as served:
        request, response, token = post(served, path, body)
        assert token is not None
        facts = check(token, signer.public, request, response)
        assert (facts["path"], facts["model"], facts["fingerprint"][:3]) == (path, "toy", "fp_")
        request, stream, token = post(served, path, body | {"stream": True})
        assert token is None
        signed, token = take_comment(stream)
        assert check(token, signer.public, request, signed)["path"] == path
        for changed in (signed[:-5], signed.replace(b"o", b"0", 1)):
            with pytest.raises(BadSignature, match="another response"):
                check(token, signer.public, request, changed)


def test_what_is_signed_is_the_answer_before_it_is_compressed(signer: Signer) -> None:
    """And its signature is in the head of the compressed one."""
    data = json.dumps({"prompt": "hi", "logprobs": 5, "n": 3, "seed": 1}).encode()
    heads = {"content-type": "application/json", "accept-encoding": "gzip"}
    with Served(signer=signer) as served:
        call = urllib.request.Request(served.url + "/v1/completions", data, heads)
        with urllib.request.urlopen(call, timeout=20) as answer:
            assert answer.headers["content-encoding"] == "gzip"
            facts = check(answer.headers[SIGNATURE], signer.public, data, gzip.decompress(answer.read()))
    assert facts["path"] == "/v1/completions"


def test_what_is_not_signed_is_as_ever(signer: Signer) -> None:
    """Errors, lines of JSON, and what is only looked at; and without a key there is no header."""
    with Served(signer=signer) as served:
        lines = post(served, "/api/generate", {"model": "toy", "prompt": "hi"})
        assert lines[2] is None and all(json.loads(line) for line in lines[1].splitlines())
        request, response, token = post(served, "/api/generate", {"model": "toy", "prompt": "hi", "stream": False})
        assert token is not None and check(token, signer.public, request, response)["model"] == "toy"
        assert served.ask("/v1/completions", {"prompt": 5})[0] == 400
        assert served.ask("/v1/models")[0] == 200
    with Served() as served:
        assert post(served, "/v1/completions", {"prompt": "hi"})[2] is None
        assert served.ask(KEYS_PATH)[0] == 404


def test_clients_read_signed_streams(signer: Signer) -> None:
    """The comment at the end is nothing to them."""
    with Served(signer=signer) as served, OpenAI(base_url=f"{served.url}/v1", api_key="x") as client:
        for _ in range(2):  # on one connection
            chunks = client.chat.completions.create(model="toy", messages=MESSAGES, stream=True)  # type: ignore
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello world"


def test_the_command_checks_what_curl_has_saved(
    tmp_path: Path, signer: Signer, capsys: pytest.CaptureFixture[str]
) -> None:
    with Served(signer=signer) as served:
        request, response, token = post(served, "/v1/completions", {"prompt": "hi"})
        stream = post(served, "/v1/completions", {"prompt": "hi", "stream": True})
        keys = served.ask(KEYS_PATH)[1]
    for name, data in (("q", request), ("a", response), ("sq", stream[0]), ("sa", stream[1]), ("k", keys.encode())):
        (tmp_path / name).write_bytes(data)

    def verify(asked: str, answered: str, *more: str, key: str = "k") -> int:
        files = ("--request", str(tmp_path / asked), "--response", str(tmp_path / answered))
        return main(["verify-response", *files, "--public-key", str(tmp_path / key), *more])

    assert token is not None
    assert verify("q", "a", "--signature", token) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "toy"
    assert verify("sq", "sa", key="key.pem.pub") == 0
    capsys.readouterr()
    assert verify("sq", "a", "--signature", token) == 1
    assert "another request" in capsys.readouterr().out
    assert verify("q", "a") == 1
    make_key(tmp_path / "other")
    assert verify("q", "a", "--signature", token, key="other.pub") == 1
    assert "another key" in capsys.readouterr().out


def test_a_signature_has_the_form_of_the_standard(signer: Signer) -> None:
    """RFC 7515: the key of the public set verifies it without anything of ours; and what is not one is refused."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    token = sign({"request_sha256": "", "v": 1}, signer)
    head, payload, signature = token.split(".")
    key = Ed25519PublicKey.from_public_bytes(verifier_of(signer.public.raw).raw)
    key.verify(base64.urlsafe_b64decode(signature + "=="), f"{head}.{payload}".encode())
    assert json.loads(base64.urlsafe_b64decode(head + "==")) == {"alg": "EdDSA", "kid": signer.key_id}
    for wrong in ("", "a.b", "a.b.c", f"{head}.{payload}.", f"{head}.{payload}.{signature[:-4]}AAAA", "é.é.é"):
        with pytest.raises(BadSignature):
            check(wrong, signer.public, b"", b"")
    none = base64.urlsafe_b64encode(b'{"alg":"none","kid":"%s"}' % signer.key_id.encode()).decode().rstrip("=")
    with pytest.raises(BadSignature):
        check(f"{none}.{payload}.", signer.public, b"", b"")


def test_answers_that_are_sent_again_are_signed_anew(tmp_path: Path, signer: Signer) -> None:
    """With an Idempotency-Key the kept answer comes again; its signature fits, but does not say which model it was."""
    answers = AnswerStore(str(tmp_path / "answers.db"))
    answers.open()
    with Served(signer=signer, answers=answers) as served:
        for is_again in (False, True):
            data = json.dumps({"prompt": "hi"}).encode()
            headers = {"content-type": "application/json", "idempotency-key": "k"}
            call = urllib.request.Request(f"{served.url}/v1/completions", data, headers)
            with urllib.request.urlopen(call, timeout=20) as answer:
                facts = check(answer.headers[SIGNATURE], signer.public, data, answer.read())
                assert (answer.headers["idempotent-replayed"] == "true") == is_again
            assert facts["model"] == (None if is_again else "toy")
    answers.close()

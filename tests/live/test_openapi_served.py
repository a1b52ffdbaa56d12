"""A server shows its API, to whoever asks: as a document for programs and as a page for people."""

from __future__ import annotations

import json
import urllib.request

from scripted import Served
from tokenmill import __version__


def test_the_document_and_its_page_need_no_key() -> None:
    with Served(api_keys=("k",), root_path="/llm") as served:
        with urllib.request.urlopen(f"{served.url}/openapi.json", timeout=20) as answer:
            document = json.load(answer)
            assert answer.headers["content-type"] == "application/json"
        with urllib.request.urlopen(f"{served.url}/llm/docs", timeout=20) as answer:
            page, policy = answer.read().decode(), answer.headers["content-security-policy"]
    assert (document["info"]["version"], document["servers"]) == (__version__, [{"url": "/llm"}])
    assert "/v1/chat/completions" in document["paths"] and "/v1/chat/completions" in page
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy

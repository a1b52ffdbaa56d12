"""docs/operate/limits.md says what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.api import encoder as tokens
from tokenmill.api import jobs, sandbox
from tokenmill.api.openai import tokenize as tokenizing
from tokenmill.api.responses import items
from tokenmill.api.responses import parse as outline
from tokenmill.cli import workers
from tokenmill.core.units import KiB, MiB
from tokenmill.net import handshake
from tokenmill.net.tcp import LinkBounds
from tokenmill.server import limits as budget
from tokenmill.server import response_store as store
from tokenmill.text import chat_template as chat
from tokenmill.text.grammar import matcher
from tokenmill.worker import grammars

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operate" / "limits.md").read_text(encoding="utf8")


@pytest.mark.parametrize(
    "said",
    [
        f"a body of more than {sandbox.HEAVY_BYTES // MiB} MiB, or of more than {sandbox.HEAVY_VALUES:,} JSON values",
        f"a text of more than {tokens.KNOWN_CHARS:,} characters",
        f"| processor time of a job | {jobs.JOB_S:g} s |",
        f"| processor time of a rendering | {jobs.RENDER_S:g} s |",
        f"| processor time of making and checking a grammar | {jobs.GRAMMAR_S:g} s |",
        f"| memory of the child that compiles grammars | {jobs.RENDER_BYTES // MiB} MiB |",
        f"(which tokens may come next; 0.2 ms and more) | {grammars.SPENT_S:g} s and 2 ms for each token |",
        f"| processor time of slow masks that are asked for together | {1e3 * grammars.STEP_S:g} ms and the mask",
        f"| what the engine keeps of a grammar | {matcher._MAX_LEXER_STATES:,} states of its lexer |",
        f"| memory of a heavy job | {jobs.JOB_BYTES // MiB} MiB |",
        f"| memory of the child that renders | {jobs.RENDER_BYTES // MiB} MiB |",
        f"| a template | {chat.MAX_TEMPLATE_CHARS:,} characters |",
        f"| a rendered prompt | {chat.MAX_PROMPT_CHARS:,} characters |",
        f"| text of `/tokenize` | {tokenizing.MAX_TOKENIZE_CHARS:,} characters |",
        f"| ids of `/detokenize` | {tokenizing.MAX_DETOKENIZE_TOKENS:,} |",
        f"| what a job gives back | {jobs.MAX_RESULT_BYTES // MiB} MiB |",
        f"{budget.REPLY_BYTES // KiB} KiB for each open request",
        f"| age | {store.KEPT_S // 3600} h |",
        f"| bytes of all responses with their inputs | {store.MAX_BYTES // MiB} MiB |",
        f"| body of a call that is to be kept | {store.ResponseStore('').max_record_bytes // MiB} MiB |",
        f"| responses that one continues | {store.MAX_CHAIN:,}, together",
        f"| items of an input, and parts of an item | {items.MAX_ITEMS:,} |",
        f"| stored items that an input names | {outline.MAX_REFERENCES} |",
        f"| a message | {handshake.GREETING_BYTES:,} bytes |",
        f"| time for TLS and the handshake | {LinkBounds().greeting_s:g} s |",
        f"| connections in the handshake | {LinkBounds().max_greeting} |",
        f"plus {workers.TOKEN_BYTES} bytes for each token",
        f"silent for {LinkBounds().silence_s:g} s",
    ],
)
def test_the_page_names_each_limit(said: str) -> None:
    assert said in PAGE

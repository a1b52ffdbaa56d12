"""The list of models as Anthropic's API has it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any


def model_body(card: dict[str, Any]) -> dict[str, Any]:
    """`card`: OpenAI's, with vLLM's max_model_len."""
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }


def page_body(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All of them on one page."""
    data = [model_body(card) for card in cards]
    return {"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}

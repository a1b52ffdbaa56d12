"""Anthropic's API: POST /v1/messages and /v1/messages/count_tokens, and the list of models in its shape."""

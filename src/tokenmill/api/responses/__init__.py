"""OpenAI's /v1/responses: items in, items out, and what is kept of both between calls."""

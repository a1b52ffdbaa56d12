"""What each endpoint and field of Anthropic's API means, in a line each, for docs/api.md."""

from __future__ import annotations

ENDPOINTS = {
    "POST /v1/messages": "Anthropic's: messages in, one answer of content blocks out, whole or as events: "
    "[messages.md](messages.md).",
    "POST /v1/messages/count_tokens": "Anthropic's: how many tokens the prompt of such a call has.",
}
MESSAGES = {
    "max_tokens": "most tokens of the answer, which must be given (but to count); what the context has no room for is "
    "left out; 0 computes the prompt, for later calls to find in the cache",
    "messages": "the conversation: `role` (user, assistant, system) and `content`, a string or blocks of type text, "
    "tool_use, tool_result and thinking; a last message of the assistant is continued",
    "system": "a string or text blocks",
    "stop_sequences": "texts that end the answer, as `stop` of chat",
    "tools": "functions that the model may call: `name`, `description`, `input_schema`, `strict`, `input_examples`; "
    "with `type` null or `custom`",
    "tool_choice": "whether it has to",
    "tool_choice.type": "`auto`, `any`, `tool` (the one of that `name`) or `none`",
    "tool_choice.disable_parallel_tool_use": "one call at most",
    "thinking": "whether the model thinks first, where it can (default: it does not)",
    "thinking.type": "`enabled`, `adaptive` or `disabled`",
    "thinking.budget_tokens": "most tokens of it, below `max_tokens`; where `enabled`",
    "thinking.display": "`summarized` shows it, all of it; `omitted` does not",
    "output_config": "what the answer is to be",
    "output_config.effort": "a variable of the template, `reasoning_effort`: low, medium, high, xhigh or max",
    "output_config.format": 'answers fit a schema: {"type": "json_schema", "schema"}',
    "output_format": "its older name",
    "context_management": "edits of the conversation",
    "context_management.edits": "none but clear_thinking_20251015 with `keep` all",
    "cache_control": "`ephemeral`; prefixes are cached without it. Also in blocks and tools",
}
KINDS = {
    "system": "string or array of objects",
    "cache_control": "object",
    "context_management.edits": "array of objects",
    "stop_sequences": "array of strings",
}
BODIES = [
    {
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
        "tool_choice": {"type": "none"},
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "low"},
    },
    {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "context_management": {"edits": []}},
]

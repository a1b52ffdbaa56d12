"""What each endpoint and field of /v1/responses means, in a line each, for docs/api.md."""

from __future__ import annotations

ENDPOINTS = {
    "POST /v1/responses": "OpenAI's responses: items in, items out, whole or as events: [responses.md](responses.md).",
    "POST /v1/responses/input_tokens": "How many tokens the model would be given for such a body.",
    "GET /v1/responses/{response_id}": "One that is kept, or under way.",
    "DELETE /v1/responses/{response_id}": "Forget it.",
    "POST /v1/responses/{response_id}/cancel": "End one that is under way.",
    "GET /v1/responses/{response_id}/input_items": "What the model was given, by `limit`, `order` and `after`.",
}
RESPONSE = {
    "input": "a text, or items: messages, calls and their outputs, `reasoning`, `item_reference`",
    "instructions": "a system message before the input, of this call alone",
    "previous_response_id": "go on from a response that is kept, with all that it goes on from",
    "store": "keep the response for a day (default: true, unless `--responses-store off`)",
    "max_output_tokens": "most tokens of the answer, reasoning and calls included (default: the rest of the context)",
    "text": "`format` (`text`, `json_object`, `json_schema` with `name`, `schema`, `strict`), `verbosity`",
    "text.format": "what the answer's text is held to",
    "text.format.type": "`text`, `json_object` or `json_schema`",
    "text.verbosity": "`medium`",
    "tools": "functions: `{type, name, description, parameters, strict}`, also in a `namespace`; others are left out",
    "tool_choice": "`none`, `auto`, `required`, `{type: function, name}`, `{type: allowed_tools, mode, tools}`",
    "parallel_tool_calls": "false: at most one call",
    "max_tool_calls": "counts calls of built-in tools, of which there are none",
    "reasoning": "`effort`, `summary`",
    "reasoning.effort": "a variable of the template, as `reasoning_effort` of chat",
    "reasoning.summary": "`auto`: reasoning is given as it is",
    "reasoning.generate_summary": "its older name",
    "reasoning.context": "`auto`",
    "reasoning.mode": "`standard`",
    "include": "`message.output_text.logprobs`; the others name what never occurs here, or reasoning, which is given",
    "top_logprobs": "log probabilities with so many alternatives; needs `include`",
    "truncation": "`disabled` refuses too long an input, `auto` leaves its earliest turns out (default: `disabled`)",
    "metadata": "up to 16 pairs of texts, given back",
    "user": "given back",
    "safety_identifier": "given back",
    "prompt_cache_key": "given back",
    "stream_options.include_obfuscation": "false: nothing is added to events",
}

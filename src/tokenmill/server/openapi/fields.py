"""What the fields of request bodies are, those of OpenAI's API and of this server's own: kind and meaning of each.

/openapi.json and docs/use/api.md are made of these tables. A test compares them with what the parsers read, so a new
field needs a line here. Settings of draws have theirs in core/sampling.py.
"""

from __future__ import annotations

from ...core.sampling import SETTINGS, Setting
from .schemas import bound

Told = dict[str, tuple[str, str]]
"""name -> (kind, meaning); "a.b" is the field b of the object a. What a kind may be: schemas.schema_of."""


def kind_of(declared: Setting) -> str:
    if isinstance(declared.default, tuple):
        return "array of strings"
    low, high = bound(declared.low), bound(declared.high)
    name = "integer" if isinstance(declared.default, int) else "number"
    return f"{name}, above {low}, to {high}" if declared.above else f"{name}, {low} to {high}"


CONSTRAINTS: Told = {
    "response_format": (
        "object",
        "OpenAI's form of the answer ([how](structured-output.md)): `type` is `text`, `json_object`, "
        "`json_schema` (with `json_schema` of `name`, `schema`, `strict`), `structural_tag` (`structures`, "
        "`triggers`), `regex` (`pattern`) or `grammar` (`grammar`)",
    ),
    "structured_outputs": (
        "object",
        "vLLM's: one of `json`, `json_object`, `regex`, `choice`, `grammar`, `structural_tag`; with "
        "`whitespace_pattern`, `disable_any_whitespace`",
    ),
    "guided_json": ("object or string", "vLLM's older fields: a JSON schema, as an object or text"),
    "guided_json_object": ("boolean", "true: any JSON object"),
    "guided_regex": ("string", "a pattern that the whole answer matches"),
    "guided_choice": ("array of strings", "texts, of which one is the answer"),
    "guided_grammar": ("string", "a grammar in GBNF or Lark"),
    "guided_whitespace_pattern": ("string", "what may stand between the tokens of JSON"),
    "grammar": (
        "string or object",
        "llama-server's: a grammar in GBNF or Lark. TGI's: `type` (`json`, `regex`) and `value`",
    ),
    "grammar_string": ("string", "another name of it"),
    "ebnf": ("string", "SGLang's name of it"),
    "json_schema": ("object or string", "a JSON schema, as an object or text"),
    "regex": ("string", "SGLang's: a pattern that the whole answer matches"),
    "structural_tag": ("object or string", "vLLM's: `structures` and `triggers`, as an object or text"),
    "guided_decoding_backend": ("string", "read and not needed: there is one"),
    "grammar_lazy": ("boolean", "only false"),
    "grammar_triggers": ("array", "only empty"),
    "preserved_tokens": ("array", "only empty"),
}
SAMPLING: Told = {
    "n": ("integer, 1 to 128", "answers to each prompt"),
    "best_of": (
        "integer, 1 to 20",
        "`n`; with `use_beam_search` the beams that are kept, of which the best `n` are told",
    ),
    "beam_width": ("integer, 1 to 20", "the same, only with `use_beam_search`"),
    "use_beam_search": (
        "true or false",
        "look for the likeliest answers instead of drawing ([sampling.md](sampling.md#beam-search)); not while "
        "streaming, nor with penalties, biases, `stop`, `prompt_logprobs`, `echo` or constraints",
    ),
    "length_penalty": ("number, -10 to 10", "of a beam search: above 0 favours long answers (default: 1)"),
    "early_stopping": ("true, false or string", "of a beam search: true, false or `never`"),
    **{name: (kind_of(declared), declared.meaning) for name, declared in SETTINGS.items()},
    "repeat_last_n": ("integer", "-1; others only where no penalty is set: penalties cover the whole sequence"),
    "seed": ("integer, -2^63 to 2^64 - 1", "same seed, same answer; without one, each prompt draws its own"),
    "min_tokens": ("integer, 0 to 2^31 - 1", "nothing ends the answer before so many"),
    "ignore_eos": ("true or false", "the model's end token ends nothing"),
    "loop_guard": (
        "true or false",
        "end the answer with `length` and a `warning` once its last 512 tokens have a period of at most 64; not where "
        "it follows a grammar (default: as `--loop-guard` says, but false with `ignore_eos`)",
    ),
    "stop": ("string or array of strings", "up to 16 texts that end the answer, of up to 1,024 characters each"),
    "stop_token_ids": ("array of integers", "token ids that end the answer, up to 1,024"),
    "include_stop_str_in_output": ("true or false", "the text or token that ended it is part of the answer"),
    "bad_words": ("array of strings", "texts that are never written, up to 512 of 4,096 characters together"),
    "allowed_token_ids": ("array of integers", "nothing but these is drawn; at least one"),
    "logit_bias": ("object", "token id to a bias of -100 to 100, for up to 1,024 tokens"),
    "skip_special_tokens": ("true or false", "special tokens are not shown"),
    "prompt_logprobs": (
        "integer, 0 to 20",
        "log probabilities of the prompt's tokens, with so many alternatives; not while streaming",
    ),
}
ANSWER: Told = {
    "model": ("string", "the model or an adapter by its name; none: the model"),
    "stream": ("true or false", "answer by server-sent events"),
    "stream_interval": (
        "integer, 1 to 2^31 - 1",
        "tokens of each chunk behind the first; larger chunks cost less (default: `--stream-interval`)",
    ),
    "stream_options": ("object", "only where `stream` is true"),
    "stream_options.include_usage": ("true or false", "the last event carries the counts of tokens"),
    "stream_options.continuous_usage_stats": ("true or false", "every event does"),
    "truncate_prompt_tokens": (
        "integer, -1 to 2^31 - 1",
        "keep so many tokens of the prompt; -1: as many as fit; not 0 (default: a prompt that is too long is refused)",
    ),
    "truncation_side": ("string", "`left` or `right`: the end that is cut (default: `left`)"),
    "priority": (
        "integer, -2^31 to 2^31 - 1",
        "lower runs earlier; at least what `--max-priority` says; with 2147483647 it has what others leave "
        "(default: 0)",
    ),
    "cache_salt": ("string", "cached prefixes are shared only with calls of the same salt; not empty"),
    "priority_class": (
        "integer, 0 to 2",
        "0, 1 or 2: lower classes run first, whatever the priorities in them; not below the caller's own "
        "([tenants](../operate/tenants.md)) (default: the caller's own)",
    ),
    "service_tier": (
        "string",
        "OpenAI's: `flex` is `priority_class` 2; `auto`, `default`, `priority` and `scale` are the caller's own",
    ),
    "speculative": (
        "object",
        "limits of what is drafted for it ([speculation](../operate/speculation.md)), which lower the server's and "
        'never change an answer; also as llama-server has them, `"speculative.n_max"` in the body itself',
    ),
    "speculative.n_max": ("integer, 0 to 2^31 - 1", "most tokens drafted in a step; 0: none are"),
    "speculative.n_min": ("integer, 0 to 2^31 - 1", "none is drafted where fewer than this are worth it"),
    "speculative.p_min": ("number, 0 to 1", "no token is drafted that is right with a lower probability"),
    "prediction": (
        "object",
        "OpenAI's: `type` `content`, and `content`, a string or parts of text that the answer is expected to repeat. "
        "A server with `--speculative-config` drafts from it, as far as the context has room for it "
        "([speculation](../operate/speculation.md)); any other leaves it out",
    ),
    "slo": (
        "string or object",
        "latency objectives ([profiles](../operate/slo.md)): the name of a profile, or an object with targets of its "
        "own. "
        "Headers of gateways are read too: `x-slo-ttft-ms`, `x-slo-tpot-ms` (default: the tenant's, or `--slo`)",
    ),
    "slo.profile": ("string", "`chat`, `code`, `rag`, `agent`, `batch`, `content` or `edge`"),
    "slo.ttft_ms": ("integer, 1 to 3,600,000", "milliseconds to the first token (default: the profile's)"),
    "slo.tpot_ms": (
        "integer, 1 to 3,600,000",
        "milliseconds for each further token on average (default: the profile's)",
    ),
    "kv_hints": (
        "object",
        "what becomes of the KV of prompt and answer once it has ended; needs a KV store with tiers "
        "([more](../operate/kv-tiers.md#across-machines-and-the-router))",
    ),
    "kv_hints.keep_s": (
        "integer, 0 to 86,400",
        "seconds for which it is kept there; 0: it is not (default: `--kv-keep-tools-s` where the answer ends in "
        "calls of tools, else it is not)",
    ),
    "kv_transfer_params": (
        "object",
        "hand KV over from one server to another ([how](../operate/kv.md)); needs `--kv-save` or a KV store with tiers "
        "([more](../operate/kv-tiers.md))",
    ),
    "kv_transfer_params.do_remote_decode": (
        "true or false",
        "answer when the KV is saved; the answer's `kv_transfer_params` are for the next call, null where saving "
        "failed; not while streaming",
    ),
    "kv_transfer_params.do_remote_prefill": ("true or false", "look first for KV that another server has saved"),
    "request_id": (
        "string",
        "becomes part of the answer's id; 1 to 256 printable characters; also by the header X-Request-Id",
    ),
    "return_token_ids": ("true or false", "tokens beside text"),
    "return_tokens_as_token_ids": ("true or false", "log probabilities name tokens `token_id:N`"),
    "add_special_tokens": (
        "true or false",
        "whether the tokenizer adds its special tokens (default: to text, not to rendered messages)",
    ),
    **CONSTRAINTS,
}
CHAT: Told = {
    "messages": (
        "array of objects",
        "the conversation: `role` (system, developer, user, assistant, tool, function) and `content`, a string or "
        "text parts",
    ),
    "chat_template": ("string", "another Jinja template; only with `--trust-request-chat-template`"),
    "chat_template_kwargs": ("object", "further variables of the template"),
    "reasoning_effort": (
        "string",
        "a variable of the template; `none` also sets `enable_thinking` and `thinking` to false there",
    ),
    "verbosity": ("string", "a variable of the template: `low`, `medium` or `high`; one that lacks it overlooks it"),
    "include_reasoning": ("true or false", "false: reasoning is left out of the answer"),
    "separate_reasoning": ("true or false", "false: reasoning stays in the content, with its marks"),
    "reasoning_format": ("string", "`none`, the same; `auto`, `deepseek`"),
    "thinking_token_budget": ("integer, -1 to 2^31 - 1", "most tokens of reasoning; -1: any number"),
    "thinking_budget_tokens": ("integer, -1 to 2^31 - 1", "another name of it"),
    "reasoning_budget": ("integer, -1 to 2^31 - 1", "another name of it"),
    "add_generation_prompt": (
        "true or false",
        "the prompt ends where the assistant begins to speak (default: unless `continue_final_message` is true)",
    ),
    "continue_final_message": ("true or false", "the last message is left open and continued"),
    "max_completion_tokens": (
        "integer, 1 to 2^31 - 1",
        "most tokens of the answer (default: [as the server is set](sampling.md#how-long-an-answer-may-be), else 4,096 "
        "or the rest of the context)",
    ),
    "max_tokens": ("integer, 1 to 2^31 - 1", "its older name"),
    "logprobs": ("true or false", "log probabilities of the answer's tokens"),
    "top_logprobs": ("integer, 0 to 20", "with so many alternatives; needs `logprobs`"),
    "tools": (
        "array of objects",
        "functions that the model may call, each with `name`, `description`, `parameters` (a JSON schema) and "
        "`strict`; or that take a text, `custom`, of a grammar or free ([how](tools.md))",
    ),
    "tool_choice": ("string", "`auto`, `none`, `required`, or the function that must be called (default: `auto`)"),
    "parallel_tool_calls": ("true or false", "false: at most one call in an answer"),
    "functions": ("array of objects", "the older form of `tools`"),
    "function_call": ("string or object", "the older form of `tool_choice`; the answer has a `function_call`"),
}
COMPLETION: Told = {
    "prompt": ("string or array", "a string, token ids, or an array of up to 1,024 of either"),
    "max_tokens": (
        "integer, 0 to 2^31 - 1",
        "most tokens of the answer; 0 only with `echo`: the prompt is scored (default: as the server is set, else 16)",
    ),
    "logprobs": (
        "integer, 0 to 20",
        "log probabilities of the answer's tokens, with so many alternatives; tokens that are no whole character "
        "are named `bytes:\\xNN`, the second of two with one text `token_id:N`",
    ),
    "echo": ("true or false", "the answer begins with the prompt"),
}
POOLING: Told = {
    "model": ("string", "the model by its name; none: the model"),
    "use_activation": (
        "true or false",
        "false: vectors and scores as the model gives them, not scaled (default: as usual for the model)",
    ),
    "normalize": ("true or false", "another name of it"),
    "truncate_prompt_tokens": ANSWER["truncate_prompt_tokens"],
    "truncation_side": ("string", "`left` or `right`: the end that is cut (default: `right`)"),
    "priority": ANSWER["priority"],
    "cache_salt": ANSWER["cache_salt"],
    "priority_class": ANSWER["priority_class"],
    "service_tier": ANSWER["service_tier"],
    "request_id": ANSWER["request_id"],
}
EMBEDDING: Told = {
    "input": ("string or array", "a string, token ids, or an array of up to 2,048 of either"),
    "encoding_format": ("string", "`float` or `base64` (little-endian float32) (default: `float`)"),
    "dimensions": ("integer, 1 to 2^31 - 1", "keep the first so many values of a vector; at most what the model gives"),
    "prompt_name": ("string", "of the model's own prompts, the one to put before each input"),
}
SCORE: Told = {
    "text_1": ("string or array", "a text, or up to 2,048"),
    "queries": ("string or array", "another name of it"),
    "text_2": ("string or array", "a text, or as many as there are first ones; one first text goes with all"),
    "documents": ("string or array", "another name of it"),
}
RERANK: Told = {
    "query": ("string", "a text"),
    "documents": ("string or array", "up to 2,048 texts, or objects with `text`"),
    "top_n": ("integer, 1 to 2^31 - 1", "most results (default: all)"),
    "return_documents": ("true or false", "results carry the documents (default: true)"),
}
TOKENIZE: Told = {
    "content": ("string", "the text as llama-server calls it, whose answer is that server's then"),
    "add_special": (
        "true or false",
        "with `content`: with the tokens that the model puts around a text (default: false)",
    ),
    "parse_special": ("true or false", "with `content`: special tokens that it spells count as such (default: true)"),
    "with_pieces": ("true or false", "with `content`: each token with what it stands for, as text or bytes"),
    "prompt": (
        "string",
        "a text of up to 4,194,304 characters; or give `messages` and what goes with them, as for chat",
    ),
    **{
        name: CHAT[name]
        for name in (
            "messages",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "functions",
            "function_call",
            "chat_template",
            "chat_template_kwargs",
            "reasoning_effort",
            "verbosity",
            "add_generation_prompt",
            "continue_final_message",
        )
    },
    "add_special_tokens": ANSWER["add_special_tokens"],
    "return_token_strs": ("true or false", "the tokens' texts beside their ids"),
    "model": ANSWER["model"],
}
DETOKENIZE: Told = {
    "tokens": ("array of integers", "token ids, up to 100,000"),
    "model": ANSWER["model"],
}
LOAD_ADAPTER: Told = {
    "lora_name": (
        "string, not empty",
        "the name it is served under: up to 200 printable characters, not the model's own",
    ),
    "lora_path": ("string, not empty", "its folder, relative to `--lora-dir`, without which nothing is loaded"),
    "load_inplace": ("true or false", "an adapter of that name is replaced"),
}
UNLOAD_ADAPTER: Told = {"lora_name": ("string, not empty", "the name it is served under")}
RESPONSE: Told = {
    "input": ("string or array", "a text, or items: messages, calls and their outputs, `reasoning`, `item_reference`"),
    "instructions": ("string", "a system message before the input, of this call alone"),
    "previous_response_id": ("string", "go on from a response that is kept, with all that it goes on from"),
    "conversation": (
        "string or object",
        "the id of a conversation, or `{id: that}`: its items come before the input, and input and output are put "
        "behind them; instead of `previous_response_id`",
    ),
    "background": (
        "true or false",
        "answer at once, and compute whether the client waits or leaves: `GET /v1/responses/{id}` shows it "
        "([responses.md](responses.md#in-the-background))",
    ),
    "store": ("true or false", "keep the response for a day (default: true, unless `--responses-store off`)"),
    "max_output_tokens": (
        "integer, 1 to 2^31 - 1",
        "most tokens of the answer, reasoning and calls included (default: as for chat)",
    ),
    "text": ("object", "`format` (`text`, `json_object`, `json_schema` with `name`, `schema`, `strict`), `verbosity`"),
    "text.format": ("object", "what the answer's text is held to"),
    "text.format.type": ("string", "`text`, `json_object` or `json_schema`"),
    "text.verbosity": ("string", "as `verbosity` of chat"),
    "tools": (
        "array of objects",
        "functions: `{type, name, description, parameters, strict}`, also in a `namespace`, and custom tools: `{type, "
        "name, description, format}`, and with `--allowed-mcp-servers` MCP servers ([how](responses.md#mcp-servers)); "
        "others are left out",
    ),
    "tool_choice": (
        "string",
        "`none`, `auto`, `required`, `{type: function, name}`, `{type: allowed_tools, mode, tools}`",
    ),
    "parallel_tool_calls": ("true or false", "false: at most one call"),
    "max_tool_calls": ("integer, 1 to 2^31 - 1", "counts calls of built-in tools, of which there are none"),
    "reasoning": ("object", "`effort`, `summary`"),
    "reasoning.effort": ("string", "a variable of the template, as `reasoning_effort` of chat"),
    "reasoning.summary": ("string", "`auto`: reasoning is given as it is"),
    "reasoning.generate_summary": ("string", "its older name"),
    "reasoning.context": ("string", "`auto`"),
    "reasoning.mode": ("string", "`standard`"),
    "include": (
        "array of strings",
        "`message.output_text.logprobs`; the others name what never occurs here, or reasoning, which is given",
    ),
    "top_logprobs": ("integer, 0 to 20", "log probabilities with so many alternatives; needs `include`"),
    "truncation": (
        "string",
        "`disabled` refuses too long an input, `auto` leaves its earliest turns out (default: `disabled`)",
    ),
    "metadata": ("object", "up to 16 pairs of texts, given back"),
    "user": ("string", "given back"),
    "safety_identifier": ("string", "given back"),
    "prompt_cache_key": ("string", "given back"),
    "stream_options.include_obfuscation": ("true or false", "false: nothing is added to events"),
}

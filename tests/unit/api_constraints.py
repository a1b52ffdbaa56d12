"""What the fields that constrain an answer mean, for docs/api.md."""

from __future__ import annotations

CONSTRAINTS = {
    "response_format": "OpenAI's form of the answer ([how](structured-output.md)): `type` is `text`, `json_object`, "
    "`json_schema` (with `json_schema` of `name`, `schema`, `strict`), `structural_tag` (`structures`, `triggers`), "
    "`regex` (`pattern`) or `grammar` (`grammar`)",
    "structured_outputs": "vLLM's: one of `json`, `json_object`, `regex`, `choice`, `grammar`, `structural_tag`; with "
    "`whitespace_pattern`, `disable_any_whitespace`",
    "guided_json": "vLLM's older fields: a JSON schema, as an object or text",
    "guided_json_object": "true: any JSON object",
    "guided_regex": "a pattern that the whole answer matches",
    "guided_choice": "texts, of which one is the answer",
    "guided_grammar": "a grammar in GBNF or Lark",
    "guided_whitespace_pattern": "what may stand between the tokens of JSON",
    "grammar": "llama-server's: a grammar in GBNF or Lark. TGI's: `type` (`json`, `regex`) and `value`",
    "grammar_string": "another name of it",
    "ebnf": "SGLang's name of it",
    "json_schema": "a JSON schema, as an object or text",
    "regex": "SGLang's: a pattern that the whole answer matches",
    "structural_tag": "vLLM's: `structures` and `triggers`, as an object or text",
    "guided_decoding_backend": "read and not needed: there is one",
    "grammar_lazy": "only false",
    "grammar_triggers": "only empty",
    "preserved_tokens": "only empty",
}

KINDS = {
    "guided_json": "object or string",
    "guided_json_object": "boolean",
    "guided_regex": "string",
    "guided_choice": "array of strings",
    "guided_grammar": "string",
    "grammar": "string or object",
    "grammar_string": "string",
    "ebnf": "string",
    "json_schema": "object or string",
    "regex": "string",
    "structural_tag": "object or string",
    "guided_decoding_backend": "string",
    "grammar_lazy": "boolean",
    "grammar_triggers": "array",
    "preserved_tokens": "array",
}

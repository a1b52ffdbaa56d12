"""Tools through the openai package, there and back, in every family's form: a checkpoint of random weights, with marks
as tokens of its own and a chat template that is written as those of the family are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from kill import METADATA, write_model
from serving import Server

from scripted import SPECIAL, make_text_model
from tokenmill.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

TEMPLATES = Path(__file__).parent / "templates"
VOCAB = METADATA["vocab_size"]
ARGUMENTS = '"arguments": $ARGS}'


@dataclass(frozen=True)
class Form:
    """specials  tokens of the vocabulary
    written      how the prompt shows a call, $ARGS being its arguments
    may_think    the template knows reasoning that ends with a token of its own
    avoids       what reasoning begins with that does not, which the model is to leave
    is_parallel  several calls may be in one answer
    thinks       fields of a body by which the model thinks, and those by which it does not
    """

    specials: Sequence[str]
    written: str
    is_parallel: bool = True
    may_think: bool = False
    avoids: str = ""
    thinks: tuple[dict[str, Any], dict[str, Any]] | None = None


def switch(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"chat_template_kwargs": {name: True}}, {"chat_template_kwargs": {name: False}}


HERMES = '<tool_call>\n{"name": "$NAME", ' + ARGUMENTS + "\n</tool_call>"
LISTED = '<|tool_call|>[{"name": "$NAME", ' + ARGUMENTS + "]"
DEEPSEEK = [
    f"<｜{name}｜>" for name in ("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep")
]
FORMS = {
    "qwen25": Form([], HERMES),
    "qwen3": Form(
        ["<tool_call>", "</tool_call>", "<think>", "</think>"], HERMES, may_think=True, thinks=switch("enable_thinking")
    ),
    "llama31": Form(["<|python_tag|>"], '\n\n{"name": "$NAME", "parameters": $ARGS}', is_parallel=False),
    "mistral": Form(["[TOOL_CALLS]"], '[TOOL_CALLS] [{"name": "$NAME", "arguments": $ARGS, "id": "'),
    "magistral": Form(
        ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"], "[TOOL_CALLS]$NAME[ARGS]$ARGS", may_think=True
    ),
    "granite": Form(["<|tool_call|>"], LISTED, avoids="H"),
    "deepseek_r1": Form(
        [*DEEPSEEK, "<think>", "</think>"],
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$NAME\n```json\n$ARGS\n```<｜tool▁call▁end｜>",
        may_think=True,
    ),
    "deepseek_v31": Form(
        [*DEEPSEEK, "<think>", "</think>"],
        "<｜tool▁call▁begin｜>$NAME<｜tool▁sep｜>$ARGS<｜tool▁call▁end｜>",
        may_think=True,
        thinks=switch("thinking"),
    ),
    "phi4": Form(["<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"], LISTED + "<|/tool_call|>"),
    "phi4_mini": Form(["<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"], LISTED + "<|/tool_call|>"),
    "gpt_oss": Form(
        ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|return|>", "<|call|>"],
        "<|start|>assistant to=functions.$NAME<|channel|>commentary json<|message|>$ARGS<|call|>",
        is_parallel=False,
        may_think=True,
    ),
}

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 6}, "units": {"enum": ["C", "F"]}},
        "required": ["city", "units"],
        "additionalProperties": False,
    },
    "add": {
        "type": "object",
        "properties": {
            "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3}
        },
        "required": ["numbers"],
        "additionalProperties": False,
    },
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"Does {name}", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ASKED: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather?"}]


@dataclass
class Family:
    form: Form
    tokenizer: Tokenizer
    client: openai.OpenAI

    def ask(self, **fields: Any) -> Any:
        """Whoever may think does so for six tokens at most."""
        if self.form.may_think:
            fields["extra_body"] = {"thinking_token_budget": 6} | fields.get("extra_body", {})
        if self.form.avoids:
            fields["logit_bias"] = {str(self.tokenizer.token_id(self.form.avoids)): -100} | fields.get("logit_bias", {})
        settings = {"messages": ASKED, "tools": TOOLS, "max_tokens": 400, "seed": 1, "parallel_tool_calls": False}
        return self.client.chat.completions.create(model="tiny", **(settings | fields))

    def calls(self, choice: Any) -> list[tuple[str, dict[str, Any]]]:
        """Of an answer that ended by itself; each fits its schema."""
        assert choice.finish_reason == "tool_calls" and choice.message.content is None, choice
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        for name, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[name])
        return calls


@pytest.fixture(scope="module", params=FORMS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    name, form = request.param, FORMS[request.param]
    folder = write_model(tmp_path_factory.mktemp(name))
    tokenizer = make_text_model(specials=form.specials).tokenizer
    assert tokenizer.vocab_size <= VOCAB
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    config = {
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "chat_template": (TEMPLATES / f"{name}.jinja").read_text(),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with (
        Server("--served-model-name", "tiny", "--kv-cache-memory-bytes", "16MiB", model=str(folder)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        yield Family(form, tokenizer, client)


def test_required_and_named_calls(family: Family) -> None:
    names = set()
    for seed in range(4):
        ((name, _),) = family.calls(family.ask(tool_choice="required", seed=seed).choices[0])
        names.add(name)
    assert names <= SCHEMAS.keys()
    for name in SCHEMAS:
        named: Any = {"type": "function", "function": {"name": name}}
        ((called, _),) = family.calls(family.ask(tool_choice=named).choices[0])
        assert called == name


def test_parallel_calls(family: Family) -> None:
    """Some answers have several, where the form allows it; whatever is whole fits."""
    most = 0
    ends = [family.tokenizer.token_id(text) for text in (SPECIAL[2], "]", DEEPSEEK[1])]
    for seed in range(64 if family.form.is_parallel else 8):
        if most > 1:
            break
        bias = {str(end): -(seed % 4) for end in ends if end is not None}
        answer = family.ask(tool_choice="required", parallel_tool_calls=True, seed=seed, logit_bias=bias)
        choice = answer.choices[0]
        if choice.finish_reason == "tool_calls":
            most = max(most, len(family.calls(choice)))
    assert most > 1 if family.form.is_parallel else most == 1


def test_a_stream_adds_up_to_the_whole(family: Family) -> None:
    for seed, several in ((3, False), (4, True)):
        given = {"tool_choice": "required", "seed": seed, "parallel_tool_calls": several}
        whole = family.ask(**given).choices[0]
        names, texts, reasons = [], [], []
        for chunk in family.ask(stream=True, **given):
            (choice,) = chunk.choices
            assert not choice.delta.content
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or ():
                if call.id:
                    names.append(call.function.name)
                    texts.append("")
                texts[call.index] += call.function.arguments or ""
        said = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
        assert said == list(zip(names, texts, strict=True)) and reasons == [whole.finish_reason]


def test_a_result_goes_back(family: Family) -> None:
    """The prompt shows the call in the family's own form, and what came of it; without tools too."""
    message = family.ask(tool_choice="required").choices[0].message
    (call,) = message.tool_calls
    history = [*ASKED, message, {"role": "tool", "tool_call_id": call.id, "content": "it rains"}]
    arguments = json.dumps(json.loads(call.function.arguments), ensure_ascii=False)
    written = family.form.written.replace("$NAME", call.function.name).replace("$ARGS", arguments)
    for tools in (TOOLS, openai.NOT_GIVEN):
        answer = family.ask(
            messages=history,
            tools=tools,
            parallel_tool_calls=openai.NOT_GIVEN,
            max_tokens=8,
            extra_body={"return_token_ids": True},
        )
        prompt = family.tokenizer.decode(answer.prompt_token_ids, skip_special=False)
        assert written in prompt and "it rains" in prompt, prompt
        assert ("Does get_weather" in prompt) == (tools is TOOLS)
        assert answer.choices[0].finish_reason


def test_the_model_may_call_and_strict_tools_fit(family: Family) -> None:
    """Left to itself the model says anything; led to the family's mark, it goes on with a call that fits."""
    free = family.ask(tool_choice="auto", max_tokens=60).choices[0]
    assert free.message.content or free.message.tool_calls
    mark = family.form.specials[0] if family.form.specials else ""
    if mark not in ("[TOOL_CALLS]", "<|tool_call|>", "<tool_call>", DEEPSEEK[0]):
        return
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    token = family.tokenizer.token_id(mark)
    led = family.ask(tools=strict, tool_choice="auto", logit_bias={str(token): 100}, max_tokens=200).choices[0]
    (call,) = led.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_reasoning_on_and_off(family: Family) -> None:
    """It comes before a call that is demanded, within its budget; where it is switched off there is none."""
    if family.form.thinks is None:
        pytest.skip("this template has no switch")
    on, off = family.form.thinks
    begin = family.tokenizer.token_id("<think>")
    led: Any = {"tool_choice": "required", "logit_bias": {str(begin): 100}}
    answer = family.ask(**led, extra_body={**on})
    message = answer.choices[0].message
    family.calls(answer.choices[0])
    assert message.reasoning and 0 < answer.usage.completion_tokens_details.reasoning_tokens <= 8
    silent = family.ask(tool_choice="required", extra_body=off)
    family.calls(silent.choices[0])
    assert not hasattr(silent.choices[0].message, "reasoning")
    history = [*ASKED, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "it rains"}]
    assert family.ask(messages=history, max_tokens=4, extra_body=on).choices[0].finish_reason

"""Tools and reasoning over HTTP as the openai package meets them, for each family's template; the model is scripted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from scripted import Served, make_text_model
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.text.chat_format import find_chat_format
from tokenmill.text.chat_template import ChatTemplate
from tool_answers import ANSWERS, TOOLS, Said

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }} TOOLS<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}CALL{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MARKS = {
    "json": "",
    "hermes": "<tool_call>",
    "llama3_json": "<|python_tag|>",
    "mistral": "[TOOL_CALLS][ARGS]",
    "mistral_list": "[TOOL_CALLS]",
    "granite": "<|tool_call|>",
    "phi4_mini_json": "<|tool|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>```json",
    "deepseek_v31": "<｜tool▁calls▁begin｜>",
    "qwen3_coder": "<tool_call><function=",
    "harmony": "<|start|><|channel|>",
}
GIVEN = [
    {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }
    for tool in TOOLS
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class Model:
    """Says `answer`, whatever it is asked, and remembers what that was."""

    answer = ""
    prompt = ""

    def __call__(self, prompt: str) -> str:
        self.prompt = prompt
        return self.answer


def serve(marks: str, model: Model) -> Served:
    """A server whose template says which family it is of in a comment."""
    template = CHATML if marks == "" else f"{{# {marks} #}}{CHATML}"
    return served_with(template, model)


def served_with(template: str, model: Model) -> Served:
    """With a context that has room for tools, a token being a byte."""
    text = make_text_model(chat=ChatTemplate(template))
    text = replace(text, chat_format=find_chat_format(template, text.tokenizer))
    return Served(model, text=text, engine=EngineConfig(groups=full_groups(512), max_model_len=4096))


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module")
def served(model: Model) -> Iterator[Served]:
    with serve("<tool_call><think>", model) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with client_of(served) as made:
        yield made


def client_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=20)


def ask(client: openai.OpenAI, **more: Any) -> Any:
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather?"}], "tools": GIVEN} | more
    return client.chat.completions.create(model="toy", **given)


def said_by(message: Any) -> Said:
    calls = tuple((call.function.name, call.function.arguments) for call in message.tool_calls or ())
    return Said(message.content or "", getattr(message, "reasoning_content", None) or "", calls)


def streamed(stream: Any) -> tuple[Said, str]:
    """(what the deltas add up to, the finish_reason), read as a client reads them."""
    content, reasoning, reason = "", "", ""
    calls: list[list[str]] = []
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert call.index == len(calls) and call.type == "function"
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    return Said(content, reasoning, tuple((name, text) for name, text in calls)), reason


@pytest.mark.parametrize("family", MARKS)
def test_each_family_is_served_whole_and_streamed(family: str, model: Model) -> None:
    """What the template shows decides the parser; the deltas of a stream add up to the whole answer."""
    with serve(MARKS[family], model) as served, client_of(served) as client:
        assert served.text.chat_format.tools == family
        for name, text, wanted in ANSWERS:
            if name != family:
                continue
            model.answer = text
            expected = Said(text) if wanted is None else wanted
            whole = ask(client)
            said, reason = streamed(ask(client, stream=True))
            assert said_by(whole.choices[0].message) == said == expected, text
            assert whole.choices[0].finish_reason == reason == ("tool_calls" if expected.calls else "stop")


def test_marks_that_are_special_tokens_are_read_though_special_tokens_are_not_shown(model: Model) -> None:
    template = "{# [TOOL_CALLS][ARGS] #}" + CHATML
    text = make_text_model(specials=("[TOOL_CALLS]", "[ARGS]", "[OTHER]"), chat=ChatTemplate(template))
    text = replace(text, chat_format=find_chat_format(template, text.tokenizer))
    engine = EngineConfig(groups=full_groups(512), max_model_len=4096)
    model.answer = "I look. [OTHER][TOOL_CALLS]now[ARGS]{}"
    with Served(model, text=text, engine=engine) as served, client_of(served) as client:
        message = ask(client).choices[0].message
        assert said_by(message) == Said("I look.", "", (("now", "{}"),))
        assert len(message.tool_calls[0].id) == 9
        assert ask(client, tools=[]).choices[0].message.content == "I look. now{}"


def test_a_call_and_its_result(client: openai.OpenAI, model: Model) -> None:
    """The round trip of an agent, with what the server has answered put back as it came."""
    model.answer = CALL
    first = ask(client).choices[0].message
    assert first.content is None and first.tool_calls[0].id.startswith("call_")
    assert "get_weather" in model.prompt and "TOOLS" in model.prompt
    model.answer = "It rains."
    messages = [
        {"role": "user", "content": "Weather?"},
        first,
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": [{"type": "text", "text": "rain"}]},
    ]
    second = ask(client, messages=messages).choices[0]
    assert (second.message.content, second.message.tool_calls, second.finish_reason) == ("It rains.", None, "stop")
    assert 'CALLget_weather {"city": "Oslo"}' in model.prompt and "tool\nrain" in model.prompt


SHOWN = (
    "{# <tool_call> #}{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "CALL{{ c.function.name }} ARGUMENTS{% endfor %}|{% endfor %}"
)
IS_STRING = "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}"
EACH = "{% for key, value in c.function.arguments | items %}{{ key }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (SHOWN.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}"), "CALLget_weather {}|"),
        (SHOWN.replace("ARGUMENTS", EACH), "CALLget_weather |"),
        (SHOWN.replace("ARGUMENTS", IS_STRING), 'CALLget_weather {"city": "Os|'),
        (SHOWN.replace("ARGUMENTS", "{{ '' + c.function.arguments }}"), 'CALLget_weather {"city": "Os|'),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", '"arguments": {"city": "Os}'),
    ],
)
def test_a_call_that_was_cut_off_locks_no_conversation(model: Model, template: str, shown: str) -> None:
    """An answer that ends within a call's arguments comes back: as text where the template shows text, else as a call
    of nothing; where nobody answers it, it is no call."""
    with served_with(template, model) as served, client_of(served) as client:
        model.answer = CALL
        num_tokens = ask(client).usage.completion_tokens
        asked = {"role": "user", "content": "Weather?"}
        cut = ask(client, max_tokens=num_tokens - len('lo"}}\n</tool_call>')).choices[0]
        (call,) = cut.message.tool_calls
        assert (cut.finish_reason, call.function.arguments) == ("length", '{"city": "Os')
        model.answer = "Well."
        result = {"role": "tool", "tool_call_id": call.id, "content": "no such place"}
        again = ask(client, messages=[asked, cut.message, result, {"role": "user", "content": "Go on."}])
        assert again.choices[0].message.content == "Well."
        assert shown in model.prompt and "no such place" in model.prompt
        ask(client, messages=[asked, cut.message, {"role": "user", "content": "Go on."}])
        assert shown not in model.prompt and "Go on." in model.prompt
        same_id = {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": "{}"}}
        before = [asked, {"role": "assistant", "tool_calls": [same_id]}, result]
        ask(client, messages=[*before, asked, cut.message, {"role": "user", "content": "Go on."}])
        assert "Go on." in model.prompt


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_is_cut_before_its_name_is_no_text(
    client: openai.OpenAI, model: Model, stream: bool
) -> None:
    """Wherever the answer ends; a call that the model makes of its own accord may yet have been text."""
    model.answer = CALL
    for most in range(1, len('<tool_call>\n{"name": "get')):
        how: dict[str, Any] = {"max_tokens": most, "stream": stream}
        answer = ask(client, tool_choice="required", **how)
        said, reason = streamed(answer) if stream else (said_by(answer.choices[0].message), "length")
        assert (said, reason) == (Said("", "", ()), "length")
    free = ask(client, max_tokens=5).choices[0].message
    assert free.content == CALL[:5]


@pytest.mark.parametrize("arguments", ["[1]", "7", '"x"', "nothing", "{" * 3000])
def test_arguments_that_are_no_object_lock_no_conversation(client: openai.OpenAI, model: Model, arguments: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "a", "content": "noon"}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}, result]
    model.answer = "ok"
    assert ask(client, messages=messages).choices[0].message.content == "ok"
    assert "CALLnow {}" in model.prompt and "noon" in model.prompt


def test_tools_that_are_forbidden_are_not_shown(client: openai.OpenAI, model: Model) -> None:
    model.answer = CALL
    message = ask(client, tool_choice="none").choices[0].message
    assert message.content == CALL and message.tool_calls is None and "TOOLS" not in model.prompt


def test_the_older_form(client: openai.OpenAI, model: Model) -> None:
    """functions and function_call: in the answer, in its deltas and in the history."""
    model.answer = CALL
    functions = [tool["function"] for tool in GIVEN]
    choice = ask(client, tools=openai.NOT_GIVEN, functions=functions).choices[0]
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    assert choice.message.function_call.name == "get_weather"
    assert json.loads(choice.message.function_call.arguments) == {"city": "Oslo"}
    deltas = [
        chunk.choices[0].delta.function_call
        for chunk in ask(client, tools=openai.NOT_GIVEN, functions=functions, stream=True)
    ]
    assert [delta.name for delta in deltas if delta and delta.name] == ["get_weather"]
    assert "".join(delta.arguments for delta in deltas if delta) == '{"city": "Oslo"}'
    model.answer = "ok"
    result = {"role": "function", "name": "get_weather", "content": "rain"}
    ask(client, messages=[{"role": "user", "content": "x"}, choice.message, result], tools=[])
    assert "CALLget_weather" in model.prompt and "tool\nrain" in model.prompt


def test_reasoning_is_apart(client: openai.OpenAI, model: Model) -> None:
    model.answer = "<think>\nHm.\n</think>\n\n" + CALL
    whole = ask(client)
    message = whole.choices[0].message
    assert message.reasoning == message.reasoning_content == "Hm." and message.content is None
    assert len(message.tool_calls) == 1
    num_tokens = whole.usage.completion_tokens_details.reasoning_tokens
    assert num_tokens == len("<think>\nHm.\n</think>")  # a token for each byte
    said, reason = streamed(ask(client, stream=True))
    assert (said, reason) == (Said("", "Hm.", (("get_weather", '{"city": "Oslo"}'),)), "tool_calls")


def test_reasoning_may_be_left_out_or_left_in(client: openai.OpenAI, model: Model) -> None:
    model.answer = "<think>Hm.</think>Yes."
    message = ask(client, extra_body={"include_reasoning": False}).choices[0].message
    assert message.content == "Yes." and not hasattr(message, "reasoning")
    for field in ({"separate_reasoning": False}, {"reasoning_format": "none"}):
        assert ask(client, extra_body=field).choices[0].message.content == model.answer
    thoughtless = {"chat_template_kwargs": {"enable_thinking": False}}
    for field in (thoughtless, {"reasoning_effort": "none"}):
        assert ask(client, extra_body=field).choices[0].message.content == "Yes."
        assert model.prompt.endswith("</think>\n\n")


def test_a_prompt_that_opens_reasoning(model: Model) -> None:
    """As DeepSeek-R1's template does: the answer has the closing mark alone."""
    template = CHATML.replace("<|im_start|>assistant\n{%", "<|im_start|>assistant\n<think>\n{%")
    with served_with(template, model) as served, client_of(served) as client:
        model.answer = "Hm.</think>Yes."
        message = ask(client, tools=[]).choices[0].message
        assert (message.reasoning, message.content) == ("Hm.", "Yes.")
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>I", "prefix": True}]
        message = ask(client, tools=[], messages=messages).choices[0].message
        assert (message.reasoning, message.content) == ("Hm.", "Yes.") and model.prompt.endswith("<think>I")


def test_a_template_without_tools_is_told_of_them(model: Model) -> None:
    template = "{% for m in messages %}{{ m.role }}\n{{ m.content }}{% endfor %}"
    with served_with(template, model) as served, client_of(served) as client:
        model.answer = '{"name": "now", "arguments": {}}'
        call = ask(client).choices[0].message.tool_calls[0]
        assert "get_weather" in model.prompt and "<tool_call>" in model.prompt
        result = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
        history = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}, result]
        ask(client, messages=history)
        assert '{"name": "now", "arguments": {}}' in model.prompt and "noon" in model.prompt


def test_a_template_that_writes_calls_and_lists_no_tools(model: Model) -> None:
    """As DeepSeek V3.1's: the tools are told of in its own form, and arguments stay text, which it puts together."""
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.tool_calls is defined %}{% for c in m['tool_calls'] %}"
        "{{ '<｜tool▁calls▁begin｜>' + c.function.name + '|' + c.function.arguments }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    )
    with served_with(template, model) as served, client_of(served) as client:
        model.answer = (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        )
        call = ask(client).choices[0].message.tool_calls[0]
        assert "get_weather" in model.prompt and "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}" in model.prompt
        result = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
        ask(client, messages=[{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}, result])
        assert "<｜tool▁calls▁begin｜>now|{}" in model.prompt and "tool:noon" in model.prompt


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([{"role": "tool", "content": "x"}], r"messages\[0\].tool_call_id"),
        ([{"role": "tool", "tool_call_id": "a", "content": "x"}], r"messages\[0\].tool_call_id is 'a'"),
        ([{"role": "function", "name": "f", "content": "x"}], r"messages\[0\].name"),
        ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], r"messages\[0\].tool_calls\[0\].function"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": []}}]}],
            r"messages\[0\].tool_calls\[0\].function.arguments must be an object",
        ),
        (
            [
                {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "user", "content": "x"},
            ],
            r"messages\[0\] calls tools, but before messages\[1\]",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            r"messages\[0\].content\[0\] .*an image \(image_url\)",
        ),
        ([{"role": "user", "content": "x", "prefix": True}], r"messages\[0\].prefix"),
    ],
)
def test_histories_that_cannot_be_are_refused_by_place(client: openai.OpenAI, messages: list[Any], place: str) -> None:
    with pytest.raises(openai.BadRequestError, match=place) as caught:
        ask(client, messages=messages)
    assert caught.value.param == "messages"

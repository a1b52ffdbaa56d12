"""Chat templates: rendered as Hugging Face renders them, bounded, and wrong input is the client's error."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from tokenmill.core.errors import BadCheckpoint, InvalidRequest
from tokenmill.text.chat import MAX_TEMPLATE_CHARS, ChatTemplate

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content']}}{{'<|im_end|>\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRIMMING = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}"
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
)
ONLY_PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}<{{ part['text'] }}>{% endfor %}{% endfor %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


def text_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_renders_a_conversation() -> None:
    template = ChatTemplate(CHATML)
    prompt = "<|im_start|>user\nHello<|im_end|>\n"
    assert template.render(HELLO) == prompt + "<|im_start|>assistant\n"
    assert template.render(HELLO, add_generation_prompt=False) == prompt


def test_gives_the_template_what_hugging_face_gives() -> None:
    source = (
        "{{ bos_token }}{{ eos_token }}\n"
        "    {% if tools %}\n"
        "{{ tools | tojson }}{{ tools[0] | tojson(indent=1) }}\n"
        "    {% endif %}\n"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') }} {{ extra_one }} {{ documents is none }}"
    )
    template = ChatTemplate(source, "<s>", "</s>", now=lambda: datetime(2031, 5, 6))
    prompt = template.render([*HELLO, *HELLO], tools=[{"n": "é<"}], extra={"extra_one": 1})
    assert prompt == '<s></s>\n[{"n": "é<"}]{\n "n": "é<"\n}\nHello2031 1 True'


def test_parts_are_joined_for_templates_that_print_strings() -> None:
    messages = [{"role": "user", "content": text_parts("one", "two")}]
    assert ChatTemplate(CHATML).render(messages, add_generation_prompt=False) == (
        "<|im_start|>user\none\ntwo<|im_end|>\n"
    )
    assert ChatTemplate(TRIMMING).render(messages) == "[user]one\ntwo[end]"


def test_templates_that_take_parts_get_parts() -> None:
    messages = [{"role": "user", "content": text_parts("one", "two")}]
    assert ChatTemplate(PARTS).render(messages) == "user:<one><two>"
    assert ChatTemplate(PARTS).render(HELLO) == "user:Hello"
    assert ChatTemplate(ONLY_PARTS).render(messages) == "user:<one><two>"
    assert ChatTemplate(ONLY_PARTS).render(HELLO) == "user:<Hello>"


def test_messages_of_the_caller_are_not_changed() -> None:
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": text_parts("a")}]
    for source in (CHATML, PARTS):
        ChatTemplate(source).render(messages, continue_final_message=True)
    assert messages == [{"role": "assistant", "content": text_parts("a")}]


@pytest.mark.parametrize("source", [CHATML, TRIMMING, PARTS])
def test_the_final_message_can_be_left_open(source: str) -> None:
    """Equal to the whole prompt up to the end of the last message's text, even if it also occurs earlier."""
    messages = [{"role": "user", "content": "Sure"}, {"role": "assistant", "content": "Sure"}]
    template = ChatTemplate(source)
    prompt = template.render(messages, continue_final_message=True)
    whole = template.render(messages, add_generation_prompt=False)
    assert prompt.endswith("Sure") and whole.startswith(prompt) and prompt == whole[: whole.rindex("Sure") + 4]


def test_trailing_space_of_an_open_message_follows_the_template() -> None:
    messages = [{"role": "assistant", "content": "Sure, "}]
    assert ChatTemplate(CHATML).render(messages, continue_final_message=True) == "<|im_start|>assistant\nSure, "
    assert ChatTemplate(TRIMMING).render(messages, continue_final_message=True) == "[assistant]Sure,"


def test_null_content_of_a_tool_call_stays_null() -> None:
    source = "{% for m in messages %}{{ 'none' if m.content is none else 'text' + m.content }}{% endfor %}"
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert ChatTemplate(source).render([calls]) == "none"
    assert ChatTemplate(source).render([{"role": "assistant"}]) == "text"


@pytest.mark.parametrize(
    ("source", "messages", "reason"),
    [
        (CHATML, [], "at least one"),
        (CHATML, ["x"], r"messages\[0\] must be an object"),
        (CHATML, [{"role": "user", "content": 3}], r"messages\[0\].content"),
        (CHATML, [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'"),
        (CHATML, [{"role": "user", "content": ["x"]}], "'str'"),
        (CHATML, [{"content": "x"}], "rejected the messages"),
        ("{{ raise_exception('roles must alternate') }}", HELLO, "roles must alternate"),
        ("{{ 1 / 0 }}", HELLO, "division"),
        ("{{ messages[7].role.x }}", HELLO, "rejected"),
        ("{{ messages.append(1) }}", HELLO, "rejected"),
        ("{{ ''.__class__.__mro__ }}", HELLO, "rejected"),
        ("{{ 'x' * 10000000000 }}", HELLO, "repeated"),
        ("{{ [1] * 10000000000 }}", HELLO, "repeated"),
        ("{{ 9 ** 9 ** 9 }}", HELLO, "too large"),
        ("{% for i in range(10000000) %}{% endfor %}", HELLO, "rejected"),
        ("{% for i in range(9999) %}{{ 'x' * 100000 }}{% endfor %}", HELLO, "exceeds"),
    ],
)
def test_what_cannot_be_rendered_is_the_clients_error(source: str, messages: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        ChatTemplate(source).render(messages)
    assert caught.value.param == "messages"


def test_an_open_message_needs_text_that_the_template_prints() -> None:
    with pytest.raises(InvalidRequest, match="no content"):
        ChatTemplate(CHATML).render([{"role": "assistant", "tool_calls": [{}]}], continue_final_message=True)
    with pytest.raises(InvalidRequest, match="does not print"):
        ChatTemplate("fixed").render(HELLO, continue_final_message=True)


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% generation %}", "x" * (MAX_TEMPLATE_CHARS + 1)])
def test_a_bad_template_is_a_bad_checkpoint(source: str) -> None:
    with pytest.raises(BadCheckpoint, match="chat template"):
        ChatTemplate(source)


def test_another_source_keeps_the_tokens() -> None:
    other = ChatTemplate("{{ bos_token }}", "<s>").with_source("{{ bos_token }}!")
    assert other.render(HELLO) == "<s>!"


@pytest.mark.parametrize("source", [CHATML, TRIMMING, PARTS])
def test_equals_transformers(source: str) -> None:
    """Plain, with a generation prompt, and with the last message left open."""
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [{"role": "user", "content": " Hi  "}, {"role": "assistant", "content": "Well, "}]
    template = ChatTemplate(source)
    for options in ({}, {"add_generation_prompt": True}, {"continue_final_message": True}):
        (expected,), _ = rendering.render_jinja_template([messages], chat_template=source, **options)
        assert template.render(messages, **{"add_generation_prompt": False, **options}) == expected

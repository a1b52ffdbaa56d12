"""Chat templates: rendered as Hugging Face renders them, bounded, and wrong input is the client's error."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenmill.core.errors import BadCheckpoint, InvalidRequest
from tokenmill.text.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate, Renderer

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


class Template:
    """A renderer of which only the text matters."""

    def __init__(self, source: str, bos: str = "", eos: str = "", **how: Any) -> None:
        self._renderer = Renderer(ChatTemplate(source, bos, eos), **how)

    def render(self, messages: Any, **how: Any) -> str:
        return self._renderer.render(messages, **how).text


def text_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_renders_a_conversation() -> None:
    template = Template(CHATML)
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
    template = Template(source, "<s>", "</s>", now=lambda: datetime(2031, 5, 6))
    prompt = template.render([*HELLO, *HELLO], tools=[{"n": "é<"}], extra={"extra_one": 1})
    assert prompt == '<s></s>\n[{"n": "é<"}]{\n "n": "é<"\n}\nHello2031 1 True'


def test_parts_are_joined_for_templates_that_print_strings() -> None:
    messages = [{"role": "user", "content": text_parts("one", "two")}]
    assert Template(CHATML).render(messages, add_generation_prompt=False) == ("<|im_start|>user\none\ntwo<|im_end|>\n")
    assert Template(TRIMMING).render(messages) == "[user]one\ntwo[end]"


def test_templates_that_take_parts_get_parts() -> None:
    messages = [{"role": "user", "content": text_parts("one", "two")}]
    assert Template(PARTS).render(messages) == "user:<one><two>"
    assert Template(PARTS).render(HELLO) == "user:Hello"
    assert Template(ONLY_PARTS).render(messages) == "user:<one><two>"
    assert Template(ONLY_PARTS).render(HELLO) == "user:<Hello>"


def test_messages_of_the_caller_are_not_changed() -> None:
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": text_parts("a")}]
    for source in (CHATML, PARTS):
        Template(source).render(messages, continue_final_message=True)
    assert messages == [{"role": "assistant", "content": text_parts("a")}]


@pytest.mark.parametrize("source", [CHATML, TRIMMING, PARTS])
def test_the_final_message_can_be_left_open(source: str) -> None:
    """Equal to the whole prompt up to the end of the last message's text, even if it also occurs earlier."""
    messages = [{"role": "user", "content": "Sure"}, {"role": "assistant", "content": "Sure"}]
    template = Template(source)
    prompt = template.render(messages, continue_final_message=True)
    whole = template.render(messages, add_generation_prompt=False)
    assert prompt.endswith("Sure") and whole.startswith(prompt) and prompt == whole[: whole.rindex("Sure") + 4]


def test_trailing_space_of_an_open_message_follows_the_template() -> None:
    messages = [{"role": "assistant", "content": "Sure, "}]
    assert Template(CHATML).render(messages, continue_final_message=True) == "<|im_start|>assistant\nSure, "
    assert Template(TRIMMING).render(messages, continue_final_message=True) == "[assistant]Sure,"


def test_null_content_of_a_tool_call_stays_null() -> None:
    source = "{% for m in messages %}{{ 'none' if m.content is none else 'text' + m.content }}{% endfor %}"
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert Template(source).render([calls]) == "none"
    assert Template(source).render([{"role": "assistant"}]) == "text"


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (CHATML, "<|im_start|>assistant\n<|im_end|>\n"),
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}", "[]"),
        ("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", "[]"),
        ("{% for m in messages %}[{{ m.content or m.tool_calls[0].id }}]{% endfor %}", "[7]"),
    ],
)
def test_history_without_content_renders_in_every_template(source: str, prompt: str) -> None:
    """A template that does not know null content gets an empty one, rather than failing or printing None."""
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "7", "function": {"name": "f"}}]}
    assert Template(source).render([calls], add_generation_prompt=False) == prompt


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
        ("{% for i in range(10000000) %}{% endfor %}", HELLO, "rejected"),
        ("{% for i in range(9999) %}{{ 'x' * 100000 }}{% endfor %}", HELLO, "exceeds"),
    ],
)
def test_what_cannot_be_rendered_is_the_clients_error(source: str, messages: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        Template(source).render(messages)
    assert caught.value.param == "messages"


def test_an_open_message_needs_text_that_the_template_prints() -> None:
    with pytest.raises(InvalidRequest, match="no content"):
        Template(CHATML).render([{"role": "assistant", "tool_calls": [{}]}], continue_final_message=True)
    with pytest.raises(InvalidRequest, match="does not print"):
        Template("fixed").render(HELLO, continue_final_message=True)


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% generation %}", "x" * (MAX_TEMPLATE_CHARS + 1)])
def test_a_bad_template_is_a_bad_checkpoint(source: str) -> None:
    with pytest.raises(BadCheckpoint, match="chat template"):
        Template(source)


@pytest.mark.parametrize("source", [CHATML, TRIMMING, PARTS])
def test_equals_transformers(source: str) -> None:
    """Plain, with a generation prompt, and with the last message left open."""
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [{"role": "user", "content": " Hi  "}, {"role": "assistant", "content": "Well, "}]
    template = Template(source)
    for options in ({}, {"add_generation_prompt": True}, {"continue_final_message": True}):
        (expected,), _ = rendering.render_jinja_template([messages], chat_template=source, **options)
        assert template.render(messages, **{"add_generation_prompt": False, **options}) == expected


@pytest.mark.parametrize(
    "printed",
    [
        "raise_exception", "strftime_now | string", "messages[0].role.upper", "messages | map('upper')",
        "[raise_exception]", "'x' ~ lipsum", "'%s' | format(raise_exception)", "'%r' % range", "cycler('a')",
        "joiner()", "'{}'.format(messages[0]['items'])", "messages | reverse", "self.b", "[range] | join('')",
        "{'a': dict} | pprint",
        "namespace(f=messages[0].role.format).f", "raise_exception(range)", "messages | map(attribute='items') | list",
    ],
)  # fmt: skip
@pytest.mark.parametrize("shown", ["{}", "({} ~ '')[3:30]", "({}) | string | replace(' at ', '') | replace('0x', '')"])
def test_no_template_prints_where_things_lie_in_memory(printed: str, shown: str) -> None:
    """However it takes the text apart: there is none."""
    source = "{{ " + shown.format(printed) + " }}{% block b %}{% endblock %}"
    with pytest.raises(InvalidRequest, match="is no text"):
        Renderer(ChatTemplate(source)).render(HELLO)


def test_functions_methods_and_iterators_do_what_they_are_for() -> None:
    source = """
    {%- set ns = namespace(call=messages[0].role.upper, sep=joiner(', '), found=messages | map(attribute='role')) -%}
    {%- macro twice(x) %}{{ x }}{{ x }}{% endmacro -%}
    {{ ns.call() }}{{ ns.sep() }}{{ ns.sep() }}{{ ns.found | list }}{{ range(3) | reverse | list }}{{ twice('a') }}
    {%- for kind, text in messages[0].items() | sort %} {{ loop.index }}{{ kind }}
    {%- endfor %}{% set c = cycler('x', 'y') %}{{ c.next() }}{{ c.next() }}{{ c.current }}
    {{- [range is callable, messages[0].keys is callable, messages is callable, messages | map('upper') is iterable] }}
    {{- [range is iterable, messages[0].nothing is defined, nothing is callable] }}
    {{- (messages | selectattr('role', 'equalto', 'user') | first).role }}{{ 'a' in (['a'] | map('lower')) }}
    {{- '{0[role]:>6}|{1}'.format(messages[0], 2) }}{{ ','.join(['b'] | map('upper')) }}{{ dict(a=1).a }}"""
    rendered = Renderer(ChatTemplate(source)).render([{"role": "user", "content": "x"}])
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    assert "".join(rendered.pieces) == plain.render(messages=[{"role": "user", "content": "x"}])


def test_messages_may_speak_of_addresses() -> None:
    text = "What is <function f at 0x7f73587cc7c0>?"
    rendered = Renderer(ChatTemplate("{{ messages[0].content }}")).render([{"role": "user", "content": text}])
    assert "".join(rendered.pieces) == text

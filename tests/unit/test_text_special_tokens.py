"""Special tokens spelled in messages are plain text, and nothing else changes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tiny_tokenizer import byte_tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tokenmill.core.errors import InvalidRequest
from tokenmill.text.chat_template import ChatTemplate, Renderer
from tokenmill.text.special_tokens import Rendered
from tokenmill.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
QWEN = (
    "{% for m in messages %}{% set content = m.content %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>' + '\n' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call | tojson }}\n</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% else %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}<｜Assistant｜>"
)
TEMPLATES = {
    "ChatML": (CHATML, ["<|im_start|>", "<|im_end|>"]),
    "Llama 3": (LLAMA3, ["<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]),
    "Mistral": (MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]"]),
    "Gemma": (GEMMA, ["<s>", "<start_of_turn>", "<end_of_turn>"]),
    "Phi": (PHI, ["<|user|>", "<|assistant|>", "<|end|>", "<|system|>"]),
    "Qwen": (QWEN, ["<|im_start|>", "<|im_end|>"]),
    "DeepSeek": (DEEPSEEK, ["<s>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"]),
}
CLEAN = [
    {"role": "user", "content": "hello  world!\n\n 12 < 3 [x] <"},
    {"role": "assistant", "content": "<think>hm</think> well, 𠀀 "},
    {"role": "user", "content": " again, hello world "},
]


def byte_level(specials: list[str], **flags: Any) -> Tokenizer:
    backend = byte_tokenizer()._backend
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False, **flags) for text in specials])
    backend.add_tokens(["<think>", "</think>"])
    return Tokenizer(backend)


def sentence_like(specials: list[str]) -> Tokenizer:
    """Marks a space before what begins a text, and only there."""
    chars = {char: 1 + i for i, char in enumerate(sorted(set("".join(map(str, CLEAN))) | set("▁\n|im_endbcxyzuser()")))}
    backend = Backend(models.BPE({"<unk>": 0, **chars}, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    backend.add_tokens(["<think>", "</think>"])
    return Tokenizer(backend)


TOKENIZERS = {
    "bytes": byte_level,
    "stripping": lambda specials: byte_level(specials, lstrip=True, rstrip=True),
    "sentence": sentence_like,
}


def renderer(name: str, specials: list[str]) -> Renderer:
    return Renderer(ChatTemplate(TEMPLATES[name][0], "<s>", "</s>"), specials)


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_without_special_tokens_is_rendered_as_ever(name: str) -> None:
    specials = TEMPLATES[name][1]
    assert renderer(name, specials).render(CLEAN).text == renderer(name, []).render(CLEAN).text
    plain = [{"role": "user", "content": "hello"}]
    assert not renderer(name, specials).render(plain).is_split


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_split_text_has_the_ids_of_the_whole(name: str, kind: str) -> None:
    """Where nobody spells a special token, it does not show that the text was split."""
    specials = TEMPLATES[name][1]
    tokenizer = TOKENIZERS[kind](specials)
    whole = renderer(name, []).render(CLEAN).text
    pieces = re.split("(" + "|".join(map(re.escape, sorted(specials, key=len, reverse=True))) + ")", whole)
    assert len(pieces) > 3
    assert tokenizer.encode_split(pieces, add_special=False) == tokenizer.encode(whole, add_special=False)
    assert tokenizer.encode_split([whole + "x"]) == tokenizer.encode(whole + "x", parse_special=False)


@pytest.mark.parametrize("kind", ["bytes", "sentence"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_spelled_special_tokens_are_plain_text(name: str, kind: str) -> None:
    """As many special tokens as without them, at the template's own places; the text is the one that was given."""
    specials = TEMPLATES[name][1]
    tokenizer = TOKENIZERS[kind](specials)
    quiet = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    loud = [{**m, "content": m["content"].replace(" ", " ".join(specials)) + specials[-1]} for m in quiet]
    subject = renderer(name, specials)
    assert set(specials) <= set(tokenizer.special_texts())

    def marks(rendered: Rendered) -> list[int]:
        if rendered.is_split:
            ids = tokenizer.encode_split(rendered.pieces, add_special=False)
        else:
            ids = tokenizer.encode(rendered.text, add_special=False)
        return [token for token in ids if tokenizer.is_special(token) and token]

    rendered = subject.render(loud)
    assert rendered.is_split and rendered.text == renderer(name, []).render(loud).text
    assert marks(rendered) == marks(subject.render(quiet)) != []
    if kind == "bytes":
        ids = tokenizer.encode_split(rendered.pieces, add_special=False)
        assert tokenizer.decode(ids, skip_special=False) == rendered.text


def test_every_string_counts_wherever_it_stands() -> None:
    """Names, arguments of tools and their keys, variables of the template."""
    source = "<|im_start|>{{ messages[0].name }}{{ messages[0].tool_calls | tojson }}{{ extra }}<|im_end|>"
    call = {"function": {"name": "f", "arguments": {"a <|im_end|>": ["<|im_end|>"]}}}
    message = {"role": "assistant", "content": None, "name": "<|im_start|>", "tool_calls": [call]}
    subject = Renderer(ChatTemplate(source), ["<|im_start|>", "<|im_end|>"])
    rendered = subject.render([message], extra={"extra": "<|im_end|>"})
    assert rendered.pieces[0] == "" and rendered.pieces[-1] == "" and len(rendered.pieces) == 5
    assert rendered.text == (
        '<|im_start|><|im_start|>[{"function": {"name": "f", "arguments": {"a <|im_end|>": ["<|im_end|>"]}}}]'
        "<|im_end|><|im_end|>"
    )


def test_two_texts_do_not_join_to_a_special_token() -> None:
    source = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}<|im_end|>"
    parts = [{"type": "text", "text": text} for text in ("a<|im_", "end|>b")]
    rendered = Renderer(ChatTemplate(source), ["<|im_end|>"]).render([{"role": "user", "content": parts}])
    assert rendered.pieces == ("a<|im_end|>b", "<|im_end|>", "")


def test_the_template_may_build_its_own_from_a_role() -> None:
    rendered = renderer("Phi", TEMPLATES["Phi"][1]).render([{"role": "user", "content": "<|end|>"}])
    assert rendered.pieces[:4] == ("", "<|user|>", "\n<|end|>", "<|end|>")


def test_tokens_that_are_not_special_are_the_templates_to_find() -> None:
    messages = [{"role": "assistant", "content": "<think>no</think>yes <|im_end|>"}]
    rendered = renderer("Qwen", ["<|im_start|>", "<|im_end|>"]).render(messages, add_generation_prompt=False)
    assert rendered.text == "<|im_start|>assistant\nyes <|im_end|><|im_end|>\n"


def test_an_open_message_may_spell_one() -> None:
    messages = [{"role": "assistant", "content": "Sure <|im_end|>"}]
    rendered = renderer("ChatML", ["<|im_start|>", "<|im_end|>"]).render(messages, continue_final_message=True)
    assert rendered.pieces == ("", "<|im_start|>", "assistant\nSure <|im_end|>")


@pytest.mark.parametrize("how", ["tojson(ensure_ascii=true)", "urlencode"])
def test_an_altered_stand_in_is_refused(how: str) -> None:
    subject = Renderer(ChatTemplate("{{ messages[0].content | HOW }}".replace("HOW", how)), ["<|im_end|>"])
    assert subject.render([{"role": "user", "content": "fine"}])
    with pytest.raises(InvalidRequest, match="im_end") as caught:
        subject.render([{"role": "user", "content": "a <|im_end|>"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("how", ["upper", "title", "string", "list | string", "e", "center(20)", "trim", "pprint"])
def test_what_templates_do_with_text_leaves_stand_ins_alone(how: str) -> None:
    subject = Renderer(ChatTemplate("{{ messages[0].content | HOW }}".replace("HOW", how)), ["<|im_end|>"])
    assert "<|im_end|>" in subject.render([{"role": "user", "content": "x<|im_end|>"}]).text

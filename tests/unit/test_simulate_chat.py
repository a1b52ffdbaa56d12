"""Chat templates in simulations: prompts have their tokens where a model is named; else the result misses them."""

from __future__ import annotations

import pytest
from tiny_tokenizer import byte_tokenizer

from tokenmill.bench.load import datasets
from tokenmill.bench.load.datasets import Lengths
from tokenmill.bench.load.material import token_material
from tokenmill.bench.load.plan import Call, Drawn, Message, Reply
from tokenmill.bench.load.run import Load
from tokenmill.bench.load.schedule import Schedule
from tokenmill.bench.result import Run
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import Costs
from tokenmill.core.errors import TokenmillError
from tokenmill.plan.play import About, simulate
from tokenmill.plan.prompts import PromptWriter, chat_frame
from tokenmill.sim.deployment import Deployment, WorkerPlan
from tokenmill.sim.service import Service
from tokenmill.text.chat_template import ChatTemplate, Renderer
from tokenmill.text.text_model import TextModel

TEMPLATE = (
    "{% for message in messages %}<|end|>{{ message.role }}\n{{ message.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|end|>assistant\n{% endif %}"
)


def played(about: About) -> Run:
    """Nine prompts of about 64 tokens."""
    config = EngineConfig(groups=full_groups(512), max_model_len=4096)
    workers = (WorkerPlan("w", "mixed", config, Costs(step_s=0.01, token_s=0.0001)),)
    load = Load(
        lambda num, seed, rate: datasets.random_prompts(num, seed, Lengths(64, 8, 0.5)),
        lambda seed, how: token_material(seed, 1, 9),
        Schedule(request_rate=20.0),
        9,
        3,
    )
    return simulate(lambda loop, seed: Service(Deployment(workers), loop, seed=seed), load, about).run


def text_of(template: str | None = TEMPLATE) -> TextModel:
    chat = None if template is None else ChatTemplate(template)
    return TextModel(byte_tokenizer(), chat, (), None, 4096)


def test_a_chat_template_adds_its_tokens() -> None:
    """As many as rendering the same messages adds; equal beginnings stay equal, and completions have none."""
    text = text_of()
    frame = chat_frame(text, "model")
    messages = [{"role": role, "content": content} for role, content in (("system", "hello"), ("user", "world 12"))]
    rendered = text.tokenizer.encode(Renderer(ChatTemplate(TEMPLATE)).render(messages).text, add_special=False)
    counted = sum(len(text.tokenizer.encode(each["content"], add_special=False)) for each in messages)
    around = frame(("system", "user"))
    assert len(around) == 3 and sum(map(len, around)) == len(rendered) - counted
    writer, plain = PromptWriter(1, frame=frame), PromptWriter(1)
    first = Message("user", (Drawn("a", 20),))
    calls = [Call(0, (first,), 1), Call(1, (first, Message("assistant", (Reply(0, 5),)), first), 1)]
    one, two = (writer.write(call, lambda index: None).prompt for call in calls)
    begin, end = frame(("user",))
    assert one == (*begin, *plain.write(calls[0], lambda index: None).prompt, *end)
    assert two[: len(begin) + 20] == one[: len(begin) + 20]


def test_a_simulated_chat_counts_the_template_or_says_that_it_does_not() -> None:
    """In the prompts that the service is sent, and in the remarks of the result."""
    about = About(api="chat", frame=chat_frame(text_of(), "model"))
    plain, with_it, without = (played(each) for each in (About(), about, About(api="chat")))
    added = sum(map(len, about.frame(("user",)))) if about.frame is not None else 0
    assert added > 10 and with_it.input_tokens == plain.input_tokens + 9 * added
    assert without.input_tokens == plain.input_tokens and with_it.endpoint["api"] == "chat"
    runs = (plain, with_it, without)
    assert [any("templates add no" in remark for remark in each.warnings) for each in runs] == [False, False, True]


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (None, "model has no chat template"),
        ("{{ messages[-1].content }}{{ messages[-1].content }}", "does not repeat each message once"),
        ("nothing", "does not repeat each message once"),
        ("{{ raise_exception('no system') }}", "no system"),
        ("{% if %}", "does not compile"),
    ],
)
def test_templates_that_cannot_be_counted_are_told_before_anything_is_sent(template: str | None, told: str) -> None:
    with pytest.raises(TokenmillError, match=told):
        played(About(api="chat", frame=chat_frame(text_of(template), "model")))

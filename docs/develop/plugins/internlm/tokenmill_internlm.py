"""A parser of calls: InternLM 2 writes one call, an object between <|action_start|><|plugin|> and <|action_end|>. Where
a call is demanded, a grammar is made of the same form, so what the model writes is what is read."""

from tokenmill.plugins.groups import Plugin
from tokenmill.text.tools.family import Family, Form
from tokenmill.text.tools.json_calls import read_calls
from tokenmill.text.tools.parser import Calls, Reading

BEGIN, END = "<|action_start|><|plugin|>", "<|action_end|>"


def _read(calls: Calls, marker: str) -> Reading:
    return read_calls(calls, END)


INTERNLM = Family(
    "internlm",
    markers=(BEGIN,),
    read=_read,
    form=Form(
        opening=BEGIN + '\n{"name": "{name}", "parameters": ',
        closing="}" + END,
        trigger=BEGIN,
        is_parallel=False,
    ),
    ends=(END,),
)

plugin = Plugin(interface=1, provides=INTERNLM)

"""A parser of reasoning: Command A thinks between <|START_THINKING|> and <|END_THINKING|> before it answers."""

from tokenmill.plugins.groups import Plugin
from tokenmill.text.reasoning import ReasoningFamily

COMMAND_A = ReasoningFamily("command_a", begin="<|START_THINKING|>", end="<|END_THINKING|>")

plugin = Plugin(interface=1, provides=COMMAND_A)

"""A validated call that generates, whichever API it came by. Pure: no model, no engine, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..core.sampling import SamplingParams
from ..core.slo import NO_WISH, Wish
from ..text.beams import BeamSearchParams
from ..text.grammar.constraint import Constraint
from ..text.reasoning import ReasoningUse
from ..text.special_tokens import Rendered
from ..text.tools.tool_choice import ToolUse
from .common_fields import NO_LIMITS, DraftLimits
from .conversations import Conversation
from .prompts import Mixed, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One validated HTTP call: `prompts` (completions) or `conversation` (chat), and how to answer.

    sampling          max_tokens None: the caller did not say
    limit_field       the field that gave max_tokens, for messages
    echo              the answer starts with the prompt
    score_only        max_tokens was 0: the prompt is echoed and scored, nothing is generated
    prompt_logprobs   alternatives to report in vLLM's own field (sampling.prompt_logprobs also serves echo)
    truncate_to       keep this many prompt tokens (-1: as many as fit)
    tokens_as_ids     logprobs name tokens "token_id:N"
    handoff           as Request has it
    prefix            tokens before those of the conversation: an earlier one's
    infill            a prompt of text and special tokens, instead of `prompts`
    usual_tokens      most tokens where nobody says how many; None: the endpoint has no number of its own
    tool_use          the tools that the answer may call; None: no tools
    constraint        what the answer must be; None: it is free
    reasoning         what becomes of what the model thinks before it answers
    named             what the caller calls the prompt, "": `prompt` or `messages`
    fits_room         max_tokens is a bound: where the context has less room, the answer is cut there and not refused
    stream_interval   tokens of a chunk behind the first; None: as the server is set
    beams             how to search for the likeliest answers; None: they are drawn
    slo               what it says of its objectives
    keep_s            for how long its KV is to be kept after its end; None: it does not say
    priority_class    that it asks for; None: its tenant's
    drafts            its limits of what is drafted for it
    prediction        text that its answer is expected to have; None: it says nothing
    ignored           what of the body was left out because nothing here can do it; its sender is told
    extras            what another API's shape needs of the body: JSON data
    """

    model: str | None
    sampling: SamplingParams
    prompts: tuple[Prompt | Mixed, ...] = ()
    conversation: Conversation | None = None
    limit_field: str = "max_tokens"
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    score_only: bool = False
    prompt_logprobs: int | None = None
    add_special_tokens: bool = True
    truncate_to: int | None = None
    truncate_right: bool = False
    priority: int = 0
    cache_salt: str = ""
    request_id: str | None = None
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    handoff: str = ""
    prefix: tuple[int, ...] = ()
    infill: Rendered | None = None
    usual_tokens: int | None = None
    tool_use: ToolUse | None = None
    constraint: Constraint | None = None
    reasoning: ReasoningUse = field(default_factory=ReasoningUse)
    named: str = ""
    fits_room: bool = False
    stream_interval: int | None = None
    beams: BeamSearchParams | None = None
    slo: Wish = NO_WISH
    keep_s: float | None = None
    priority_class: int | None = None
    drafts: DraftLimits = NO_LIMITS
    prediction: str | None = None
    ignored: tuple[str, ...] = ()
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt_field(self) -> str:
        if self.named:
            return self.named
        return "messages" if self.conversation else "prompt"

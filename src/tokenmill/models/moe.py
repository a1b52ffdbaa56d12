"""A layer's mixture of experts, as a checkpoint declares it, and its forward pass.

T tokens  D model width  E experts  k experts of a token  F width of an expert's FFN
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ops.api import SOFTMAX, ExpertActivation, Routing

SPLIT, STACKED, MERGED, PAIRED = "split", "stacked", "merged", "paired"
"""How a checkpoint stores experts: matrix by matrix; all gates, all ups, all downs as one tensor each; gate and up, one
upon the other, as one tensor for all experts, and all downs as another; or matrix by matrix, gate and up as one, whose
rows are of the two in turns."""

ONE_BY_ONE = (SPLIT, PAIRED)
"""Forms in which each expert has tensors of its own."""


@dataclass(frozen=True, slots=True)
class MoeFamily:
    """What of its mixtures of experts a family fixes, whatever a file says; moe_config.py reads the rest.

    scores       what a GGUF file may say that scores are made by; where nothing is said, the first
    normalise    see Routing; None: the file says
    floor        see Routing
    group_score  see Routing
    shared_mix   see MoeConfig
    num_shared   shared experts as wide as a routed one, where a file has no key for them
    own_norms    see MoeConfig
    scaled_inputs  see MoeConfig
    choice_bias  see MoeConfig; of a GGUF file, whether it may be there
    num_dense    layers at the beginning without experts, of a file that may list which layers have some and does not;
                 None: the file says
    form         of the experts in a folder of Hugging Face's format
    swiglu       (limit, alpha) of a clamped SwiGLU, where a GGUF file has it; None: experts do as dense FFNs
    """

    scores: tuple[str, ...] = (SOFTMAX,)
    normalise: bool | None = None
    floor: float = 0.0
    group_score: int = 2
    shared_mix: bool = False
    num_shared: int = 0
    own_norms: bool = False
    scaled_inputs: bool = False
    choice_bias: bool = False
    num_dense: int | None = None
    form: str = SPLIT
    swiglu: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """routing       how a row chooses its experts
    expert_width  FFN width of a routed expert
    shared_width  FFN width of the shared experts together, which every row goes through; 0: there are none
    shared_mix    what the shared experts give is multiplied by the sigmoid of one more output of the router
    own_norms     the router, the routed experts and the shared ones have norms of their own, and weights are
                  multiplied by a scale of each expert (Gemma 4)
    scaled_inputs  the weight of a row's only expert, the sigmoid of its logit, multiplies what the expert is given, not
                  what it gives (Llama 4)
    choice_bias   the choice, not the weights, has a bias for each expert
    activation    of the routed experts; the shared ones have the model's
    form          SPLIT, STACKED, MERGED or PAIRED
    """

    routing: Routing
    expert_width: int
    shared_width: int = 0
    shared_mix: bool = False
    own_norms: bool = False
    scaled_inputs: bool = False
    choice_bias: bool = False
    activation: ExpertActivation = field(default_factory=ExpertActivation)
    form: str = SPLIT

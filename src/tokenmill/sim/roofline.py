"""How long a step takes on a machine that is not here: from a model's shape and a device's peaks, by what the step must
compute and read.

    linear     = (operations of matrices ** overlap + weights read ** overlap) ** (1 / overlap)
    attention  = positions that prompts' tokens attend to, by operations
               + positions that rows read, by the longer of their bytes and, on latents, their operations
    collectives = two all-reduces a layer, by latency and bytes, or the all-to-all of experts, and between stages
    overheads  = of the step, of each layer, of each row
    step       = linear + attention + collectives + overheads

Weights of 4 bits that a device cannot multiply are unpacked to 16 on the way: they are multiplied at the peak of 16
bits, and of both peaks less is reached. Where two halves of a batch take turns (Parallel.is_overlapped), the all-to-all
of one passes while the other computes, and each half reads weights by itself:

    step       = longer of (linear of both halves + attention) and all-to-all, + other collectives + overheads

A roofline (Williams et al., 2009) whose corner is rounded, and linear but for that and the experts touched, whose
share follows from the tokens (core.cost.read_share). What of the peaks is reached depends on the software that serves:
usual coefficients, or those fitted to published points of some software (`tables/coefficients.toml`); fits and errors
are in docs/operate/cost-model.md.

Work is that of the whole group of devices. The cost model gives the time until a step's tokens are there; pipeline
stages work on as many steps at once as there are stages, which who calls must do.
"""

from __future__ import annotations

import math
import tomllib
from functools import cache
from importlib import resources
from typing import NamedTuple

from ..core.cost import Work, read_share
from ..core.errors import ConfigError, Infeasible
from .hardware import Hardware
from .models import KV_BYTES, WEIGHT_BYTES, ModelShape, bytes_of, find, head_precision


class Coefficients(NamedTuple):
    """What software gets out of a device. compute, compute_8bit, attention, memory, kv, link: shares of the peaks, of
    matrices, of those in 8 bits or less, of prompts' attention, of weights and of KV that are read, and of links.
    compute_4bit, memory_4bit: shares of the peak of 16 bits and of the memory's, of weights of 4 bits that are unpacked
    before they are multiplied; experts_4bit_s: overhead of each layer of experts of such weights.
    overlap: exponent that joins computing and reading: 1 adds them, infinity takes the longer. link_s: latency of a
    collective, for each doubling of its devices. step_s, layer_s, row_s: overheads. imbalance: tokens of the busiest
    device of experts, over the mean. shared: of the positions that rows share, what is read once only.

    error_low, error_high: of num_held_out predictions of published points that nothing was fitted to, 8 of 10 errors
    lie between them; an error is the predicted time over the published one, less 1."""

    compute: float = 0.70
    compute_8bit: float = 0.50
    compute_4bit: float = 0.50
    attention: float = 0.40
    memory: float = 0.80
    memory_4bit: float = 0.55
    kv: float = 0.80
    link: float = 0.70
    overlap: float = 1.5
    link_s: float = 15e-6
    step_s: float = 0.002
    layer_s: float = 10e-6
    row_s: float = 10e-6
    experts_4bit_s: float = 100e-6
    imbalance: float = 1.2
    shared: float = 0.0
    error_low: float = 0.0
    error_high: float = 0.0
    num_held_out: int = 0

    @property
    def uncertainty(self) -> str:
        """How far a predicted time may be off, in words."""
        if not self.num_held_out:
            return "not held against published times"
        return (
            f"8 of 10 predicted times are {self.error_low:+.0%} to {self.error_high:+.0%} off what is published "
            f"({self.num_held_out} held out)"
        )


USUAL = Coefficients()


DENSE, EXPERTS = "dense", "experts"


class Variant(NamedTuple):
    """What coefficients of one software may differ by: the generation of the hardware and the family of the model. Both
    are empty for those of the software as a whole."""

    generation: str = ""
    family: str = ""


def variant_of(hardware: Hardware, model: ModelShape) -> Variant:
    return Variant(hardware.generation, EXPERTS if model.num_experts else DENSE)


_WHOLE = {"tensorrt-llm": "tensorrt-llm-0.6"}
"""Software whose coefficients are known of some generations only -> whose are taken elsewhere."""
_USUAL_VARIANTS = {
    Variant("blackwell", DENSE): USUAL._replace(compute_8bit=0.33, memory=0.65),
    Variant("blackwell", EXPERTS): USUAL._replace(compute_8bit=0.2, attention=0.2, row_s=20e-6),
}
"""Of the peaks of Blackwell less is reached: about as much less as TensorRT-LLM reaches there than on Hopper."""


@cache
def coefficients_by_software() -> dict[str, dict[Variant, Coefficients]]:
    """By the software that they were fitted to, and `usual`; each has the empty cell."""
    text = resources.files(__package__).joinpath("tables/coefficients.toml").read_text(encoding="utf8")
    found: dict[str, dict[Variant, Coefficients]] = {"usual": {Variant(): USUAL, **_USUAL_VARIANTS}}
    for name, table in tomllib.loads(text).items():
        variants = found.setdefault(name, {})
        for generation, families in table.items():
            if isinstance(families, dict):
                for family, values in families.items():
                    variants[Variant(generation, family)] = USUAL._replace(**values)
        values = {key: value for key, value in table.items() if not isinstance(value, dict)}
        if values:
            variants[Variant()] = USUAL._replace(**values)
    for name, whole in _WHOLE.items():
        found[name][Variant()] = found[whole][Variant()]
    return found


def coefficients_named(name: str, variant: Variant, where: str = "software") -> Coefficients:
    """Of a software, for such hardware and models, or as a whole where nothing is known of these. Raises ConfigError,
    which names the field and the nearest names."""
    variants = find(name, coefficients_by_software(), where)
    return variants.get(variant) or variants[Variant()]


_ACTIVATION_BYTES = 2.0
_DISPATCH_BYTES = 3.0
"""A token sent to an expert in 8 bits and brought back in 16, as DeepSeek-V3 does (DeepSeek-AI, 2024)."""


class Parallel(NamedTuple):
    """How many devices, and who holds what. tensor: devices that share each layer; pipeline: stages of layers; data:
    copies of the attention, each with its own requests; is_expert: experts lie whole, spread over tensor * data
    devices, else each copy has all of them, cut by tensor; is_overlapped: two halves of the batch take turns, so that
    the all-to-all of one hides behind the computing of the other (DeepSeek-AI, 2025)."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    is_expert: bool = False
    is_overlapped: bool = False

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline * self.data


class Precision(NamedTuple):
    """weights: one of models.WEIGHT_BYTES; kv: of models.KV_BYTES."""

    weights: str = "bf16"
    kv: str = "bf16"


ALONE, HALF = Parallel(), Precision()


class Roofline:
    """A core.cost.CostModel. Raises ConfigError where the model cannot be spread like that, or does not fit."""

    def __init__(
        self,
        model: ModelShape,
        hardware: Hardware,
        parallel: Parallel = ALONE,
        precision: Precision = HALF,
        coefficients: Coefficients = USUAL,
    ) -> None:
        _check(model, hardware, parallel)
        self.model, self.hardware, self.parallel = model, hardware, parallel
        self.precision, self.coefficients = precision, coefficients
        weight_bytes = bytes_of(precision.weights, WEIGHT_BYTES, "precision.weights")
        kv_bytes = bytes_of(precision.kv, KV_BYTES, "precision.kv")
        tensor, data = parallel.tensor, parallel.data
        group = tensor * data
        # Of a device of experts, the busiest counts.
        imbalance = coefficients.imbalance if parallel.is_expert and model.num_experts else 1.0
        self.is_unpacked = weight_bytes < 1 and hardware.computed_in(precision.weights) in ("bf16", "fp32")
        flop_s, memory = _matrix_flop_s(hardware, precision.weights, coefficients), coefficients.memory
        if self.is_unpacked:
            flop_s = hardware.peak_flop_s(precision.weights) * coefficients.compute_4bit
            memory = coefficients.memory_4bit
        read_s = hardware.memory_bytes_s * memory
        # The logits' matrix, as so many weights of layers: what is neither short nor unpacked counts more.
        head_weights = model.head_bytes(precision.weights) / weight_bytes * (memory / coefficients.memory)

        routed_token = model.num_expert_layers * model.num_chosen * model.expert_weights
        own = (model.token_weights - routed_token - model.undivided_weights) / group + model.undivided_weights / data
        self._token_flop_s = 2 * (own + imbalance * routed_token / group) / flop_s
        head_flop_s = _matrix_flop_s(hardware, head_precision(precision.weights), coefficients)
        self._draw_flop_s = 2 * model.head_weights / group / head_flop_s
        fixed = (model.fixed_weights - model.undivided_weights + head_weights) / tensor + model.undivided_weights
        self._fixed_read_s = fixed * weight_bytes / read_s
        self._num_copies = 1 if parallel.is_expert else data  # of all experts, each of which meets its own tokens
        self._experts_read_s = model.routed_weights * self._num_copies / group * weight_bytes / read_s
        self._chosen = model.chosen
        self._overlap = coefficients.overlap

        attention_flop_s = _attention_flop_s(hardware, precision.weights) * coefficients.attention * group
        self._position_s = model.prefill_flop / attention_flop_s
        # KV heads are split as far as they go, and latents not at all; beyond that each device has all.
        split = 1 if model.kv_rank else min(tensor, model.num_kv_heads)
        kv_read_s = model.kv_values * kv_bytes / (hardware.memory_bytes_s * coefficients.kv * split * data)
        decode_s = model.decode_flop / (_attention_flop_s(hardware, precision.weights) * coefficients.compute * group)
        self._context_s = max(kv_read_s, decode_s)

        layers_s = model.num_layers * coefficients.layer_s
        if self.is_unpacked:
            layers_s += model.num_expert_layers * coefficients.experts_4bit_s
        self._fixed_s, self._token_s, all_to_all = _collectives(model, hardware, parallel, coefficients)
        self._fixed_s += coefficients.step_s + layers_s
        if parallel.is_overlapped:
            # Each half goes through all layers by itself, and tells the other devices by itself.
            self._fixed_s += self._fixed_s - coefficients.step_s - 2 * all_to_all.fixed_s
            self._token_s -= all_to_all.token_s
        self._all_to_all = all_to_all
        self._row_s = coefficients.row_s / data
        self._saved = coefficients.shared
        self._weight_bytes, self._kv_bytes, self._split = weight_bytes, kv_bytes, split

    def predict(self, work: Work) -> float:
        """Seconds until the tokens of a step are there."""
        num_rows, num_tokens, num_positions, num_context, num_drawn, num_shared = work
        num_drawn = num_drawn or num_rows
        position_s = self._position_s * max(0.0, num_positions - num_context)
        context_s = self._context_s * (num_context - self._saved * num_shared)
        if self.parallel.is_overlapped:
            linear_s = 2 * self._linear_s(num_tokens / 2, num_drawn / 2)
            told_s = 2 * self._all_to_all.fixed_s + self._all_to_all.token_s * num_tokens
            linear_s = max(linear_s, told_s - position_s - context_s)
        else:
            linear_s = self._linear_s(num_tokens, num_drawn)
        return linear_s + position_s + context_s + self._fixed_s + self._token_s * num_tokens + self._row_s * num_rows

    def predict_decodes(self, num_rows: int, num_context: int, num_steps: int) -> list[float]:
        """As `predict` of steps one after the other that draw a token for each of the same rows; the first reads so
        many positions, and each further one another of each row."""
        contexts = range(num_context, num_context + num_steps * num_rows, num_rows)
        if self.parallel.is_overlapped:
            return [self.predict(Work(num_rows, num_rows, each, each, num_rows)) for each in contexts]
        linear_s, context_s, fixed_s = self._linear_s(num_rows, num_rows), self._context_s, self._fixed_s
        token_s, row_s = self._token_s * num_rows, self._row_s * num_rows
        return [linear_s + context_s * context + fixed_s + token_s + row_s for context in contexts]

    def _linear_s(self, num_tokens: float, num_drawn: float) -> float:
        """Seconds of the products with all matrices."""
        compute_s = self._token_flop_s * num_tokens + self._draw_flop_s * num_drawn
        read_s = self._fixed_read_s
        if self._chosen:
            read_s += self._experts_read_s * read_share(self._chosen, num_tokens / self._num_copies)
        overlap = self._overlap
        longer, shorter = (compute_s, read_s) if compute_s > read_s else (read_s, compute_s)
        rounded: float = (1 + (shorter / longer) ** overlap) ** (1 / overlap)
        return longer * rounded

    @property
    def weight_bytes(self) -> float:
        """On each device."""
        model, parallel = self.model, self.parallel
        # Of several stages the first has the embedding, and the last the logits' matrix.
        heads = (1 if model.is_tied or parallel.pipeline > 1 else 2) * model.head_bytes(self.precision.weights)
        routed = model.routed_weights * self._num_copies / parallel.num_devices
        divided = (model.fixed_weights - model.undivided_weights) / parallel.tensor
        layers = (divided + model.undivided_weights) / parallel.pipeline + routed
        return layers * self._weight_bytes + heads / parallel.tensor

    @property
    def kv_token_bytes(self) -> float:
        """Of one position on each device that holds it."""
        return self.model.kv_values * self._kv_bytes / (self._split * self.parallel.pipeline)

    def num_kv_blocks(self, block_size: int, memory_share: float = 0.9, reserve_bytes: float = 2 * 2**30) -> int:
        """Blocks that all copies of the attention together have room for. reserve_bytes: a device's, for activations
        and the software's own. Raises ConfigError where weights leave room for none."""
        room = self.hardware.memory_bytes * memory_share - reserve_bytes - self.weight_bytes
        num_blocks = int(room // (self.kv_token_bytes * block_size))
        if num_blocks < 1:
            raise Infeasible(
                f"hardware: {self.model.name} takes {(self.weight_bytes + reserve_bytes) / 2**30:.0f} GiB of weights "
                f"and activations on each {self.hardware.name}, which has {self.hardware.memory_bytes / 2**30:.0f}; "
                "spread it over more devices (tensor) or give fewer bits a weight",
                param="hardware",
            )
        return num_blocks * self.parallel.data


def _matrix_flop_s(hardware: Hardware, precision: str, coefficients: Coefficients) -> float:
    """What is reached where weights are multiplied as they are."""
    peak = hardware.peak_flop_s(precision)
    is_short = peak > hardware.flop_s.get("bf16", peak)
    return peak * (coefficients.compute_8bit if is_short else coefficients.compute)


def _attention_flop_s(hardware: Hardware, weights: str) -> float:
    """Attention is computed in 16 bits, where a device can; else as weights are."""
    return hardware.flop_s.get("bf16") or hardware.flop_s.get("fp32") or hardware.peak_flop_s(weights)


class _Told(NamedTuple):
    """Seconds of a step, and of each of its tokens, that devices spend on telling each other."""

    fixed_s: float
    token_s: float


def _collectives(
    model: ModelShape, hardware: Hardware, parallel: Parallel, coefficients: Coefficients
) -> tuple[float, float, _Told]:
    """Seconds of a step, of each of its tokens, and what of both is the all-to-all of experts."""
    fixed_s = token_s = 0.0
    all_to_all = _Told(0.0, 0.0)
    token_bytes = model.hidden * _ACTIVATION_BYTES
    tensor, group = parallel.tensor, parallel.tensor * parallel.data
    is_spread = parallel.is_expert and bool(model.num_experts) and group > 1

    if tensor > 1:
        # A ring sends each part 2 (n - 1) / n times; after the attention and after the FFN, which experts that lie
        # whole replace by their all-to-all.
        num = 2 * model.num_layers - (model.num_expert_layers if is_spread else 0)
        fixed_s += num * coefficients.link_s * math.log2(tensor)
        link_bytes_s = hardware.link_rate(tensor) * coefficients.link
        token_s += num * 2 * (tensor - 1) / tensor * token_bytes / parallel.data / link_bytes_s
    if is_spread:
        # What goes to devices of the node takes its links, and what goes beyond, at the same time, the network.
        sent = model.num_expert_layers * model.num_chosen * model.hidden * _DISPATCH_BYTES / group
        near = min(group, hardware.num_joined)
        near_s = (near - 1) / group / hardware.link_rate(near) if near > 1 else 0.0
        far_s = (group - near) / group / hardware.network_bytes_s if group > near else 0.0
        all_to_all = _Told(
            2 * model.num_expert_layers * coefficients.link_s * math.log2(group),
            sent * coefficients.imbalance * max(near_s, far_s) / coefficients.link,
        )
        fixed_s += all_to_all.fixed_s
        token_s += all_to_all.token_s
    if parallel.pipeline > 1:
        fixed_s += (parallel.pipeline - 1) * coefficients.link_s
        is_near = parallel.num_devices <= hardware.num_joined
        link_bytes_s = (hardware.link_bytes_s if is_near else hardware.network_bytes_s) * coefficients.link
        token_s += (parallel.pipeline - 1) * token_bytes / parallel.data / link_bytes_s
    return fixed_s, token_s, all_to_all


def _check(model: ModelShape, hardware: Hardware, parallel: Parallel) -> None:
    for name, value in zip(("tensor", "pipeline", "data"), parallel[:3], strict=True):
        if value < 1:
            raise ConfigError(f"parallel.{name}: 1 or more is needed, not {value}", param=f"parallel.{name}")
    if model.num_heads % parallel.tensor:
        raise Infeasible(
            f"parallel.tensor: {model.name} has {model.num_heads} heads, which {parallel.tensor} devices cannot share; "
            "take a divisor",
            param="parallel.tensor",
        )
    if parallel.pipeline > model.num_layers:
        raise Infeasible(
            f"parallel.pipeline: {model.name} has {model.num_layers} layers, fewer than {parallel.pipeline} stages",
            param="parallel.pipeline",
        )
    if parallel.is_expert and not model.num_experts:
        raise Infeasible(
            f"parallel.expert: {model.name} has no experts that could lie whole; take it out", param="parallel.expert"
        )
    if parallel.is_overlapped and not (
        parallel.is_expert and model.num_experts and parallel.tensor * parallel.data > 1
    ):
        raise ConfigError(
            "parallel.overlapped: only the all-to-all of experts that lie whole on several devices can be hidden; say "
            "that they do, or take this out",
            param="parallel.overlapped",
        )
    is_linked = parallel.num_devices == 1 or (hardware.network_bytes_s and hardware.link_bytes_s)
    if not is_linked:
        raise ConfigError(
            f"hardware: no link between devices of {hardware.name} is known; give link_bytes_s and network_bytes_s",
            param="hardware",
        )

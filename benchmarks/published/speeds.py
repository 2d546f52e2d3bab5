"""How fast a V100 computes a published model: one published figure per model, used once.

The figure is the mini-batch time of a shape P x D with a D-fold all-reduce. Without the all-reduces it consists of N +
P - 1 turns of the slowest stage, with N micro-batches per replica (no latency is exposed, as in Varuna's section 3.2):

    T = (N + P - 1) t + AR,    t = max over stages of (F + R + B)

so t is known, and the operations of that stage divided by t are the speed at the micro-batch size of the figure.

How speed grows with m comes from one more figure: BERT-large at m = 8 is 26 % faster than at m = 4 (Varuna,
section 4.1), hence F(m) = fixed + m slope. The fixed part of a layer is presumably that of kernel launches, whose
number is equal for layers of all these models, so the same seconds are used for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final

from benchmarks.published.hardware import GPU_PEAK_FLOPS_PER_S, ring_s
from benchmarks.published.shapes import MODELS, Transformer

ACCUMULATOR_BYTES: Final = 4
"""Bytes of a gradient, as Morph keeps and reduces it with ``accumulation: fast``."""
GAIN, SMALL_M, LARGE_M = 1.26, 4, 8
"""Varuna, section 4.1: in BERT-large, m = 8 performs 26 % better than m = 4."""


@dataclass(frozen=True)
class Anchor:
    """The published figure that gives a model's speed.

    Args:
        model: Whose, a key of ``MODELS``.
        num_stages: P.
        num_replicas: D.
        micro_batch_size: m; published for none of them (see ``source``).
        mini_batch_s: Published.
        source: Where.
    """

    model: str
    num_stages: int
    num_replicas: int
    micro_batch_size: int
    mini_batch_s: float
    source: str

    @property
    def useful_flops_per_s(self) -> float:
        """Per GPU, as the paper counts: without recompute and attention."""
        shape = MODELS[self.model]
        return shape.useful_flops * shape.batch_size / self.mini_batch_s / (self.num_stages * self.num_replicas)


_ASSUMED_M4 = "m is not published, 4 assumed"
ANCHORS: dict[str, Anchor] = {
    "gpt2-2.5b": Anchor("gpt2-2.5b", 9, 7, 4, 70.1, f"Varuna table 7, 2.5B 9x7: 70.1 s measured ({_ASSUMED_M4})"),
    "gpt2-8.3b": Anchor("gpt2-8.3b", 18, 4, 4, 203.1, f"Varuna table 7, 8.3B 18x4: 203.1 s measured ({_ASSUMED_M4})"),
    "bert-large": Anchor(
        "bert-large",
        4,
        8,
        8,
        32768 / 710,
        "Varuna 7.1.1, BERT-large: 710 example/s with 4x8 and batch 32K (m is not published, 8 assumed: section 4.1)",
    ),
}
ANCHOR_OF = {"bert-72": "bert-large"}
"""Models without a figure of their own, whose layers are as wide, and so as fast, as another model's."""


@dataclass(frozen=True)
class Speed:
    """Forward of one layer takes ``fixed_s + m * slope_s``; other sections in proportion to their operations."""

    layer_flops: int
    fixed_s: float
    slope_s: float

    def forward_s(self, flops: int, micro_batch_size: int) -> float:
        """F(m) of a section with so many operations per sample."""
        return flops / self.layer_flops * (self.fixed_s + micro_batch_size * self.slope_s)

    def efficiency(self, micro_batch_size: int) -> float:
        """Operations done over what the GPU's peak would do in that time."""
        done = self.layer_flops * micro_batch_size
        return done / (self.fixed_s + micro_batch_size * self.slope_s) / GPU_PEAK_FLOPS_PER_S


def speed_of(model: str) -> Speed:
    """Return the speed of one model, from the anchors."""
    shape, anchored = MODELS[model], ANCHOR_OF.get(model, model)
    fixed_s = fixed_layer_s()
    anchor = ANCHORS[anchored]
    layer_s = MODELS[anchored].layer_flops * anchor.micro_batch_size / flops_per_s(anchor)
    slope_s = (layer_s - fixed_s) / anchor.micro_batch_size
    return Speed(shape.layer_flops, fixed_s, slope_s * shape.layer_flops / MODELS[anchored].layer_flops)


def flops_per_s(anchor: Anchor) -> float:
    """Speed of the slowest stage while it computes, at the anchor's m, recompute counted as work."""
    shape = MODELS[anchor.model]
    per_replica = ceil(shape.batch_size / anchor.micro_batch_size / anchor.num_replicas)
    turns = per_replica + anchor.num_stages - 1
    turn_s = (anchor.mini_batch_s - reduce_s(shape, anchor)) / turns
    return anchor.micro_batch_size * slowest_stage_flops(shape, anchor.num_stages) / turn_s


def slowest_stage_flops(shape: Transformer, num_stages: int) -> int:
    """F + R + B per sample of the slowest of P stages with L / P layers each; the last has the head and no R."""
    layers = shape.num_layers // num_stages * shape.layer_flops
    return max(4 * layers if num_stages > 1 else 0, 3 * (layers + shape.head_flops))


def reduce_s(shape: Transformer, anchor: Anchor) -> float:
    """The last stage's own gradients over D, then the tied ones over D workers of the first and the last stage."""
    own = shape.num_layers // anchor.num_stages * shape.layer_parameters + shape.norm_parameters
    tied_s = ring_s(2 * anchor.num_replicas, ACCUMULATOR_BYTES * shape.tied_parameters)
    return ring_s(anchor.num_replicas, ACCUMULATOR_BYTES * own) + tied_s


def fixed_layer_s() -> float:
    """Fixed part of a layer's forward: of (a/4 + b) / (a/8 + b) = 1.26 and a + 8 b = the layer's time at m = 8."""
    anchor = ANCHORS["bert-large"]
    share = (GAIN - 1) / (1 / SMALL_M - GAIN / LARGE_M)
    layer_s = MODELS[anchor.model].layer_flops * anchor.micro_batch_size / flops_per_s(anchor)
    return layer_s * share / (share + anchor.micro_batch_size)

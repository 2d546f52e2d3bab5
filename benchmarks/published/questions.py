"""The questions of Varuna's tables 3, 5, 6 and 7, answered by the simulator from the shipped profiles.

    python -m benchmarks published.questions

Each answer is printed with the published value and their ratio. One published figure per model went into its profile
(benchmarks/published/speeds.py); a row that repeats it is marked "anchor" and is not a prediction; all others are.
Nothing else was fitted. m is 4 for GPT-2 as in the anchors; stages hold L / P layers each, as in the paper, where P
divides L. Gradients are reduced after the pipelines, as in the paper; Morph reduces them during the last backward.
docs/reference/published-profiles.md lists the differences from the paper and their reasons.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from benchmarks.harness import PROFILES, head, row
from benchmarks.published import GPUS_PER_LARGE_VM, MODELS, published_profile
from benchmarks.published.speeds import ANCHORS
from morph.contract.plan import Plan, Schedule
from morph.contract.profile import Profile, load_profile
from simulator import plan, simulate

MICRO_BATCH_SIZE = 4
Shape = tuple[int, int]

TABLE_3: dict[Shape, float] = {
    (6, 6): 66.60,
    (9, 4): 65.88,
    (18, 2): 50.04,
    (6, 16): 155.52,
    (9, 11): 164.34,
    (18, 5): 99.00,
}
"""Examples/s of GPT-2 2.5B; the first three use 36 GPUs, the others up to 100."""
TABLE_3_GPUS = (36, 100)
TABLE_5_SHAPE: Shape = (19, 3)
TABLE_5: dict[float, tuple[float, float]] = {1.0: (0.6, 0.55), 1.5: (0.59, 0.48), 2.0: (0.59, 0.426)}
"""GPT-2 8.3B: how much slower the network is -> examples/s/GPU of Varuna and of GPipe. Simulated in the paper too."""
TABLE_5_BERT: dict[int, tuple[float, float]] = {16: (35.9, 21.1), 32: (41.8, 36.2)}
"""BERT-72 on one 4-GPU VM, 4 stages: m -> examples/s/GPU of Varuna and of GPipe, measured."""
MUCH_SLOWER = (4.0, 8.0)
VMS_SHAPE: Shape = (9, 8)
VMS: dict[int, float] = {1: 1.77, 4: 1.81}
"""GPUs of a VM -> examples/s/GPU with 72 GPUs; the model and shape are those of figure 8, nine stages as in 7.1.1."""
SCHEDULES: tuple[Schedule, Schedule] = ("varuna", "gpipe")
TABLE_7: dict[str, dict[Shape, float]] = {
    "gpt2-8.3b": {
        (36, 3): 140.3,
        (36, 2): 201.3,
        (36, 1): 390.0,
        (24, 4): 149.9,
        (24, 2): 280.4,
        (18, 6): 139.1,
        (18, 4): 203.1,
        (18, 3): 263.8,
    },
    "gpt2-2.5b": {(27, 2): 116.8, (18, 3): 96.6, (9, 7): 70.1, (6, 10): 75.2},
}
"""Measured seconds of one mini-batch."""
TABLE_7_ESTIMATED: dict[str, dict[Shape, float]] = {
    "gpt2-8.3b": {
        (36, 3): 142.8,
        (36, 2): 198.7,
        (36, 1): 368.3,
        (24, 4): 144.7,
        (24, 2): 272.4,
        (18, 6): 139.6,
        (18, 4): 202.6,
        (18, 3): 266.6,
    },
    "gpt2-2.5b": {(27, 2): 115.7, (18, 3): 92.6, (9, 7): 68.9, (6, 10): 77.5},
}
"""Estimates for the same rows by the paper's own simulator, calibrated on the VMs."""
TABLE_6_BATCH = 2400
MEGATRON: tuple[Schedule, Schedule] = ("varuna", "1f1b")
TABLE_6: dict[tuple[str, Shape], tuple[float, float]] = {
    ("gpt2-8.3b", (18, 4)): (0.59, 0.52),
    ("gpt2-2.5b", (9, 8)): (1.5, 1.31),
}
"""Model and shape -> examples/s/GPU of Varuna and of Megatron's 1F1B, measured."""


@dataclass(frozen=True)
class Answer:
    """One value of the paper and the simulator's answer to the same question."""

    question: str
    shape: Shape
    published: float
    answered: float
    is_anchor: bool = False

    @property
    def ratio(self) -> float:
        return self.answered / self.published


def shipped(model: str) -> Profile:
    return load_profile(PROFILES / f"{model}.json")


def as_published(
    profile: Profile,
    shape: Shape,
    schedule: Schedule = "varuna",
    *,
    gpus_per_vm: int | None = None,
    share_links: bool = True,
) -> Plan:
    """Stages of L / P layers where P divides L, else the best partition; m as in the anchors.

    On VMs with several GPUs, neighbouring stages share a VM, and all that leaves a VM shares its link.
    """
    depth, num_replicas = shape
    model = MODELS[profile.job.name]
    uniform = model.uniform_boundaries(depth) if model.num_layers % depth == 0 else None
    return simulate(
        profile,
        boundaries=uniform,
        num_stages=None if uniform else depth,
        num_replicas=num_replicas,
        micro_batch_size=MICRO_BATCH_SIZE,
        schedule=schedule,
        window_slope=1 if schedule == "1f1b" else None,
        num_gpus_per_node=gpus_per_vm,
        share_links=share_links,
        all_reduce="late",
    ).plan


def per_gpu(found: Plan) -> float:
    return found.expected.examples_per_s / found.num_workers


def table_3(profile: Profile, gpus_per_vm: int | None = None) -> tuple[Answer, ...]:
    return tuple(
        Answer(f"examples/s, {'36' if shape[0] * shape[1] == 36 else '100'} GPUs", shape, published, answered)
        for shape, published in TABLE_3.items()
        for answered in (as_published(profile, shape, gpus_per_vm=gpus_per_vm).expected.examples_per_s,)
    )


def vm_sizes(profile: Profile) -> tuple[Answer, ...]:
    """GPT-2 2.5B on 72 GPUs in VMs of one and of four."""
    return tuple(
        Answer(f"72 GPUs in {size}-GPU VMs: examples/s/GPU", VMS_SHAPE, published, answered)
        for size, published in VMS.items()
        for answered in (per_gpu(as_published(profile, VMS_SHAPE, gpus_per_vm=None if size == 1 else size)),)
    )


def best_shape(answers: Iterable[Answer], num_gpus: int, value: str) -> Shape:
    """Return the fastest of the shapes tried on so many GPUs, by "published" or "answered"."""
    tried = [answer for answer in answers if answer.question.endswith(f" {num_gpus} GPUs")]
    return max(tried, key=lambda answer: float(getattr(answer, value))).shape


def gpipe_beside_varuna(slower: float, *, share_links: bool = True) -> tuple[float, float]:
    """Return examples/s/GPU of Varuna and GPipe for the 8.3B model, with the bandwidth between VMs divided."""
    profile = shipped("gpt2-8.3b") if slower == 1 else published_profile("gpt2-8.3b", slower_network=slower)
    varuna, gpipe = (
        per_gpu(as_published(profile, TABLE_5_SHAPE, schedule, share_links=share_links)) for schedule in SCHEDULES
    )
    return varuna, gpipe


@lru_cache
def inferred_slowness() -> float:
    """Return the divisor of 10 Gbps for which the ratio of GPipe to Varuna is as published for the normal network."""
    varuna, gpipe = TABLE_5[1.0]
    low, high = 1.0, MUCH_SLOWER[-1]
    for _ in range(20):
        middle = (low + high) / 2
        here = gpipe_beside_varuna(middle, share_links=False)
        low, high = (middle, high) if here[1] / here[0] > gpipe / varuna else (low, middle)
    return low


def table_5_inferred() -> tuple[Answer, ...]:
    """Return only ratios: the bandwidth is inferred from one of them, and the others follow."""
    answers = []
    for slower, (varuna, gpipe) in TABLE_5.items():
        here = gpipe_beside_varuna(slower * inferred_slowness(), share_links=False)
        question = f"8.3B, network {slower:g}x slower: GPipe / Varuna"
        answers.append(Answer(question, TABLE_5_SHAPE, gpipe / varuna, here[1] / here[0], is_anchor=slower == 1))
    return tuple(answers)


def compared(
    question: str, shape: Shape, published: tuple[float, float], answered: tuple[float, float]
) -> list[Answer]:
    """Return rows for Varuna, for GPipe, and for the ratio of GPipe to Varuna."""
    return [
        Answer(f"{question}: Varuna, examples/s/GPU", shape, published[0], answered[0]),
        Answer(f"{question}: GPipe, examples/s/GPU", shape, published[1], answered[1]),
        Answer(f"{question}: GPipe / Varuna", shape, published[1] / published[0], answered[1] / answered[0]),
    ]


def table_5() -> tuple[Answer, ...]:
    answers: list[Answer] = []
    for slower, published in TABLE_5.items():
        question = f"8.3B, network {slower:g}x slower"
        answers += compared(question, TABLE_5_SHAPE, published, gpipe_beside_varuna(slower))
    return tuple(answers)


def table_5_bert() -> tuple[Answer, ...]:
    profile, answers = published_profile("bert-72"), []
    for m, published in TABLE_5_BERT.items():
        varuna, gpipe = (
            per_gpu(
                simulate(
                    profile,
                    num_stages=4,
                    micro_batch_size=m,
                    schedule=schedule,
                    num_gpus_per_node=GPUS_PER_LARGE_VM,
                ).plan
            )
            for schedule in SCHEDULES
        )
        answers += compared(f"BERT-72, m={m}", (4, 1), published, (varuna, gpipe))
    return tuple(answers)


def table_7() -> tuple[Answer, ...]:
    answers = []
    for model, rows in TABLE_7.items():
        profile, anchor = shipped(model), ANCHORS[model]
        for shape, published in rows.items():
            answered = as_published(profile, shape).expected.mini_batch_s
            is_anchor = shape == (anchor.num_stages, anchor.num_replicas)
            answers.append(Answer(f"{MODELS[model].title}: mini-batch, s", shape, published, answered, is_anchor))
    return tuple(answers)


def table_7_estimated() -> tuple[Answer, ...]:
    """Return the estimates of the paper's own simulator for table 7, which are not computed here."""
    return tuple(
        Answer(f"{MODELS[model].title}: mini-batch, s", shape, published, TABLE_7_ESTIMATED[model][shape])
        for model, rows in TABLE_7.items()
        for shape, published in rows.items()
    )


def table_6() -> tuple[Answer, ...]:
    answers: list[Answer] = []
    for (model, shape), published in TABLE_6.items():
        profile = shipped(model)
        job = profile.job.model_copy(update={"batch_size": TABLE_6_BATCH})
        profile = profile.model_copy(update={"job": job})
        for system, schedule, value in zip(("Varuna", "1F1B"), MEGATRON, published, strict=True):
            found = per_gpu(as_published(profile, shape, schedule))
            answers.append(Answer(f"{MODELS[model].title}: {system}, examples/s/GPU", shape, value, found))
        varuna, other = answers[-2:]
        ratio = Answer(f"{MODELS[model].title}: 1F1B / Varuna", shape, 0, 0)
        answers.append(
            replace(ratio, published=other.published / varuna.published, answered=other.answered / varuna.answered)
        )
    return tuple(answers)


def mean_error(answers: Iterable[Answer]) -> tuple[float, float]:
    """Return the mean and the largest distance of the ratio from 1, over predictions only."""
    errors = [abs(answer.ratio - 1) for answer in answers if not answer.is_anchor]
    return sum(errors) / len(errors), max(errors)


def show(title: str, answers: tuple[Answer, ...]) -> None:
    print(f"\n{title}")
    head("question | PxD | published | here | ratio")
    for answer in answers:
        note = " anchor, no prediction" if answer.is_anchor else ""
        cells = (f"{answer.published:.4g}", f"{answer.answered:.4g}", f"{answer.ratio:.2f}{note}")
        row(answer.question, _name(answer.shape), *cells)
    mean, worst = mean_error(answers)
    print(f"  predictions: off by {mean:.1%} in the mean, {worst:.1%} at worst")


def show_best(answers: tuple[Answer, ...], profile: Profile, gpus_per_vm: int | None) -> None:
    for num_gpus in TABLE_3_GPUS:
        published, answered = (best_shape(answers, num_gpus, value) for value in ("published", "answered"))
        print(f"  fastest of the three on {num_gpus}: published {_name(published)}, here {_name(answered)}")
        free = plan(profile, num_gpus=num_gpus, num_gpus_per_node=gpus_per_vm).best
        print(
            f"  any shape, m and partition on {num_gpus}: {free.shape}, m={free.micro_batch_size}, "
            f"{free.expected.examples_per_s:.4g} examples/s"
        )


def _name(shape: Shape) -> str:
    return f"{shape[0]}x{shape[1]}"


def main() -> None:
    small = shipped("gpt2-2.5b")
    for gpus_per_vm in (None, GPUS_PER_LARGE_VM):
        answers = table_3(small, gpus_per_vm)
        show(f"Table 3: shallow or deep? GPT-2 2.5B, {gpus_per_vm or 1}-GPU VMs", answers)
        show_best(answers, small, gpus_per_vm)
    show("Section 7.2: does the size of the VMs matter? GPT-2 2.5B", vm_sizes(small))
    show("Table 5: GPipe against Varuna, slower networks (simulated in the paper too)", table_5())
    for slower in MUCH_SLOWER:
        varuna, gpipe = gpipe_beside_varuna(slower)
        print(
            f"  {slower:g}x slower: Varuna {varuna:.3f}, GPipe {gpipe:.3f} examples/s/GPU, ratio {gpipe / varuna:.2f}"
        )
    slowness = inferred_slowness()
    show(
        f"Table 5 once more, on {10 / slowness:.2g} Gbps between stages, inferred from its first row",
        table_5_inferred(),
    )
    show("Table 5: GPipe against Varuna, one 4-GPU VM (measured in the paper)", table_5_bert())
    show("Table 6: 1F1B against Varuna, 1-GPU VMs (measured in the paper)", table_6())
    show("Table 7: the paper's own simulator, calibrated on its VMs", table_7_estimated())
    show("Table 7: measured mini-batches", table_7())

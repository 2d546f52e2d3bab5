"""Bamboo's redundant computation as published: predicted about as closely as docs/benchmarks.md says."""

from __future__ import annotations

import pytest

from benchmarks.bamboo_redundancy import inferred_latency_s, overhead, simulated, waits
from benchmarks.published.bamboo import MODELS_OF_TABLE_4, STAGES, Published, bert_layers, resnet_layers

BERT, RESNET = MODELS_OF_TABLE_4


@pytest.mark.parametrize(
    ("layers", "parameters", "flops"),
    [(tuple(bert_layers()), 365e6, 87e9), (tuple(resnet_layers()), 60.2e6, 23.1e9)],
    ids=["BERT-large, its head not tied", "ResNet-152"],
)
def test_the_models_have_as_many_parameters_and_operations_as_are_known(
    layers: tuple, parameters: float, flops: float
) -> None:
    assert sum(layer.parameters for layer in layers) == pytest.approx(parameters, rel=0.01)
    assert sum(layer.flops for layer in layers) == pytest.approx(flops, rel=0.01)


@pytest.mark.parametrize(("model", "m", "eflb", "efeb"), [(BERT, 1, 0.119, 0.603), (RESNET, 8, 0.017, 0.526)])
def test_table_4_and_figure_13_are_met_within_some_points(model: Published, m: int, eflb: float, efeb: float) -> None:
    found = simulated(model, m, inferred_latency_s(model, m))
    assert found["off"].expected.examples_per_s == pytest.approx(model.samples_per_s, rel=0.002)
    assert overhead(found, "eflb") == pytest.approx(eflb, abs=0.03)
    assert overhead(found, "efeb") == pytest.approx(efeb, abs=0.09)
    assert found["eflb"].mean_pause_s / found["lflb"].mean_pause_s == pytest.approx(0.65, abs=0.02)


def test_the_first_stages_of_figure_14_wait_longer_than_a_forward_takes() -> None:
    shares = waits(simulated(BERT, 1, inferred_latency_s(BERT, 1))["off"])
    assert len(shares) == STAGES
    assert min(shares[:3]) > 1 > max(shares[3:-1])

"""A run's figures in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class _Figures(Collector):
    def __init__(self, known: dict[str, Any]) -> None:
        self._known = known

    def collect(self) -> Iterator[Metric]:
        known = self._known
        for name, text, value in (
            ("morph_version", "Decided steps; falls when a step was lost.", known["version"]),
            ("morph_generation", "Memberships formed so far.", known["generation"]),
            ("morph_saved_version", "Version of the newest complete checkpoint.", known["saved_version"]),
            ("morph_loss", "Loss of the last decided step.", known["loss"]),
            (
                "morph_learning_rate",
                "Highest learning rate of the last decided step.",
                (known["learning_rates"] or (0, None))[1],
            ),
            ("morph_examples_per_second", "Speed over the last decided steps.", known["examples_per_s"]),
            ("morph_workers", "Workers with a place in the present shape.", sum(len(row) for row in known["grid"])),
        ):
            if value is not None:
                yield GaugeMetricFamily(name, text, value=value)
        metrics = GaugeMetricFamily("morph_metric", "The job's own metrics of the last decided step.", labels=["name"])
        evaluated = GaugeMetricFamily("morph_evaluation", "Loss and metrics of the newest evaluation.", labels=["name"])
        newest = known["evaluations"][-1] if known["evaluations"] else {"metrics": {}, "loss": None}
        for family, values in ((metrics, known["metrics"]), (evaluated, {"loss": newest["loss"], **newest["metrics"]})):
            for name, value in values.items():
                if value is not None:
                    family.add_metric([name], value)
            yield family
        others = GaugeMetricFamily("morph_other_nodes", "Nodes without a place.", labels=["state"])
        for state in sorted({node["state"] for node in known["others"]}):
            others.add_metric([state], sum(node["state"] == state for node in known["others"]))
        yield others
        phase = GaugeMetricFamily("morph_phase", "1 for the present phase and shape.", labels=["phase", "shape"])
        phase.add_metric([known["phase"], known["shape"] or ""], 1)
        yield phase
        seconds = CounterMetricFamily("morph_node_seconds", "Node-seconds by use.", labels=["part"])
        for part, spent_s in known["node_seconds"].items():
            seconds.add_metric([part], spent_s)
        yield seconds
        if known["dollars"] is not None:
            yield CounterMetricFamily("morph_dollars", "Spent so far.", value=known["dollars"])
            dollars = CounterMetricFamily("morph_part_dollars", "Dollars by use.", labels=["part"])
            for part, spent_usd in known["part_dollars"].items():
                dollars.add_metric([part], spent_usd)
            yield dollars


def metrics_text(known: dict[str, Any]) -> bytes:
    """Return a snapshot in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(known))
    return generate_latest(registry)

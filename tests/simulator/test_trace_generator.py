from collections import Counter
from pathlib import Path

import pytest

from morph.contract.errors import ConfigError
from morph.contract.trace import Trace, load_trace, parse_trace, write_trace
from simulator.generators.trace_generator import generate_trace


def _alive_after_each(trace: Trace) -> list[int]:
    alive, counts = 0, []
    for event in trace.events:
        alive += 1 if event.event == "add" else -1
        counts.append(alive)
    return counts


def test_the_same_seed_gives_the_identical_trace() -> None:
    assert generate_trace(7) == generate_trace(7)
    assert generate_trace(7) != generate_trace(8)


@pytest.mark.parametrize("seed", range(20))
def test_a_generated_trace_is_valid_keeps_its_bounds_and_survives_a_round_trip(seed: int, tmp_path: Path) -> None:
    trace = generate_trace(seed, initial=5, min_nodes=2, max_nodes=7, mean_revocation_s=60, bulk_share=0.5)
    write_trace(trace, tmp_path / "trace.csv")
    assert load_trace(tmp_path / "trace.csv") == trace
    counts = _alive_after_each(trace)
    assert counts[4] == 5
    assert min(counts[4:]) >= 2
    assert max(counts) <= 7
    assert trace.duration_s <= 3600


def _removed_at_once(bulk_share: float) -> Counter[float]:
    trace = generate_trace(1, initial=8, max_nodes=8, mean_revocation_s=120, bulk_share=bulk_share, replacement_s=20)
    return Counter(event.time_s for event in trace.events if event.event == "remove")


def test_the_bulk_share_decides_how_many_vms_go_at_once() -> None:
    assert set(_removed_at_once(0.0).values()) == {1}
    assert min(_removed_at_once(1.0).values()) >= 2


def test_a_bulk_revocation_empties_one_zone_first() -> None:
    trace = generate_trace(3, initial=8, max_nodes=8, mean_revocation_s=600, bulk_share=1.0)
    first = [event for event in trace.events if event.event == "remove"]
    at_once = [event.zone for event in first if event.time_s == first[0].time_s]
    assert len(at_once) >= 2
    assert len(set(at_once)) == 1


def test_lost_vms_are_replaced_under_new_names() -> None:
    trace = generate_trace(5, mean_revocation_s=60)
    added = [event.node_id for event in trace.events if event.event == "add"]
    assert len(set(added)) == len(added) > 8


def test_the_csv_form_of_a_generated_trace_parses() -> None:
    lines = ["time_s,event,node_id", *(f"{e.time_s:g},{e.event},{e.node_id}" for e in generate_trace(2).events)]
    assert len(parse_trace(lines, "generated").events) == len(generate_trace(2).events)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("duration_s", 0.0),
        ("initial", 0),
        ("max_nodes", 2),
        ("mean_revocation_s", 0.0),
        ("bulk_share", 1.5),
        ("zones", ()),
    ],
)
def test_an_argument_out_of_range_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        generate_trace(0, **{field: value})  # type: ignore[arg-type]

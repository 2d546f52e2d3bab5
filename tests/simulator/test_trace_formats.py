"""Formats in which others publish traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from morph.contract.errors import TraceError
from morph.contract.trace import Trace, load_trace, write_trace
from simulator.traces.importers import ZoneAndType, import_trace, merged, part_of
from simulator.traces.statistics import statistics_of

TRACES = Path(__file__).resolve().parents[2] / "../shared/traces"


def imported(tmp_path: Path, text: str, name: str = "spot.txt", place: ZoneAndType = ZoneAndType()) -> Trace:  # noqa: B008
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return import_trace(path, place)


def told(trace: Trace) -> list[tuple[float, str, str]]:
    return [(event.time_s, event.event, event.node_id) for event in trace.events]


def test_events_begin_at_time_0(tmp_path: Path) -> None:
    trace = imported(
        tmp_path, "480000,add,node1\n540000,add,node2\n600500,remove,node1\n", place=ZoneAndType("z", "g4dn")
    )
    assert told(trace) == [(0, "add", "node1"), (60, "add", "node2"), (120.5, "remove", "node1")]
    assert {(event.zone, event.instance_type) for event in trace.events} == {("z", "g4dn")}


def test_counts_become_vms_that_come_and_go(tmp_path: Path) -> None:
    trace = imported(tmp_path, "2021-12-11, 11:11:30, 2\n2021-12-11, 11:13:10, 3\n2021-12-12, 11:13:10, 1\n")
    assert [(time_s, event) for time_s, event, _ in told(trace)] == [
        (0, "add"), (0, "add"), (100, "add"), (86500, "remove"), (86500, "remove"),
    ]  # fmt: skip
    assert trace.end_s == 86500


def test_a_recording_that_ends_quietly_ends_with_its_last_observation(tmp_path: Path) -> None:
    counts = imported(tmp_path, "2021-12-11, 11:00:00, 2\n2021-12-11, 12:00:00, 1\n2021-12-11, 15:00:00, 1\n")
    assert (counts.events[-1].time_s, counts.duration_s) == (3600, 4 * 3600)
    assert statistics_of(counts)["unknown"].vm_hours == 2 + 3
    one, two = (imported(tmp_path, availability(*data), "z_t.json") for data in ((2, 1, 1, 1), (2, 2)))
    assert (one.duration_s, two.duration_s) == (4 * 300, 2 * 300)
    assert merged([("one", one), ("two", two)]).duration_s == 4 * 300
    assert part_of(one, 300, 1000).duration_s == 700
    assert part_of(one, 300, 5000).duration_s == 900
    assert part_of(imported(tmp_path, "0,add,a\n60000,remove,a\n"), 30, 50).duration_s == 20


def test_a_repeated_older_count_after_a_newer_one_is_ignored(tmp_path: Path) -> None:
    lines = ["13:07:45, 2", "13:08:45, 2", "13:09:45, 2", "13:08:50, 1", "13:09:50, 1", "13:09:51, 2"]
    trace = imported(tmp_path, "".join(f"2021-12-10, {line}\n" for line in lines))
    assert [(time_s, event) for time_s, event, _ in told(trace)] == [
        (0, "add"), (0, "add"), (65, "remove"), (126, "add"),
    ]  # fmt: skip


def availability(*counts: int, **more: object) -> str:
    return json.dumps({"metadata": {"gap_seconds": 300}, "data": counts, **more})


def test_availability_of_several_zones_is_one_cluster_with_prices(tmp_path: Path) -> None:
    one = imported(tmp_path, availability(0, 2, 1, prices=[0.9, 0.9, 1.1]), "us-east-2b_v100_1.json")
    two = imported(tmp_path, availability(1, 1, 0), "us-west-2a_v100_1.json")
    trace = merged([("one", one), ("two", two)])
    write_trace(trace, tmp_path / "out.csv")
    assert load_trace(tmp_path / "out.csv") == trace
    assert [(event.time_s, event.event, event.zone) for event in trace.events] == [
        (0, "add", "us-west-2a"),
        (300, "add", "us-east-2b"),
        (300, "add", "us-east-2b"),
        (600, "remove", "us-east-2b"),
        (600, "remove", "us-west-2a"),
    ]
    assert {event.instance_type for event in trace.events} == {"v100_1"}
    assert [(price.time_s, price.usd_per_h) for price in trace.prices] == [(0, 0.9), (600, 1.1)]
    assert trace.price_at(700, "us-east-2b", "v100_1") == 1.1


def test_a_part_begins_with_the_vms_that_are_there(tmp_path: Path) -> None:
    trace = imported(tmp_path, availability(2, 2, 1, 3, 0, prices=[1, 2, 2, 3, 3]), "z_t.json")
    part = part_of(trace, 400, 1000)
    assert [(event.time_s, event.event) for event in part.events] == [
        (0, "add"), (0, "add"), (200, "remove"), (500, "add"), (500, "add"),
    ]  # fmt: skip
    assert [(price.time_s, price.usd_per_h) for price in part.prices] == [(0, 2), (500, 3)]
    with pytest.raises(TraceError, match="holds no VM"):
        part_of(trace, 1300, 2000)


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("a.txt", "hello\n", ["a.txt, line 1", "is in no known format", "'hello'"]),
        ("a.txt", "", ["is in no known format"]),
        ("a.txt", "0,add,a\n5,add\n", ["a.txt, line 2", "wrong number of columns"]),
        ("a.txt", "0,add,a\n5,grow,b\n", ["a.txt, line 2", "event", "'grow'"]),
        ("a.txt", "0,add,a\n\n5,add,a\n", ["a.txt, line 3", "already there"]),
        ("a.txt", "0,add,a\n5,remove,b\n", ["a.txt, line 2", "not there"]),
        ("a.txt", "0,add,a\n9,remove,b\n5,add,b\n", ["a.txt, line 3", "time steps back", "time_ms", "at least 9,"]),
        ("a.txt", "0,add,a\nx,add,b\n", ["a.txt, line 2", "time_ms", "'x'"]),
        ("a.txt", "0,add,a\n1,add,b c\n", ["a.txt, line 2", "'b c'"]),
        ("a.txt", "2021-12-11, 11:11:30, 2\n2021-13-11, 11:11:30, 2\n", ["a.txt, line 2", "is not a time"]),
        ("a.txt", "2021-12-11, 11:11:30, 2\n2021-12-11, 11:12:30, 2.5\n", ["a.txt, line 2", "whole number"]),
        ("a.json", '{"metadata": {"gap_seconds": 300},\n "data": [1,]}', ["a.json, line 2", "is not JSON"]),
        ("a.json", '{"data": [1]}', ["metadata.gap_seconds"]),
        ("a.json", '{"metadata": {"gap_seconds": 0}, "data": [1]}', ["metadata.gap_seconds", "more than 0"]),
        ("a.json", '{"metadata": {"gap_seconds": 1e400}, "data": [1]}', ["gap_seconds", "at most 1000000"]),
        ("a.json", '{"a": ' * 9999, ["a.json: is nested too deeply"]),
        ("a.json", '{"metadata": {"gap_seconds": 3}, "data": [1], "prices": [1e9]}', ["prices[0]", "0 to 1000000"]),
        ("a.json", '{"metadata": {"gap_seconds": 3}, "data": [1, 1e300]}', ["data[1]", "0 to"]),
        ("a.txt", "0,add,a\n1e300,add,b\n", ["a.txt, line 2", "time_ms", "1e300"]),
        ("a.json", '{"metadata": {"gap_seconds": 3}, "data": []}', ["data", "empty"]),
        ("a.json", '{"metadata": {"gap_seconds": 3}, "data": [1, -2]}', ["data[1]", "-2"]),
        ("a.json", '{"metadata": {"gap_seconds": 3}, "data": [1, 2], "prices": [1]}', ["prices", "2, as data"]),
    ],
)  # fmt: skip
def test_errors_are_named_with_their_line(tmp_path: Path, name: str, text: str, parts: list[str]) -> None:
    with pytest.raises(TraceError) as caught:
        imported(tmp_path, text, name)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the published traces are not there")
@pytest.mark.parametrize(
    ("published", "normalised"),
    [
        ("p3-trace.csv", "bamboo_p3.csv"),
        ("v100x1-east1c.txt", "bamboo_gcp_v100.csv"),
        ("a100x1-east1b.txt", "bamboo_gcp_a100.csv"),
    ],
)
def test_published_traces_have_as_many_vms_at_every_time_as_their_normalised_form(
    published: str, normalised: str
) -> None:
    def counts(trace: Trace) -> list[tuple[float, int]]:
        now, found = 0, dict[float, int]()
        for event in trace.events:
            now += 1 if event.event == "add" else -1
            found[event.time_s] = now
        return list(found.items())

    assert counts(import_trace(TRACES / "bamboo" / published)) == counts(load_trace(TRACES / normalised))

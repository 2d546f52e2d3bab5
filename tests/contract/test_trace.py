from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from morph.contract.errors import TraceError
from morph.contract.lives import recorded
from morph.contract.trace import HEADER, Trace, TraceEvent, TracePrice, load_trace, parse_trace, write_trace
from simulator import spot_model

HEAD = "time_s,event,node_id\n"


def parse(text: str) -> Trace:
    return parse_trace(text.splitlines(keepends=True), "spot.csv")


TIMES = st.lists(st.floats(0, 1e9, allow_nan=False), min_size=1, max_size=12).map(sorted)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00\r", exclude_categories=("Cs",)), max_size=12)


@pytest.mark.slow
@given(TIMES, TEXT, TEXT)
def test_a_written_trace_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, times: list[float], zone: str, source: str
) -> None:
    events = tuple(
        TraceEvent(time_s=time_s, event="add", node_id=f"vm{index}", zone=zone, source=source)
        for index, time_s in enumerate(times)
    )
    path = tmp_path_factory.mktemp("trace") / "spot.csv"
    write_trace(Trace(events=events), path)
    assert load_trace(path) == Trace(events=events)


def test_the_first_three_columns_are_enough_and_may_come_in_any_order() -> None:
    trace = parse("node_id,time_s,event\na,0,add\nb,2.5,add\na,9,remove\na,9,add\n")
    assert trace.events[1] == TraceEvent(time_s=2.5, event="add", node_id="b")
    assert trace.events[1].zone == "unknown"
    assert trace.duration_s == 9
    assert trace.max_nodes == 2


FULL = "time_s,event,node_id,zone,instance_type,notice_s,usd_per_h\n"
LINES = """\
0,price,,east,p3,,0.9
0,price,,west,p3,,0.8
0,add,a,east,p3,,
10,add,b,east,p3,,
60,price,,east,p3,,1.2
70,remove,b,east,p3,60,
80,remove,a,east,p3,75,
90,price,,east,p3,,1.1
"""


def warnings_of(trace: Trace) -> list[tuple[float, str]]:
    return [(change.time_s, change.event.node_id) for change in recorded(trace) if change.kind == "warned"]


def test_notices_and_prices_are_read_written_and_scaled(tmp_path: Path) -> None:
    trace = parse(FULL + LINES)
    assert warnings_of(trace) == [(5.0, "a"), (10.0, "b")]
    assert (trace.max_nodes, trace.duration_s, len(trace.events)) == (2, 90.0, 4)
    write_trace(trace, tmp_path / "spot.csv")
    assert load_trace(tmp_path / "spot.csv") == trace
    half = trace.scaled(0.5)
    assert warnings_of(half) == [(2.5, "a"), (5.0, "b")]
    assert [price.time_s for price in half.prices] == [0, 0, 30, 45]
    assert half.prices[-1] == TracePrice(time_s=45, usd_per_h=1.1, zone="east", instance_type="p3")


def test_a_price_holds_until_the_next_for_its_zone_and_instance_type() -> None:
    trace = parse(FULL + LINES)
    assert [trace.price_at(time_s, "east", "p3") for time_s in (0, 59.9, 60, 1000)] == [0.9, 0.9, 1.2, 1.1]
    assert trace.price_at(1000, "west", "p3") == 0.8
    assert trace.price_at(1000, "west", "p2") is None
    assert parse(FULL + LINES.split("\n", 1)[1]).price_at(59, "east", "p3") is None


def test_a_trace_without_notices_and_prices_keeps_its_old_format(tmp_path: Path) -> None:
    write_trace(parse(HEAD + "0,add,a\n"), tmp_path / "spot.csv")
    lines = (tmp_path / "spot.csv").read_text(encoding="utf-8").splitlines()
    assert lines == ["time_s,event,node_id,zone,instance_type,source", "0,add,a,unknown,unknown,"]


@given(st.floats(0, 1e6), st.floats(0.001, 1e6), st.floats(1e-6, 1e3))
def test_a_scaled_notice_comes_no_earlier_than_its_vm(added_s: float, lived_s: float, factor: float) -> None:
    lived_s = max(lived_s, added_s * 1e-9)
    text = FULL + f"{added_s!r},add,a,,,,\n{added_s + lived_s!r},remove,a,,,{lived_s!r},\n"
    scaled = parse(text).scaled(factor)
    event = scaled.events[1]
    (warned,) = (change for change in recorded(scaled) if change.kind == "warned")
    assert scaled.events[0].time_s <= warned.time_s <= warned.taken_s == event.time_s
    assert event.notice_s is not None
    assert parse(FULL + f"{scaled.events[0].time_s!r},add,a,,,,\n{event.time_s!r},remove,a,,,{event.notice_s!r},\n")


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ("20,remove,a,,,0,", ["notice_s", "'0'", "above 0"]),
        ("20,remove,a,,,soon,", ["notice_s", "'soon'"]),
        ("20,remove,a,,,21,", ["notice_s", "21.0", "not present yet", "at most 20.0"]),
        ("20,remove,a,,,,0.9", ["usd_per_h", "'0.9'", "does not belong to a line of event remove"]),
        ("20,add,b,,,30,", ["notice_s", "'30'", "does not belong to a line of event add"]),
        ("20,price,a,,,,0.9", ["node_id", "'a'", "does not belong to a line of event price"]),
        ("20,price,,,,,", ["usd_per_h", "is missing"]),
        ("20,price,,,,,-1", ["usd_per_h", "'-1'"]),
        ("20,price,,,,,nan", ["usd_per_h", "finite"]),
        ("20,price,,,,,1e300", ["usd_per_h", "'1e300'", "at most 1000000"]),
        ("20,add,,,,,", ["node_id", "is missing"]),
        ("-1,price,,,,,1", ["time_s", "'-1'"]),
    ],
)
def test_a_wrong_notice_or_price_is_named(row: str, parts: list[str]) -> None:
    with pytest.raises(TraceError) as caught:
        parse(f"{FULL}0,add,a,,,,\n{row}\n")
    for part in ["spot.csv, line 3:", *parts]:
        assert part in str(caught.value)


def test_prices_are_in_time_order_with_the_events() -> None:
    with pytest.raises(TraceError, match=r"line 3.*time steps back.*at least 5,"):
        parse(FULL + "5,price,,,,,1\n4,add,a,,,,\n")


def test_a_quiet_time_after_the_last_event_is_kept(tmp_path: Path) -> None:
    trace = parse(HEAD + "0,add,a\n60,remove,a\n3600,end,\n")
    assert (trace.end_s, trace.duration_s, len(trace.events)) == (3600.0, 3600.0, 2)
    write_trace(trace, tmp_path / "spot.csv")
    assert (tmp_path / "spot.csv").read_text().splitlines()[-1] == "3600,end,,,,"
    assert load_trace(tmp_path / "spot.csv") == trace
    assert trace.scaled(0.5).duration_s == 1800.0
    assert parse(HEAD + "0,add,a\n60,remove,a\n").duration_s == 60.0


def test_time_can_be_scaled() -> None:
    trace = parse(HEAD + "1,add,a\n60,remove,a\n").scaled(0.5)
    assert [event.time_s for event in trace.events] == [0.5, 30.0]


@pytest.mark.parametrize(
    ("rows", "line", "parts"),
    [
        (["0,add,a", "x,add,b"], 3, ["time_s", "'x'"]),
        (["-1,add,a"], 2, ["time_s", "'-1'", "at least 0"]),
        (["nan,add,a"], 2, ["time_s", "finite"]),
        (["inf,add,a"], 2, ["time_s", "finite"]),
        (["0,add,a", "1e300,end,"], 3, ["time_s", "'1e300'", "at most 10000000000000"]),
        (["0,grow,a"], 2, ["event", "'grow'", "'add'", "'remove'", "'price'", "'end'"]),
        (["0,add,a", "9,end,", "9,remove,a"], 4, ["after the trace's end", "'remove'"]),
        (["0,add,a", "9,end,", "9,end,"], 4, ["after the trace's end", "'end'"]),
        (["0,add,a", "9,end,a"], 3, ["node_id", "'a'", "does not belong to a line of event end"]),
        (["9,add,a", "5,end,"], 3, ["time steps back"]),
        (["0,add,a", ",end,"], 3, ["time_s"]),
        (["0,add,a b"], 2, ["node_id", "'a b'"]),
        (["0,add,../a"], 2, ["node_id", "'../a'"]),
        (["0,add,"], 2, ["node_id"]),
        (["5,add,a", "4,add,b"], 3, ["time steps back, so the file is not sorted", "time_s", "4.0", "at least 5,"]),
        (["0,add,a", "9,remove,b", "3,add,b"], 4, ["time steps back, so the file is not sorted", "3.0"]),
        (["0,add,a", "1,add,a"], 3, ["already there", "node_id", "'a'"]),
        (["0,add,a", "1,remove,b"], 3, ["not there", "'b'"]),
        (["0,add,a", "1,remove,a", "2,remove,a"], 4, ["not there"]),
        (["0,add"], 2, ["columns", "3 columns"]),
        (["0,add,a,b"], 2, ["columns", "3 columns"]),
        (["0,add,a", "", "x,add,b"], 4, ["time_s"]),
        (["0,add,a", f"1,add,{'b' * 200_000}"], 3, ["is not CSV"]),
    ],
)
def test_a_wrong_line_is_named_with_field_and_value(rows: list[str], line: int, parts: list[str]) -> None:
    with pytest.raises(TraceError) as caught:
        parse(HEAD + "\n".join(rows) + "\n")
    for part in [f"spot.csv, line {line}:", *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize("header", ["", "time_s,event", "time_s,event,node_id,colour", "time_s,event,node_id,time_s"])
def test_a_wrong_header_is_refused_and_the_right_one_shown(header: str) -> None:
    with pytest.raises(TraceError) as caught:
        parse(f"{header}\n0,add,a,b\n")
    assert "line 1" in str(caught.value)
    assert ",".join(HEADER) in str(caught.value)


def test_a_trace_without_events_is_refused() -> None:
    with pytest.raises(TraceError, match=r"spot\.csv: holds no events"):
        parse(HEAD)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.csv: cannot be read: No such file"):
        load_trace(tmp_path / "none.csv")


def test_a_directory_is_not_a_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is a folder"):
        load_trace(tmp_path)


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "spot.csv"
    path.write_bytes(HEAD.encode() + b"0,add,\xff\xfe\n")
    with pytest.raises(TraceError, match=r"spot\.csv: is not UTF-8"):
        load_trace(path)


@pytest.mark.slow
@given(st.integers(0, 200), st.integers(1, 6))
def test_a_smaller_cluster_takes_as_many_vms_as_there_are(seed: int, most: int) -> None:
    trace = spot_model(8, losses_per_vm_h=6, bulk_share=0.3, replacement_s=600, noticed=0.5).draw(seed, 7200)
    fewer = trace.at_most(most)
    assert fewer.max_nodes <= most
    assert fewer.duration_s == trace.duration_s
    assert {(event.node_id, event.time_s) for event in fewer.events if event.event == "remove"} <= {
        (event.node_id, event.time_s) for event in trace.events if event.event == "remove"
    }
    for time_s in {event.time_s for event in trace.events}:
        assert alive(fewer, time_s) <= alive(trace, time_s)
        assert len(alive(fewer, time_s)) == min(most, len(alive(trace, time_s)))


def alive(trace: Trace, time_s: float) -> set[str]:
    there: set[str] = set()
    for event in trace.events:
        if event.time_s <= time_s:
            there = there | {event.node_id} if event.event == "add" else there - {event.node_id}
    return there

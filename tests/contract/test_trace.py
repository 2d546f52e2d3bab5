from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from morph.contract.errors import TraceError
from morph.contract.trace import HEADER, Trace, TraceEvent, load_trace, parse_trace, write_trace

HEAD = "time_s,event,node_id\n"


def parse(text: str) -> Trace:
    return parse_trace(text.splitlines(keepends=True), "spot.csv")


TIMES = st.lists(st.floats(0, 1e9, allow_nan=False), min_size=1, max_size=12).map(sorted)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00\r", exclude_categories=("Cs",)), max_size=12)


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


def test_time_can_be_scaled() -> None:
    trace = parse(HEAD + "1,add,a\n60,remove,a\n").scaled(0.5)
    assert [event.time_s for event in trace.events] == [0.5, 30.0]


@pytest.mark.parametrize(
    ("rows", "line", "parts"),
    [
        (["0,add,a", "x,add,b"], 3, ["time_s", "'x'"]),
        (["-1,add,a"], 2, ["time_s", "'-1'", "greater than or equal to 0"]),
        (["nan,add,a"], 2, ["time_s", "finite"]),
        (["inf,add,a"], 2, ["time_s", "finite"]),
        (["0,grow,a"], 2, ["event", "'grow'", "'add'", "'remove'"]),
        (["0,add,a b"], 2, ["node_id", "'a b'"]),
        (["0,add,../a"], 2, ["node_id", "'../a'"]),
        (["0,add,"], 2, ["node_id"]),
        (["5,add,a", "4,add,b"], 3, ["time steps back", "time_s", "4.0", "at least 5.0"]),
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


def test_a_directory_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(tmp_path)


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "spot.csv"
    path.write_bytes(HEAD.encode() + b"0,add,\xff\xfe\n")
    with pytest.raises(TraceError, match=r"spot\.csv: is not UTF-8"):
        load_trace(path)

"""Profiles, plans, pools and other files: each error names file, field and value."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from manager import run_dir
from morph.contract.errors import InputError, PlanError, ProfileError
from morph.contract.files import PRIVATE, RUN, check_output, write_output, write_whole
from morph.contract.plan import Expectation, PipelineKind, Plan, StagePlan, kinds_in, load_plan, reduction_rounds
from morph.contract.pool import Pool
from morph.contract.profile import Profile, load_profile
from simulator import plan, synthetic_profile


def test_a_file_is_replaced_whole_with_the_mode_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("a longer text than the next")
    path.chmod(0o644)
    write_whole(path, b"new", PRIVATE)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"new", 0o600)
    write_whole(path, "gr\u00fcn")
    assert path.read_bytes() == "gr\u00fcn".encode()
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]


def test_a_file_that_cannot_be_replaced_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "taken" / "inside").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "taken", "text")
    assert [entry.name for entry in tmp_path.rglob("*")] == ["taken", "inside"]


def test_an_output_does_not_replace_what_its_command_reads(tmp_path: Path) -> None:
    """``morph plan p.json -o p.json`` lost the profile."""
    (profile := tmp_path / "p.json").touch()
    (link := tmp_path / "link").symlink_to(profile)
    check_output(tmp_path / "plan.json", read=[profile, None, tmp_path / "gone"])
    with pytest.raises(InputError, match="link: cannot be written: the command reads this file; allowed: another name"):
        check_output(link, read=[None, profile])


def test_what_a_user_requests_is_written_through_a_link(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("file")
    write_output(link, "text")
    assert (link.is_symlink(), (tmp_path / "file").read_text()) == (True, "text")
    (tmp_path / "lost").symlink_to("no/file")
    with pytest.raises(InputError, match="lost: cannot be written: No such file"):
        write_output(tmp_path / "lost", "text")


def test_an_output_replaces_no_device_and_no_pipe(tmp_path: Path) -> None:
    """``--csv /dev/stdout`` as root put a file in the place of the device, also where a link leads to a file."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null"), Path("/dev/stdout"), Path("/dev/new")):
        with pytest.raises(InputError, match=f"^{path}: cannot be written: it is a device or a pipe; allowed: a reg"):
            check_output(path)


@pytest.mark.parametrize("name", [RUN, run_dir.LOCK, run_dir.COMMAND, run_dir.JOURNAL, run_dir.ATTACHMENT])
def test_an_output_replaces_no_file_that_its_run_needs(tmp_path: Path, name: str) -> None:
    check_output(tmp_path / name)
    (tmp_path / RUN).touch()
    with pytest.raises(InputError, match="the run in its folder needs this file; allowed: another name"):
        check_output(tmp_path / name)
    check_output(tmp_path / "report.html", tmp_path / "timeline-0.json")


Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def profile() -> Profile:
    return synthetic_profile(num_sections=4, batch_size=14, micro_batch_sizes=(1, 2), tied=True)


@pytest.fixture(scope="module")
def planned(profile: Profile) -> Plan:
    return plan(profile, num_gpus=6, pipeline_depth=2, num_replicas=3, micro_batch_size=2).best


def changed_file(tmp_path: Path, text: str, change: Change) -> Path:
    content = json.loads(text)
    change(content)
    path = tmp_path / "value.json"
    path.write_text(json.dumps(content))
    return path


def test_a_profile_reads_back_the_same(tmp_path: Path, profile: Profile) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile.model_dump_json())
    assert load_profile(path) == profile


def test_a_plan_reads_back_the_same(tmp_path: Path, planned: Plan) -> None:
    path = tmp_path / "plan.json"
    path.write_text(planned.model_dump_json())
    assert load_plan(path) == planned


PROFILE_MISTAKES: dict[str, tuple[Change, list[str]]] = {
    "another schema": (lambda p: p.update(schema_version=0), ["schema_version", "(got 0)"]),
    "no sections": (lambda p: p.update(sections=[]), ["sections", "at least 1"]),
    "an unknown field": (lambda p: p["job"].update(colour="red"), ["job.colour", "'red'"]),
    "a missing field": (lambda p: p["job"].pop("batch_size"), ["job.batch_size", "is missing"]),
    "a negative time": (
        lambda p: p["sections"][1]["forward"]["2"].update(median_s=-1),
        ["sections.1.forward.2.median_s", "(got -1)"],
    ),
    "a wrong number": (lambda p: p["sections"][2].update(index=7), ["sections[2].index is 7"]),
    "a missing backward": (lambda p: p["sections"][3]["backward"].pop("2"), ["sections[3]", "same micro-batch sizes"]),
    "other sizes": (
        lambda p: [p["sections"][1][key].pop("2") for key in ("forward", "backward")],
        ["sections[1]", "other micro-batch sizes"],
    ),
    "a unit outside": (lambda p: p["units"][0].update(sections=[9]), ["unit 's0'", "outside 0..3"]),
    "a size that is text": (lambda p: p["sections"][0].update(parameter_bytes="many"), ["parameter_bytes", "'many'"]),
}


@pytest.mark.parametrize("mistake", PROFILE_MISTAKES)
def test_a_wrong_profile_names_file_field_and_value(tmp_path: Path, profile: Profile, mistake: str) -> None:
    change, parts = PROFILE_MISTAKES[mistake]
    with pytest.raises(ProfileError) as caught:
        load_profile(changed_file(tmp_path, profile.model_dump_json(), change))
    for part in ["value.json", *parts]:
        assert part in str(caught.value)


PLAN_MISTAKES: dict[str, tuple[Change, list[str]]] = {
    "a gap between stages": (lambda p: p["stages"][1].update(first_section=3), ["stages[1] does not begin at section"]),
    "an empty stage": (lambda p: p["stages"][0].update(end_section=0), ["stages.0.end_section"]),
    "more replicas than micro-batches": (lambda p: p.update(num_replicas=9), ["9 replicas", "7 micro-batches"]),
    "a count without orders": (lambda p: p["orders"].pop("3"), ["orders lack 3 micro-batches"]),
    "an order that drops a task": (
        lambda p: p["orders"]["2"].__setitem__(0, p["orders"]["2"][0][:-1]),
        ["orders[2][0]"],
    ),
    "an order with a strange letter": (
        lambda p: p["orders"]["2"].__setitem__(0, p["orders"]["2"][0] + "X"),
        ["orders[2][0]"],
    ),
    "a recompute that is not planned": (lambda p: p["stages"][0].update(recompute=False), ["orders[", "][0]"]),
    "a schedule that is not known": (lambda p: p.update(schedule="fast"), ["schedule", "'fast'", "'gpipe'"]),
    "an empty window": (lambda p: p["stages"][0].update(window=0), ["stages.0.window", "(got 0)"]),
}


@pytest.mark.parametrize("mistake", PLAN_MISTAKES)
def test_a_plan_that_cannot_be_names_file_and_place(tmp_path: Path, planned: Plan, mistake: str) -> None:
    change, parts = PLAN_MISTAKES[mistake]
    with pytest.raises(PlanError) as caught:
        load_plan(changed_file(tmp_path, planned.model_dump_json(), change))
    for part in ["value.json", *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize("load", [load_profile, load_plan])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, load: Callable[[Path], object]) -> None:
    broken, binary = tmp_path / "broken.json", tmp_path / "binary.json"
    broken.write_text('{"schema_version": 1, ' + "x" * 5000)
    binary.write_bytes(b"\xff\xfe\x00")
    for path, problem in (
        (tmp_path / "none.json", "No such file"),
        (tmp_path, "is a folder"),
        (broken, "JSON"),
        (binary, "UTF-8"),
    ):
        with pytest.raises(InputError) as caught:
            load(path)
        assert str(path) in str(caught.value)
        assert problem in str(caught.value)
        assert len(str(caught.value)) < 400  # without the whole file


def test_every_micro_batch_is_dealt_to_exactly_one_replica(planned: Plan) -> None:
    assert planned.micro_batches_per_replica == (3, 2, 2)
    dealt = [number for replica in range(3) for number in planned.share_of(replica, range(7))]
    assert dealt == list(range(7))
    assert planned.shape == "2x3"
    assert planned.num_workers == 6


def uneven(**changes: object) -> Plan:
    """Return a plan of two pipelines of two stages and one of three, for five sections and seven micro-batches."""
    cuts = ((0, 3), (3, 5), (0, 2), (2, 4), (4, 5))
    given: dict[str, object] = {
        "fingerprint": "f",
        "schedule": "varuna",
        "micro_batch_size": 1,
        "num_micro_batches": 7,
        "num_replicas": 3,
        "stages": tuple(
            StagePlan(first_section=first, end_section=end, window=2, recompute=False) for first, end in cuts
        ),
        "kinds": (
            PipelineKind(num_stages=2, micro_batches=(2, 2)),
            PipelineKind(num_stages=3, micro_batches=(3,)),
        ),
        "orders": {2: ("FBFB", "FBFB", "", "", ""), 3: ("", "", *["FBFBFB"] * 3)},
        "expected": Expectation(
            mini_batch_s=1.0, examples_per_s=7.0, lower_bound_s=1.0, peak_memory_bytes=0, parts_s={}
        ),
    }
    return Plan.model_validate(given | changes)


def test_pipelines_of_a_plan_may_be_unequal() -> None:
    """Stages and replicas are numbered over all kinds of pipelines, and each micro-batch is assigned once."""
    planned = uneven()
    assert (planned.shape, planned.num_workers, planned.pipeline_depth) == ("2x2 + 3x1", 7, 3)
    assert [list(planned.stages_of(replica)) for replica in range(3)] == [[0, 1], [0, 1], [2, 3, 4]]
    assert [list(planned.replicas_of(stage)) for stage in range(5)] == [[0, 1], [0, 1], [2], [2], [2]]
    assert [stage for stage in range(5) if planned.is_last(stage)] == [1, 4]
    assert [list(planned.share_of(replica, range(7))) for replica in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [planned.position(stage) for stage in range(5)] == [0, 1, 0, 1, 2]
    assert planned.places == ((0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (3, 2), (4, 2))
    assert kinds_in(planned.shape) == ((2, 2), (3, 1))
    placed = uneven(placement=((0, 1), (2, 3), (4, 5, 6)), node_sizes=(1,) * 7)
    assert [placed.node_at(stage, replica) for stage, replica in placed.places] == [0, 2, 1, 3, 4, 5, 6]
    assert planned.node_at(0, 0) is None
    left = [3, 5, 6, 9]
    assert [one for replica in range(3) for one in planned.share_of(replica, left)] == left
    assert [planned.order_of(stage, 1) for stage in (0, 4)] == ["FB", "FB"]
    assert Plan.model_validate_json(planned.model_dump_json()) == planned


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_replicas": 4}, "kinds have 3 replicas in all, the plan has 4"),
        ({"num_micro_batches": 8}, "kinds have 7 micro-batches in all, the plan has 8"),
        ({"orders": {2: ("FBFB", "FBFB", "", "", "")}}, "orders lack 3 micro-batches"),
        ({"orders": {2: ("", "FBFB", "", "", ""), 3: ("", "", *["FBFBFB"] * 3)}}, "orders[2][0] does not hold"),
        ({"placement": ((0, 0), (0, 0), (0, 0)), "node_sizes": (9,)}, "2 replicas of 2 and 1 replicas of 3 stages"),
    ],
)
def test_unequal_pipelines_that_do_not_fit_together_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        uneven(**changes)


def test_a_pool_is_its_text_whatever_the_order_of_its_types() -> None:
    pool = Pool.parse("v100=12, t4=4")
    assert (str(pool), pool.num_gpus, pool.types, pool["t4"], pool["k80"]) == ("t4=4,v100=12", 16, ("t4", "v100"), 4, 0)
    assert Pool.counting(["v100"] * 12 + ["t4"] * 4) == pool == Pool.of({"t4": 4, "v100": 12, "k80": 0})
    assert str(Pool.parse("8,t4=4")) == "8,t4=4"
    assert Pool.parse("8") == Pool.of(8) == Pool.of({"": 8})
    assert hash(Pool.parse("t4=4,v100=12")) == hash(pool)
    assert not Pool()
    assert str(Pool()) == "0"


def test_pools_are_added_and_fit_in_one_another_type_by_type() -> None:
    small, large = Pool.parse("t4=2,v100=8"), Pool.parse("t4=4,v100=12")
    assert small.fits_in(large)
    assert not large.fits_in(small)
    assert Pool().fits_in(small)
    assert not Pool.parse("t4=5").fits_in(large)
    assert Pool.of(16).fits_in(large)
    assert not Pool.of(17).fits_in(large)
    assert Pool.parse("4,v100=12").fits_in(large)
    assert not Pool.parse("t4=1").fits_in(Pool.of(3))
    assert small + large == Pool.parse("t4=6,v100=20")
    assert large - small == Pool.parse("t4=2,v100=4")
    assert small - large == Pool()
    assert small + Pool.of(3) == Pool.parse("3,t4=2,v100=8")


def test_a_pool_is_a_json_key_and_may_be_a_number() -> None:
    table = TypeAdapter(dict[Pool, int])
    pools = {Pool.of(8): 1, Pool.parse("t4=4,v100=12"): 2}
    assert table.dump_json(pools) == b'{"8":1,"t4=4,v100=12":2}'
    assert table.validate_json(table.dump_json(pools)) == pools
    assert table.validate_python({8: 1, "t4=4,v100=12": 2}) == pools


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not a pool"),
        ("eight", "is not a pool"),
        ("t4=", "is not a pool"),
        ("=4", "is not a pool"),
        ("t4=-1", "is not a pool"),
        ("t4=1.5", "is not a pool"),
        ("t4=4,", "is not a pool"),
        ("t4=4,t4=2", "names t4 twice"),
        ("8,8", "names GPUs without a type twice"),
        ("0", "is out of range"),
        ("t4=60000,v100=60000", "is out of range"),
    ],
)
def test_text_that_is_no_pool_is_refused_in_one_sentence(text: str, problem: str) -> None:
    with pytest.raises(PlanError) as raised:
        Pool.parse(text, "--pool")
    assert str(raised.value).startswith(f"--pool: {problem} (got {text!r}); allowed: ")
    with pytest.raises(ValidationError, match=problem):
        TypeAdapter(Pool).validate_python(text)


def test_rings_of_unequal_pipelines_wait_for_few_others() -> None:
    assert set(reduction_rounds([[0, 2, 4]], 6)) == {0}
    assert reduction_rounds([[0, 3], [0]], 6) == (1, 1, 1, 0, 0, 0)
    assert reduction_rounds([[0, 2, 4], [0, 3]], 6) == (1, 1, 0, 1, 0, 0)
    eights, sevens = [[k * 56 // parts for k in range(parts)] for parts in (8, 7)]
    assert max(reduction_rounds([eights, sevens], 56)) <= 2, "not one after the other"

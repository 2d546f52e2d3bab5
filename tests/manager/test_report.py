"""A report contains what the journal of its run holds."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from simulated_cluster import TIMES, Faults, JournalledCluster
from simulated_job import MIXED, SIZES, TYPES, facts_of, scale_of
from typer.testing import CliRunner

from manager.controller.state.actions import SendReshape
from manager.controller.state.evaluations import mean_loss
from manager.controller.state.state import Phase
from manager.journal.journal import Journal
from manager.journal.records import PREEMPTION_INJECTED, Fact
from manager.report.journal_reader import read_report
from manager.report.morph_trace import MANAGER, chrome_trace, morph_trace
from manager.report.page import report_page
from manager.report.steps import Cost, Step, StepRecord, Steps
from manager.report.summary import summarise
from manager.report.values import RunReport
from manager.run_dir import JOURNAL, RunFacts
from morph.cli.main import app
from morph.contract.errors import RunDirError
from morph.contract.messages import MicroBatchLoss


def report_on(run_dir: Path, faults: Faults, num_nodes: int, seed: int = 0) -> tuple[JournalledCluster, RunReport]:
    cluster = JournalledCluster(seed, run_dir, faults, expected_nodes=num_nodes)
    assert cluster.run(num_nodes).outcome == "finished"
    cluster.journal.close()
    return cluster, read_report(run_dir)


def test_an_undisturbed_run_has_one_shape_and_no_morph(tmp_path: Path) -> None:
    cluster, report = report_on(tmp_path, Faults(), 4)
    assert report.morphs == ()
    (shape,) = report.shapes
    assert (shape.shape, shape.num_steps, shape.first_version, shape.batch_size) == ("2x2", 12, 0, 8)
    assert shape.end_s == report.end_s == cluster.now_s
    assert 0.2 <= (shape.measured_mini_batch_s or 0) <= 1.1
    assert shape.examples_per_s == pytest.approx(8 / (shape.measured_mini_batch_s or 1))
    assert shape.expected_mini_batch_s == pytest.approx(8 / (4 * 0.98))
    assert [record.step for record in report.steps] == list(range(12))
    assert {record.compute_s for record in report.steps} == {TIMES.step_s}
    assert report.losses == {step: 1 / (1 + step) for step in range(12)}
    assert (report.version, report.checkpoint_version, report.steps_redone) == (12, 12, 0)
    assert [count.num_vms for count in report.vms] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_no_time_is_forecast_where_workers_share_cores(tmp_path: Path) -> None:
    cluster = JournalledCluster(0, tmp_path, Faults(), expected_nodes=4, num_cores=3)
    assert cluster.run(4).outcome == "finished"
    cluster.journal.close()
    report = read_report(tmp_path)
    (shape,) = report.shapes
    assert (shape.shape, shape.num_shared_cores, shape.expected_here_s) == ("2x2", 3, None)
    measured = f"{(shape.measured_mini_batch_s or 0) * 1e3:.0f} ms a step"
    sentence = "no forecast of steps: the workers and the manager share 3 cores"
    assert f"12 steps, {measured}\n{sentence}" in summarise(report)
    page = report_page(report)
    assert "".join(f'<td class="number">{text}</td>' for text in ("12", measured.split()[0])) in page
    assert sentence in page
    assert "expected" not in page.partition("<h2>Shapes</h2>")[2].partition("<h2>")[0]


def test_shapes_of_several_types_are_reported_with_their_pools(tmp_path: Path) -> None:
    cluster = JournalledCluster(0, tmp_path, Faults(node_types=TYPES), expected_nodes=4, plans=MIXED)
    assert cluster.run(4).outcome == "finished"
    cluster.journal.close()
    report = read_report(tmp_path)
    (shape,) = report.shapes
    assert (shape.shape, str(shape.pool)) == ("2x1 + 2x1", "fast=2,slow=2")
    told = summarise(report)
    assert "shape 2x1 + 2x1 on fast=2,slow=2 from " in told
    assert "GPUs of 2 types (fast, slow) round differently: weights are equal to the bit only where one type" in told


def test_a_forced_morph_is_timed_from_kill_to_next_step(tmp_path: Path) -> None:
    cluster, report = report_on(tmp_path, Faults(deaths_after_s=((6.0, 1),)), 6)
    (victim, killed_s), *_ = cluster.killed_s.items()
    morph = report.morphs[0]
    assert not morph.planned
    assert (morph.lost_workers, morph.killed_at_s) == ((victim,), killed_s)
    assert killed_s <= morph.detected_at_s < (morph.reformed_at_s or 0) < (morph.resumed_at_s or 0)
    after = [record.decided_at_s for record in report.steps if record.decided_at_s > morph.detected_at_s]
    assert morph.pause_ms == pytest.approx((after[0] - killed_s) * 1e3)
    assert (morph.from_shape, morph.to_shape, morph.steps_redone) == ("3x2", "2x2", 0)
    assert (morph.groups_s, morph.state_s, morph.num_generations) == (0.1, 0.2, 1)
    order = next(
        action.order
        for _, _, decision in cluster.history
        for action in decision.actions
        if isinstance(action, SendReshape) and action.order.generation == 2
    )
    for kind, total in morph.sources.items():
        units = [source.unit for source in order.sources if source.kind == kind]
        assert (total.count, total.size_bytes) == (len(units), sum(SIZES[unit] for unit in units))
    assert sum(total.count for total in morph.sources.values()) == len(order.sources)


class InjectedCluster(JournalledCluster):
    """A cluster in which every VM that dies was taken on purpose."""

    def kill(self, name: str) -> None:
        if self.workers[name].alive:
            self.journal.append_fact(self.now_s, Fact(name=PREEMPTION_INJECTED, worker=name, detail="a test"))
        super().kill(name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [JournalledCluster, InjectedCluster])
def test_injected_and_real_losses_are_distinguished(kind: type[JournalledCluster], tmp_path: Path) -> None:
    cluster = kind(0, tmp_path, Faults(deaths_after_s=((6.0, 1),)), expected_nodes=6)
    assert cluster.run(6).outcome == "finished"
    cluster.journal.close()
    report, is_injected = read_report(tmp_path), kind is InjectedCluster
    (victim,) = cluster.killed_s
    assert report.morphs[0].injected == ((victim,) if is_injected else ())
    for told in (summarise(report), report_page(report, None)):
        assert ("(1 by morph inject)" in told) == is_injected
    assert (f"{victim} lost (injected); 3x2 -> 2x2" in summarise(report)) == is_injected
    assert (f"(injected: {victim})" in report_page(report, None)) == is_injected


def test_newcomers_are_a_planned_morph(tmp_path: Path) -> None:
    _, report = report_on(tmp_path, Faults(joins_after_s=(5.0, 5.0)), 4)
    planned = report.morphs[-1]
    assert planned.planned
    assert planned.lost_workers == ()
    assert planned.to_shape == "3x2"
    assert set(planned.sources) <= {"keep", "peer"}
    assert report.steps_redone == 0


def test_steps_are_counted_as_redone_when_their_state_is_lost(tmp_path: Path) -> None:
    cluster, report = report_on(tmp_path, Faults(deaths_after_s=((7.0, 5),), quiet_after_s=9.0), 5)
    morph = report.morphs[0]
    assert morph.steps_redone > 0
    assert report.steps_redone == morph.steps_redone
    assert [record.step for record in report.steps if not record.redone_later] == list(range(12))
    assert set(morph.sources) <= {"checkpoint", "initial"}
    assert len(morph.lost_workers) == 5
    assert morph.killed_at_s == min(cluster.killed_s.values())
    read = RunReport.model_validate_json(report.model_dump_json())
    assert (read, read.losses, read.steps_redone) == (report, report.losses, report.steps_redone)
    for num in range(len(report.steps)):  # also before the lost steps are run again
        assert list(Steps.of_records(report.steps[:num])) == report.steps[:num]


def test_a_morph_that_is_hit_again_is_one_morph(tmp_path: Path) -> None:
    faults = Faults(deaths_in=((Phase.TRAINING, 0, 1), (Phase.RESHAPING, 1, 1)))
    cluster, report = report_on(tmp_path, faults, 6)
    morph = report.morphs[0]
    assert len(morph.lost_workers) == 2
    assert set(morph.lost_workers) <= set(cluster.killed_s)
    assert morph.num_generations == 2
    assert [count.num_vms for count in report.vms][:9] == [0, 1, 2, 3, 4, 5, 6, 5, 4]


@pytest.mark.slow
def test_every_disturbed_history_adds_up(tmp_path: Path) -> None:
    for seed in range(20):
        run_dir = tmp_path / str(seed)
        run_dir.mkdir()
        faults = Faults(
            death_per_order=0.03,
            joins_after_s=(5.0, 9.0),
            doubled=0.2,
            overflow=0.05,
            silent_death=0.2,
            quiet_after_s=16.0,
        )
        cluster, report = report_on(run_dir, faults, 5, seed)
        assert sum(shape.num_steps for shape in report.shapes) == len(report.steps) == 12 + report.steps_redone
        assert sum(morph.steps_redone for morph in report.morphs) == report.steps_redone
        assert set(report.losses) == set(range(12))
        assert report.shapes[-1].generation == cluster.state.generation
        assert all(first.end_s == second.start_s for first, second in itertools.pairwise(report.shapes))
        assert all(morph.pause_ms is None or morph.pause_ms > 0 for morph in report.morphs)
        assert report.vms[-1].num_vms == len(cluster.state.workers)


def test_a_run_under_way_can_be_read(tmp_path: Path) -> None:
    cluster = JournalledCluster(0, tmp_path, Faults())
    cluster.run(4)
    lines = cluster.journal.read()
    cluster.journal.close()
    (tmp_path / "half").mkdir()
    with Journal.open(tmp_path / "half" / JOURNAL) as half:
        for line in lines[: len(lines) // 2]:
            half.append(line.time_s, line.kind, line.payload_json)
    report = read_report(tmp_path / "half")
    assert report.outcome == "running"
    assert report.shapes[-1].end_s is None
    assert 0 < report.version < 12


def test_the_summary_names_shapes_morphs_and_the_loss(tmp_path: Path) -> None:
    _, report = report_on(tmp_path, Faults(deaths_after_s=((6.0, 1),)), 6)
    text = summarise(report.model_copy(update={"best_version": 8}))
    assert "job: finished" in text
    assert "12 of 12 done, 0 run again; checkpoint: after 12 steps, the best after 8 steps\n" in text
    assert "loss: 1.0000 at step 0, 0.0833 at step 11" in text
    assert "shape 2x2" in text
    assert f"pause median {report.morphs[0].pause_ms:.0f} ms" in text
    assert re.search(r"n\d lost; 3x2 -> 2x2 in [\d.]+ s, no step lost", text)
    verbose = summarise(report, verbose=True)
    assert re.search(r"sections and tied weights: .*\d+ kept.*; cause: ", verbose)
    assert "was lost: killed" in verbose or "gave up its order" in verbose


def test_a_report_has_metrics_norms_skipped_steps_and_the_loss_scale(tmp_path: Path) -> None:
    faults = Faults(non_finite=0.4, deaths_after_s=((6.0, 1),), joins_after_s=(5.0,))
    _, report = report_on(tmp_path, faults, 4)
    steps = [record for record in report.steps if not record.redone_later]
    for record in steps:
        facts = facts_of(record.step + 1, faults.non_finite)
        assert (record.gradient_norm, record.skipped) == (facts.gradient_norm, facts.skipped)
        assert record.loss_scale == scale_of(record.step, faults.non_finite).factor
        assert record.metrics == {"right": 0.25}
        assert record.learning_rates == (0.001 / (1 + record.step), 0.001)
    num_skipped = sum(record.skipped for record in steps)
    assert 0 < num_skipped < len(steps)
    assert f"loss scale: 2**{scale_of(11, faults.non_finite).exponent}; steps skipped: {num_skipped}" in summarise(
        report
    )
    told = summarise(report)
    assert "at step 11: right 0.25, learning rate 8.333e-05 to 0.001" in told  # this step was skipped and has no norm
    assert "evaluation at version 8: loss 0.2500, right 0.5" in told
    assert [(one.version, one.loss) for one in report.evaluations] == [(4, 0.5), (8, 0.25)]


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="holds no journal"):
        read_report(tmp_path)
    Journal.open(tmp_path / JOURNAL).close()
    with pytest.raises(RunDirError, match="holds no run"):
        read_report(tmp_path)


def test_the_report_of_a_resumed_run_is_complete(tmp_path: Path) -> None:
    first = JournalledCluster(0, tmp_path, Faults(stop_after_s=6.0))
    assert first.run(4).outcome == "stopped"
    first.journal.close()
    assert read_report(tmp_path).outcome == "stopped"
    checkpoint = first.state.saving.checkpoint
    again = JournalledCluster(
        1, tmp_path, Faults(), first.now_s + 100, initial_checkpoint=checkpoint, initial_version=checkpoint.version
    )
    assert again.run(6).outcome == "finished"
    again.journal.close()
    report = read_report(tmp_path)
    assert (report.num_sessions, report.start_s, report.end_s, report.outcome) == (2, 0.0, again.now_s, "finished")
    assert [shape.shape for shape in report.shapes] == ["2x2", "3x2"]
    assert report.shapes[0].end_s == first.now_s
    assert [record.step for record in report.steps] == list(range(12))
    assert report.morphs == ()


def test_the_loss_is_the_exact_mean_whatever_the_order() -> None:
    losses = [MicroBatchLoss(micro_batch=number, loss=loss) for number, loss in enumerate([1e16, 1.0, -1e16, 1.0])]
    assert mean_loss(losses) == mean_loss(losses[::-1]) == 0.5
    assert mean_loss([*losses, losses[0]]) == 0.5
    assert mean_loss([]) is None


FACTS = RunFacts(job="job.py:job", fingerprint="f", micro_batch_size=2, batch_size=8, num_sections=6)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run in which a VM was killed and another came."""
    directory = tmp_path_factory.mktemp("run")
    faults = Faults(deaths_after_s=((6.0, 1),), joins_after_s=(8.0,))
    cluster = JournalledCluster(0, directory, faults, expected_nodes=6)
    assert cluster.run(6).outcome == "finished"
    cluster.journal.close()
    (directory / "run.json").write_text(FACTS.model_dump_json())
    return directory


def test_a_forced_change_spans_kill_groups_state_and_next_step(run_dir: Path) -> None:
    with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
        entries = journal.read()
    morph = read_report(run_dir).morphs[0]
    trace = morph_trace(entries, morph)
    assert trace.spans[0].what == f"{morph.lost_workers[0]} killed"
    workers = {span.who for span in trace.spans} - {MANAGER}
    assert len(workers) == 5
    by_kind = {
        what: [span for span in trace.spans if span.what == what] for what in ("form groups", "take state", "step")
    }
    members = {span.who for span in by_kind["step"]}
    assert len(by_kind["step"]) == len(members) == 4, "one for each member of 2x2"
    assert members <= {span.who for span in by_kind["take state"]}, "the fifth serves what it holds, or nothing"
    assert max(span.duration_s for span in by_kind["form groups"]) == pytest.approx(morph.groups_s)
    assert max(span.duration_s for span in by_kind["take state"]) == pytest.approx(morph.state_s)
    assert max(span.end_s for span in trace.spans) == pytest.approx((morph.pause_ms or 0) / 1e3)
    for worker in workers:
        own = [span for span in trace.spans if span.who == worker]
        assert all(before.end_s <= after.start_s + 1e-9 for before, after in itertools.pairwise(own))


def test_the_trace_is_what_perfetto_reads(run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "morph.json"
    told = CliRunner().invoke(app, ["timeline", str(run_dir), "--morph", "2", "--perfetto", str(path)])
    assert told.exit_code == 0, told.output
    assert "Change 2" in told.stdout
    written = json.loads(path.read_text())
    names = {event["args"]["name"] for event in written["traceEvents"] if event["name"] == "process_name"}
    assert MANAGER in names
    assert all(event["dur"] > 0 for event in written["traceEvents"] if event["ph"] == "X")
    with Journal.open(run_dir / JOURNAL, read_only=True) as journal:
        entries = journal.read()
    assert written == json.loads(json.dumps(chrome_trace(morph_trace(entries, read_report(run_dir).morphs[1]))))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--morph", "9"), "--morph: has no such change (got 9); allowed: 1 to"),
        (("--morph", "1", "--step", "3"), "--step"),
    ],
)
def test_a_change_that_there_is_not_is_refused(run_dir: Path, options: tuple[str, ...], told: str) -> None:
    done = CliRunner().invoke(app, ["timeline", str(run_dir), *options])
    assert done.exit_code == 2
    assert told in done.output


def test_a_metric_by_the_name_of_a_column_takes_no_columns_place() -> None:
    metrics = {"loss": 9.0, "top": 5.0}
    record = StepRecord(
        step=0, generation=1, decided_at_s=1.0, duration_s=1.0, compute_s=1.0, loss=2.0, metrics=metrics, num_attempts=1
    )
    frame = Steps(newer=[Step(3, record, Cost(0.0, 0.0, 0.0, 0.0))]).frame()
    assert frame[["loss", "metric:loss", "top", "redone"]].to_numpy().tolist() == [[2.0, 9.0, 5.0, False]]

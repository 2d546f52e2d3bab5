"""Slurm: answers of its programs, decisions based on them, and the shell of a job's step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from manager.notices.slurm import SIGNALLED, TIME_LIMIT, SlurmNotices
from manager.notices.source import NoticeUnavailable
from manager.providers.boot.cloud_init import NodeStart
from manager.providers.interface.provider import (
    CapacityShort,
    Granted,
    Misconfigured,
    ProviderError,
    QuotaExceeded,
    Transient,
)
from manager.providers.slurm.answers import (
    QUEUE_HEADER,
    Mark,
    error_of,
    job_number_in,
    jobs_in_json,
    jobs_in_text,
    setting_in,
    version_in,
    why_over,
)
from manager.providers.slurm.provider import run_program
from manager.providers.slurm.spec import LOGIN_S, SlurmSpec, job_script
from tests.providers.fake_slurm import NOW_S, SPEC, FakeSlurm, provider
from tests.waiting import BOUND_S, poll_until

MARK = Mark(run="r", job="tiny | 'one\"", request="r-1", devices=4)
# What 22.05.8 wrote (SLURM_TIME_FORMAT=%s): a running job, a waiting one, and a cancelled one.
TEXT = f"""{QUEUE_HEADER}
3|PENDING|spot|1795762571|1795763171||Resources|r-1-2|x
1|RUNNING|spot|1795761970|1795762570|vm|None|r-1-1|{MARK.text}
2|CANCELLED|spot|1795761971|1795761972|vm|None|r-1-2|{MARK.text}
9|PENDING|spot|N/A|N/A||Priority|other|(null)
"""
COMMON = {"partition": "spot", "nodes": "vm", "state_reason": "None", "name": "r-1-1", "comment": MARK.text}
# The fields that Morph reads, from an answer of 22.05.8.
OLD_JSON = {
    "meta": {"Slurm": {"version": {"major": 22, "micro": 8, "minor": 5}, "release": "22.05.8"}},
    "errors": [],
    "jobs": [
        {**COMMON, "job_id": 1, "job_state": "RUNNING", "user_id": 0, "start_time": 1795761970, "end_time": 1795762570},
        {**COMMON, "job_id": 2, "job_state": "COMPLETED", "user_id": 7, "start_time": 1, "end_time": 2},
    ],
}


def number(value: int, *, is_set: bool = True, infinite: bool = False) -> dict[str, object]:
    return {"set": is_set, "infinite": infinite, "number": value}


# The shape of data_parser v0.0.40 and later (from 23.11 on): numbers that say whether they are set, and several states.
NEW_JSON = {
    "meta": {"plugin": {"data_parser": "data_parser/v0.0.40"}},
    "errors": [],
    "warnings": [],
    "last_update": number(1795761980),
    "jobs": [
        {
            **COMMON,
            "job_id": 1,
            "job_state": ["RUNNING"],
            "user_id": 0,
            "start_time": number(1795761970),
            "end_time": number(0, infinite=True),
        },
        {
            **COMMON,
            "job_id": 1234567,
            "job_state": ["CANCELLED", "COMPLETING"],
            "user_id": 0,
            "start_time": number(0, is_set=False),
            "end_time": number(2),
        },
    ],
}


def test_a_queue_is_read_as_text() -> None:
    waits, runs, over, other = jobs_in_text(TEXT)
    assert [job.phase for job in (waits, runs, over, other)] == ["waiting", "running", "over", "waiting"]
    assert (waits.mark, runs.mark, other.starts_s) == (None, MARK, None)
    assert (runs.number, runs.name, runs.starts_s, runs.ends_s, runs.nodes) == (
        "1",
        "r-1-1",
        1795761970,
        1795762570,
        "vm",
    )


def test_a_queue_is_read_as_json_of_old_and_new_versions() -> None:
    (old,) = jobs_in_json(json.dumps(OLD_JSON), 0)
    new, over = jobs_in_json(json.dumps(NEW_JSON), 0)
    assert old == new.model_copy(update={"ends_s": 1795762570.0})
    assert old.mark == MARK
    assert old.phase == "running"
    assert (over.number, over.phase, over.starts_s) == ("1234567", "over", None)


@pytest.mark.parametrize(
    "answer", ["", "Cluster maintenance today\n", TEXT.partition("\n")[2], TEXT + "17|RUNNING|spot\n", '{"jobs": []}']
)
def test_invalid_text_of_a_queue_is_not_an_empty_queue(answer: str) -> None:
    with pytest.raises(Transient, match="squeue: "):
        jobs_in_text(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[]",
        "{}",
        '{"jobs": null}',
        '{"jobs": [{}]}',
        '{"errors": [{"error": "down"}], "jobs": []}',
        '{"errors": [], "jobs": [{"job_id": {"set": false}, "job_state": "RUNNING", "user_id": 0, "name": "x"}]}',
        '{"errors": [], "jobs": [{"job_id": 1, "job_state": [], "user_id": 0, "name": "x"}]}',
        '{"errors": [], "jobs": [{"job_id": 1, "job_state": "RUNNING", "user_id": {"set": false}, "name": "x"}]}',
        '{"errors": [], "jobs": [{"job_id": 1, "job_state": "RUNNING", "user_id": 0, "name": "x", "comment": {}}]}',
    ],
)
def test_invalid_json_of_a_queue_is_not_an_empty_queue(answer: str) -> None:
    with pytest.raises(Transient, match="squeue: "):
        jobs_in_json(answer, 0)


@pytest.mark.parametrize("state", ["SIGNALING", "SUSPENDED", "CONFIGURING", "A_STATE_OF_NEXT_YEAR"])
def test_a_job_in_a_state_that_is_not_its_end_is_there(state: str) -> None:
    (job,) = jobs_in_text(f"{QUEUE_HEADER}\n1|{state}|spot|1|2|n|None|a|{MARK.text}\n")
    assert job.phase == "running"


@pytest.mark.parametrize(
    ("said", "kind"),
    [  # each is from 22.05.8, except the two about accounts, which need a database
        ("sbatch: error: Batch job submission failed: Invalid partition name specified", Misconfigured),
        ("sbatch: error: Invalid generic resource (gres) specification", Misconfigured),
        ("sbatch: error: Invalid --time specification", Misconfigured),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", Misconfigured),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination", Misconfigured),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit", QuotaExceeded),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", Transient),
        ("slurm_load_partitions: Socket timed out on send/recv operation", Transient),
        ("something that no version said yet", Transient),
        ("sbatch: error: Batch job submission failed: Required node not available (down, drained)", CapacityShort),
    ],
)
def test_refusals_mean_what_they_say(said: str, kind: type[ProviderError]) -> None:
    error = error_of("sbatch", said)
    assert type(error) is kind
    assert str(error).startswith("sbatch: ")


def test_a_machine_without_a_configuration_of_slurm_is_named_in_a_sentence() -> None:
    said = (
        "squeue: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\nsqueue: error: fetch_config: DNS "
        "SRV lookup failed\nsqueue: error: _establish_config_source: failed to fetch config\nsqueue: fatal: Could not "
        "establish a configuration source\n"
    )
    error = error_of("squeue", said)
    assert type(error) is Transient  # the controller that would send a configuration may only be down
    assert str(error).startswith("squeue finds no configuration of Slurm: this machine has no slurm.conf")
    assert "fetch_config" not in str(error)


def test_short_answers_are_read() -> None:
    assert job_number_in("12\n") == job_number_in("sbatch: verifying\n12;cluster\n") == "12"
    with pytest.raises(Transient):
        job_number_in("")
    partition = "   DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=8 Hidden=NO\n"
    assert setting_in(partition, "GraceTime") == 8
    assert setting_in("KillWait                = 30 sec\n", "KillWait") == 30
    assert setting_in("GraceTime=UNLIMITED", "GraceTime") is None
    assert [version_in(text) for text in ("slurm-wlm 22.05.8\n", "slurm 24.11.0-0rc1", "")] == [(22, 5), (24, 11), ()]
    assert why_over("PREEMPTED|0:0\n") == "PREEMPTED, exit code 0:0"
    assert why_over("CANCELLED by 1000|0:15\n") == "CANCELLED by 1000, exit code 0:15"
    assert why_over("Slurm accounting storage is disabled\n") == ""


def test_a_lost_answer_makes_no_second_job(tmp_path: Path) -> None:
    cluster = FakeSlurm()
    cluster.loses_answers = True
    with pytest.raises(Transient, match="did not end"):
        provider(cluster, tmp_path).request("a", 2)
    cluster.loses_answers = False
    assert [vm.name for vm in provider(cluster, tmp_path).request("a", 2)] == ["a-0", "a-1"]
    assert len(cluster.jobs) == 2


def test_jobs_that_wait_are_granted_and_begin_later(tmp_path: Path) -> None:
    cluster = FakeSlurm(room=1)
    first, second = provider(cluster, tmp_path).request("a", 2)
    assert (first.waits, first.zone, first.paid_since_s) == (False, "n0", NOW_S)
    assert (second.waits, second.zone, second.paid_since_s) == (True, "unknown", None)
    cluster.room = 2
    cluster.begin()
    assert [vm.waits for vm in provider(cluster, tmp_path).list()] == [False, False]


@pytest.mark.parametrize(
    ("reason", "told", "never"),
    [
        ("None", "", False),
        ("Resources", "", False),
        ("PartitionDown", "PartitionDown", False),
        ("AReasonOfNextYear", "AReasonOfNextYear", False),
        ("PartitionTimeLimit", "PartitionTimeLimit", True),
        ("BadConstraints", "BadConstraints", True),
    ],
)
def test_slurms_reason_for_a_job_that_waits_is_known(tmp_path: Path, reason: str, told: str, never: bool) -> None:
    cluster = FakeSlurm(room=0)
    slurm = provider(cluster, tmp_path, spec=SPEC.model_copy(update={"num_gpus": 0}))
    (vm,) = slurm.request("a", 1)
    cluster.jobs["1"].reason = reason
    assert [(vm.waits_for, vm.never_begins) for vm in slurm.list()] == [(told, never)]
    assert (vm.num_devices, vm.waits) == (1, True)


def test_jobs_that_were_submitted_are_granted_and_the_others_have_a_reason(tmp_path: Path) -> None:
    granted = provider(FakeSlurm(submits=2), tmp_path).request("a", 4)
    assert len(granted) == 2
    assert isinstance(granted, Granted)
    assert isinstance(granted.missing, QuotaExceeded)
    assert "QOSMaxSubmitJobPerUserLimit" in str(granted.missing)


def test_only_jobs_with_the_mark_of_the_run_are_ended(tmp_path: Path) -> None:
    cluster = FakeSlurm()
    ours, theirs = provider(cluster, tmp_path), provider(cluster, tmp_path, run="tiny-2")
    ours.request("a", 1)
    theirs.request("a", 1)
    plain = cluster.jobs["2"].__class__("77", "a-0", "not Morph's", "RUNNING")
    cluster.jobs["77"] = plain
    ours.delete(["a-0", "77"])
    ours.dismantle()
    assert {call[1:] for call in cluster.calls if call[0] == "scancel"} == {("--signal=USR1", "1"), ("1",)}
    assert {job.state for job in (plain, cluster.jobs["2"])} == {"RUNNING"}
    assert ours.runs() == {"tiny-2": "tiny"}


def test_a_cluster_that_takes_comments_away_gets_no_job(tmp_path: Path) -> None:
    cluster = FakeSlurm()
    submit = cluster._sbatch

    def without_comment(options: list[str], given: str):  # type: ignore[no-untyped-def]
        return submit([option for option in options if "--comment" not in option] + ["--comment=site"], given)

    cluster._sbatch = without_comment  # type: ignore[method-assign]
    with pytest.raises(Misconfigured, match="replaces the comments"):
        provider(cluster, tmp_path).request("a", 1)
    assert [job.state for job in cluster.jobs.values()] == ["CANCELLED"]


def test_jobs_that_squeue_does_not_list_are_ended_and_not_followed_by_more(tmp_path: Path) -> None:
    cluster = FakeSlurm()
    cluster.unlisted = {"1", "2"}
    with pytest.raises(Misconfigured, match=r"does not list jobs that were submitted \(1, 2\): they are ended"):
        provider(cluster, tmp_path).request("a", 2)
    assert [job.state for job in cluster.jobs.values()] == ["CANCELLED", "CANCELLED"]


def test_of_two_jobs_with_one_name_the_later_is_cancelled(tmp_path: Path) -> None:
    """sbatch accepted the first job after Morph had given it up and repeated the request."""
    cluster = FakeSlurm()
    slurm = provider(cluster, tmp_path)
    cluster.loses_answers, cluster.unlisted = True, {"1"}
    with pytest.raises(Transient, match="did not end"):
        slurm.request("a", 1)
    cluster.loses_answers = False
    slurm.request("a", 1)
    cluster.unlisted = set()
    assert [vm.name for vm in slurm.list()] == ["a-0"]
    assert [job.state for job in cluster.jobs.values()] == ["RUNNING", "CANCELLED"]
    assert [vm.name for vm in slurm.list()] == ["a-0"]


def test_a_folder_for_logs_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(Misconfigured, match="logs: the folder for logs cannot be made: File exists"):
        provider(FakeSlurm(), tmp_path / "logs").request("a", 1)


def test_jobs_that_cannot_be_ended_are_named(tmp_path: Path) -> None:
    cluster = FakeSlurm()
    slurm = provider(cluster, tmp_path)
    slurm._delete_s = 0.0
    slurm.request("a", 1)
    cluster._scancel = lambda _options, _given: run_program(["sh", "-c", "echo 'Access denied' >&2; exit 1"])  # type: ignore[method-assign]
    with pytest.raises(ProviderError, match="a-0 is left: scancel: Access denied"):
        slurm.delete(["a-0"])


def test_a_job_is_asked_for_as_the_user_says(tmp_path: Path) -> None:
    spec = SlurmSpec(
        partition="spot", account="phys", qos="low", gres="gpu:a100:4", num_gpus=4, cpus=8, memory="64G",
        time_limit="1-02:00:00", signal_s=90, sbatch_options=("--constraint=a|b",),
    )  # fmt: skip
    cluster = FakeSlurm()
    provider(cluster, tmp_path / "50%", spec=spec).request("a", 4)
    (job,) = cluster.jobs.values()
    assert {
        "--no-requeue", "--nodes=1", "--partition=spot", "--account=phys", "--qos=low", "--gres=gpu:a100:4",
        "--cpus-per-task=8", "--mem=64G", "--time=1-02:00:00", "--signal=USR2@90", "--constraint=a|b",
        f"--output={tmp_path}/50%%/a-0-%j.log",
    } <= set(job.command)  # fmt: skip
    assert "sleep 8 " in job.script, "the partition's GraceTime"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("partition", "a b"),
        ("time_limit", "soon"),
        ("sbatch_options", ("-x",)),
        ("sbatch_options", ("--requeue",)),
        ("sbatch_options", ("--comment=mine",)),
        ("sbatch_options", ("--comm=mine",)),
        ("sbatch_options", ("--clusters=other",)),
        ("srun_options", ("--a=b\nc",)),
        ("gpus", 1),
    ],
)
def test_invalid_options_of_slurm_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        SlurmSpec.model_validate({"partition": "spot", field: value})


def test_programs_get_little_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cr3t")
    said = run_program(["env"])
    assert "SECRET_TOKEN" not in said.out
    assert "PATH=" in said.out
    with pytest.raises(Transient, match="did not end within"):
        run_program(["sleep", "60"], timeout_s=0.05)
    with pytest.raises(Misconfigured, match="cannot be run"):
        run_program(["no-such-program-of-slurm"])


# ---- notices ----


def test_a_signal_and_a_time_limit_are_notices(tmp_path: Path) -> None:
    source = SlurmNotices(tmp_path, clock=lambda: 1000.0)
    with pytest.raises(NoticeUnavailable):
        source.standing()
    (tmp_path / "limits").write_text('{"grace_s": 30, "ahead_s": 900, "ends_s": 2000}')
    assert source.standing() == ()
    (tmp_path / "limits").write_text('{"grace_s": 30, "ahead_s": 900, "ends_s": 1600}')
    (limit,) = source.standing()
    assert (limit.notice, limit.lead_s) == (TIME_LIMIT, 600)
    (tmp_path / "notice").touch()
    os.utime(tmp_path / "notice", (995, 995))
    signalled, _ = source.standing()
    assert (signalled.notice, signalled.lead_s) == (SIGNALLED, 25)
    (tmp_path / "limits").write_text('{"grace_s": 30, "ahead_s": 900, "ends_s": null}')
    assert [standing.notice for standing in source.standing()] == [SIGNALLED]
    source.acknowledge(SIGNALLED)
    assert (tmp_path / "left").exists()


# ---- the shell of a step, run by a program that stands for srun ----

SRUN = '#!/bin/sh\nwhile [ "$1" != sh ]; do shift; done\nexec "$@"\n'
PYTHON = """#!/bin/sh
case "$*" in
  *boot.pyz*) exit 0 ;;
  *manager.notices.agent*) echo "agent $*" >>"$CALLS"; exec sleep 600 ;;
  *) echo "node $$ $*" >>"$CALLS"; trap 'echo signalled >>"$CALLS"; exit 0' TERM; while :; do sleep 0.05; done ;;
esac
"""


GIVEN_UP = f"[ $i -ge {LOGIN_S * 10} ]"
"""The script's condition to wait no longer for a login shell."""


class Step:
    """The script of a job that runs here, with the processes of its node."""

    def __init__(self, folder: Path, login: str = "", given_up: str = GIVEN_UP) -> None:
        self.folder, self.calls = folder, folder / "calls"
        for name, text in (("srun", SRUN), ("python", PYTHON), *([("bash", login)] if login else [])):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        start = NodeStart(
            manager_address="127.0.0.1:1",
            node_secret=SecretStr("s3cr3t-8811"),
            python=str(folder / "python"),
            python_version="3.11.7",
            wheel_sha256="0" * 64,
        )
        self.script = job_script(start, SPEC, "a-0", 8.0).replace(GIVEN_UP, given_up)
        known = {"PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": str(folder), "CALLS": str(self.calls)}
        self.process = subprocess.Popen(
            ["sh", "-s"],
            stdin=subprocess.PIPE,
            env={**known, "HOME": str(folder), "SLURM_JOB_END_TIME": str(NOW_S)},
            start_new_session=True,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(self.script.encode())
        self.process.stdin.close()
        poll_until(lambda: self.calls.exists() and "node " in self.calls.read_text(), "a node")
        if login:
            return
        self.node_pid = int(self.calls.read_text().partition("node ")[2].split()[0])
        (self.place,) = folder.glob("morph-a-0-*")

    def node_lives(self) -> bool:
        return Path(f"/proc/{self.node_pid}/exe").exists()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(BOUND_S)
        poll_until(lambda: not self.place.exists(), "the guard")


@pytest.fixture
def step(tmp_path: Path) -> Iterator[Step]:
    (folder := tmp_path / "a folder").mkdir()
    step = Step(folder)
    yield step
    step.close()


def test_a_step_notes_the_signal_and_its_node_lives_on(step: Step) -> None:
    assert json.loads((step.place / "limits").read_text()) == {"grace_s": 8.0, "ahead_s": 900.0, "ends_s": NOW_S}
    assert "--source=slurm" in step.calls.read_text()
    assert "s3cr3t" not in step.script.partition("<<'END-OF-SECRET'")[0], "no command line has it"
    os.killpg(step.process.pid, signal.SIGTERM)  # as Slurm does when it signals all descendants of a step
    poll_until(lambda: (step.place / "notice").exists(), "the note")
    assert step.node_lives()
    assert step.process.poll() is None
    os.utime(step.place / "notice", (995, 995))
    os.killpg(step.process.pid, signal.SIGTERM)  # again at the end of the grace time, when none is left
    (step.place / "left").touch()
    assert step.process.wait(BOUND_S) == 0
    assert not step.node_lives()


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGKILL"])
def test_a_step_that_is_ended_leaves_nothing(step: Step, name: str) -> None:
    step.process.send_signal(getattr(signal, name))
    step.process.wait(BOUND_S)
    poll_until(lambda: not step.node_lives(), "the end of the node")
    poll_until(lambda: not step.place.exists(), "the end of its folder")
    assert "signalled" in step.calls.read_text(), "it was asked to end, not killed"


@pytest.mark.parametrize("is_told", [True, False])
def test_a_login_shell_that_hangs_ends_with_its_step(tmp_path: Path, is_told: bool) -> None:
    hangs = '#!/bin/sh\necho "node $$ hangs" >>"$CALLS"; exec sleep 600\n'
    step = Step(tmp_path, hangs, GIVEN_UP if is_told else 'grep -qs hangs "$CALLS"')
    if is_told:
        step.process.send_signal(signal.SIGUSR1)
    assert step.process.wait(BOUND_S) == 1
    shell = int(step.calls.read_text().split()[1])
    poll_until(lambda: not Path(f"/proc/{shell}/exe").exists(), "the end of the login shell")
    assert not list(tmp_path.glob("morph-a-0-*"))


def test_a_node_that_ends_by_itself_ends_its_step(step: Step) -> None:
    os.kill(step.node_pid, signal.SIGKILL)
    step.process.wait(BOUND_S)
    assert not step.place.exists()

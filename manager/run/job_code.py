"""The code on which a run trains: the job's files as they are now, or those that the run began with and keeps."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from manager.journal.records import Fact
from manager.run.request import IfChanged
from manager.run_dir import CODE, RunDir, is_run, not_writable, read_facts, write_in_run_dir
from morph.contract.errors import JobError, RunDirError
from morph.contract.job_facts import Epochs
from morph.contract.messages import HandedCut, JobCode
from morph.contract.profile import Profile
from morph.jobs.changes import changes, told
from morph.jobs.files import JobFiles, split_job
from morph.jobs.snapshot import changed, digests, files_of, from_elsewhere, pack

if TYPE_CHECKING:
    from morph.preflight.job_check import CheckedJob

_CUT = ".cut"
SAME_JOB = "; for the same job under another name: --if-changed accept"


class TrainedCode:
    """The code of a run, from the files on disk now and the copy in the run directory.

    ``job_path``: path/to/file.py:name, a job that must fit ``profile``. ``if_changed``: what to do if its ``files``
    differ from those with which the run began. ``doing``: tells the user the next phase. ``unpack``: whether the run's
    workers do not see this machine's folders.
    """

    def __init__(
        self,
        job_path: str,
        profile: Profile,
        files: JobFiles,
        if_changed: IfChanged,
        doing: Callable[[str], None],
        *,
        unpack: bool,
    ) -> None:
        self._job_path = job_path
        self._profile = profile
        self.files = files
        """The job's files as they are now; those on which the run trains, once its code is known."""
        self._if_changed = if_changed
        self._doing = doing
        self._unpack = unpack
        self._changed: list[str] = []
        self._checked: CheckedJob | None = None
        self._kept: JobCode | None = None
        self._accepted = ""
        self.cut: HandedCut | None = None
        """The cut that workers get; known once the run's code is settled."""

    def check(self) -> None:
        """Check the job, which loads torch, and name code that the snapshot lacks; InputError if it does not fit."""
        before = set(sys.modules)
        self._doing("checking the job: loading PyTorch, cutting the model, comparing it with the plain one")
        from morph.preflight.job_check import check_job

        with self.files.in_use():
            self._checked = check_job(self._job_path, self._profile)
            elsewhere = from_elsewhere(self.files, before)
        self._doing("planning shapes")
        if elsewhere:
            print(
                f"note: the run keeps a copy of the code in {self.files.folder}, but the job also imports "
                f"{', '.join(elsewhere)}: do not change that while the run lives",
                file=sys.stderr,
            )

    def epochs(self, run_dir: Path) -> Epochs:
        """Return how a run's first epochs divide into steps; InputError if the run is new and its job is not valid."""
        known = read_facts(run_dir).known_by.epochs if is_run(run_dir) else None
        if known is None:
            if self._checked is None:
                self.check()
            assert self._checked is not None
            known = self._checked.facts.epochs
        assert known is not None, "the check of a job tells its epochs"
        return known

    def of(self, run_dir: RunDir) -> JobCode:
        """Return the code of a run, as far as it is known without loading the job.

        RunDirError: the stored code is damaged, or was changed since then and the user has not said what to do.
        """
        sha256 = run_dir.facts.code_sha256
        if sha256 is None:
            return pack(self._job_path, self.files, unpack=self._unpack)
        code = kept(run_dir.path, sha256, self._job_path, unpack=self._unpack)
        self.cut = kept_cut(run_dir.path, sha256)
        began = JobFiles(self.files.folder, files_of(code))
        self._changed = changed(digests(began.files), self.files)
        if self._changed and self._if_changed is IfChanged.REFUSE and run_dir.other_job is not None:
            raise run_dir.belongs_to_another(SAME_JOB)
        if self._changed and self._if_changed is IfChanged.REFUSE:
            raise RunDirError(
                "was changed since the run began",
                source=str(self.files.folder / self._changed[0]),
                allowed="as it was; --if-changed keep, to go on with the code that the run began with; "
                "--if-changed accept, to go on with the changed code from the newest checkpoint; or another --run-dir",
            )
        if self._changed and self._if_changed is IfChanged.ACCEPT:
            return pack(self._job_path, self.files, unpack=self._unpack)
        if self._changed:
            print(
                f"going on with the code that the run began with, without what was changed: {', '.join(self._changed)}",
                file=sys.stderr,
            )
        self.files, self._kept = began, code
        return code

    def begin(self, run_dir: RunDir) -> JobCode:
        """Check the job, unless it was checked before, and store the code of the run from now on.

        InputError: the job is not valid, is another job, or its settings or data differ from those with which the run
        began. RunDirError: the directory cannot be written.
        """
        if self._checked is None:
            self.check()
        assert self._checked is not None
        began, known = run_dir.facts, self._checked.facts
        differing = list(changes(known, began.known_by))
        for change in differing:
            refusal, why = change.refusal(self._job_path), change.cannot_apply
            if why is None and self._if_changed is IfChanged.ACCEPT:
                continue
            if self._if_changed is not IfChanged.ACCEPT and run_dir.other_job is not None:
                raise run_dir.belongs_to_another(SAME_JOB)
            allowed = refusal.allowed if why else f"{refusal.allowed}; or --if-changed accept"
            message = why if why and self._if_changed is IfChanged.ACCEPT else refusal.message
            raise JobError(
                message, source=refusal.source, field=refusal.field, value=refusal.value, allowed=allowed
            ) from None
        known = known.joined(began.known_by)
        self._tell_accepted(told(differing), known.settings)
        code = self._kept or pack(self._job_path, self.files, unpack=self._unpack)
        with self.files.in_use():
            self.cut = self._checked.cut(began.micro_batch_size)
        keep(run_dir.path, code, self.cut)
        if (code.sha256, known) != (began.code_sha256, began.known_by):
            run_dir.begin_with(began.model_copy(update={"code_sha256": code.sha256, "known_by": known}))
        self._checked = None  # this frees the exported model
        return code

    def _tell_accepted(self, differing: str, settings: Mapping[str, str]) -> None:
        """Say on standard error which changes apply from now on, and which settings stay as saved."""
        if self._if_changed is not IfChanged.ACCEPT or not (differing or self._changed):
            return
        stays = ["weights", "optimizer state", "step counts"]
        if settings.get("effective_loss_scaling", "None") != "None" and "effective_loss_scaling" not in differing:
            stays.append("loss scale")
        schedule = any(name.startswith("lr_scheduler(") and value != "None" for name, value in settings.items())
        where = "; the schedule continues as if it had applied from the beginning" if schedule else ""
        self._accepted = (
            f"{differing or 'no setting differs'}; applies from the next step on{where}; as saved: {', '.join(stays)}"
        )
        files = f"changed code: {', '.join(self._changed)}; " if self._changed else ""
        print(f"going on with what was changed: {files}{self._accepted}", file=sys.stderr)

    def facts(self, code: JobCode) -> tuple[Fact, ...]:
        """Return the journal's facts about the code."""
        facts = [Fact(name="job_code", detail=f"sha256 {code.sha256}: {', '.join(sorted(self.files.files))}")]
        if self._changed:
            name = "changed_code_accepted" if self._if_changed is IfChanged.ACCEPT else "changed_code_ignored"
            facts.append(Fact(name=name, detail=", ".join(self._changed)))
        if self._accepted:
            facts.append(Fact(name="changed_job_accepted", detail=self._accepted))
        return tuple(facts)


def keep(run_dir: Path, code: JobCode, cut: HandedCut | None = None) -> None:
    """Store the code in the run directory under its digest, atomically and readable only by the user.

    The cut is stored beside it, for a manager that takes over and gives it to new workers. RunDirError if that fails.
    """
    path = run_dir / CODE / f"{code.sha256}.zip"
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise not_writable(path.parent, error) from error
    write_in_run_dir(path, code.archive)
    if cut is not None:
        write_in_run_dir(path.with_suffix(_CUT), cut.content)


def kept(run_dir: Path, sha256: str, job_path: str, *, unpack: bool = False) -> JobCode:
    """Read the code with which a run began, as that of this job; RunDirError if it is missing or damaged."""
    path = run_dir / CODE / f"{sha256}.zip"
    try:
        archive = path.read_bytes()
    except OSError as error:
        raise RunDirError(f"cannot be read: {error.strerror}", source=str(path)) from error
    if hashlib.sha256(archive).hexdigest() != sha256:
        raise RunDirError("is damaged: its digest is not its name", source=str(path))
    code, name = split_job(job_path)
    file = Path(code).resolve()
    return JobCode(
        job_path=f"{file.name}:{name}", folder=str(file.parent), sha256=sha256, archive=archive, unpack=unpack
    )


def kept_cut(run_dir: Path, code_sha256: str) -> HandedCut | None:
    """Read the cut stored beside this code, or None if there is none. A worker detects a damaged cut."""
    with suppress(OSError):
        content = (run_dir / CODE / f"{code_sha256}{_CUT}").read_bytes()
        return HandedCut(sha256=hashlib.sha256(content).hexdigest(), content=content)
    return None

"""Cut models from the cache or from the manager have the same bits as new ones; doubtful ones are not used."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from morph.contract.errors import JobError
from morph.contract.messages import HandedCut
from morph.cutting import cut
from morph.cutting.cache import cut_job
from morph.cutting.cache.artefact import CannotKeep
from morph.cutting.cache.cut_job import CutJob, LoadedJob, load_and_cut
from morph.cutting.exporting import export
from morph.cutting.exporting.exported_job import ExportedJob
from morph.cutting.exporting.functional import WRITTEN
from morph.jobs.files import imported_once
from morph.jobs.job import Job, load_job
from morph.runtime.process.single import run_single
from morph.user_cache import keep

pytestmark = pytest.mark.slow

HEAD = """
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional
from morph import CutPoint, Job

class Samples:
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return {"x": (torch.arange(8.0) * (index + 1) / 7).sin()}

def loss(model, batch):
    return model(batch["x"]).square().mean()

def adam(parameters):
    return torch.optim.AdamW([parameter for _, parameter in parameters], lr=1e-2)

def job_of(model):
    return Job(name="kept", model=model, loss=loss, dataset=Samples, optimizer=adam, batch_size=6, seed=3)
"""
PLAIN = "job = job_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))\n"
TIED = """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        nn.init.trunc_normal_(self.second.weight, std=0.3)
    def forward(self, x):
        return self.last(functional.dropout(self.second(functional.dropout(self.first(x), 0.3)).tanh(), 0.2))
job = job_of(Tied)
"""
BUFFERS = """
class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("scale", torch.tensor([1.5, 0.5, 2.0, 1.0, 1.0, 3.0, 0.25, 1.0]))
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
    def forward(self, x):
        x = self.norm(self.first(x))
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.last(torch.tanh(x - self.average) * self.scale + self.frozen)
job = job_of(Normed)
"""
ROOMS = {"dropout and tied weights": TIED, "buffers": BUFFERS}


class Exports:
    """Counts exports; where the job's text does not change, only the first one is real."""

    def __init__(self) -> None:
        self.count = 0
        self.ready: ExportedJob | None = None

    def __call__(self, job: Job) -> ExportedJob:
        self.count += 1
        return self.ready if self.ready is not None else EXPORT_JOB(job)


EXPORT_JOB = export.export_job
NUMBER = torch.__version__.partition("+")[0]


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> Exports:
    counted = Exports()
    monkeypatch.setattr(export, "export_job", counted)
    return counted


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MORPH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cuts"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def written(text: str) -> str:
        (tmp_path / "user").mkdir(exist_ok=True)
        path = tmp_path / "user" / "job.py"
        path.write_text(HEAD + textwrap.dedent(text), encoding="utf-8")
        return f"{path}:job"

    return written


def load(job_path: str, num_sections: int | None = 2, m: int = 2, handed: HandedCut | None = None) -> CutJob:
    with imported_once(job_path):
        return load_and_cut(job_path, num_sections=num_sections, micro_batch_size=m, handed=handed)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ExportedJob:
    """Return the plain job's export, for tests that only ask whether there would be another export."""
    path = tmp_path_factory.mktemp("plain") / "job.py"
    path.write_text(HEAD + PLAIN, encoding="utf-8")
    with imported_once(f"{path}:job"):
        return LoadedJob(f"{path}:job").exported


@pytest.fixture
def again(exports: Exports, plain: ExportedJob, write: Callable[[str], str]) -> Callable[..., str]:
    """Cache a cut once; return a function that loads it again and says whether it was read or made."""
    exports.ready = plain
    job_path = write(PLAIN)
    kept = load(job_path).model.fingerprint
    assert exports.count == 1

    def told(**given: Any) -> str:
        before = exports.count
        found = load(job_path, **given)
        assert found.model.fingerprint == kept or "num_sections" in given
        return "made" if exports.count > before else "read"

    assert told() == "read"
    return told


@pytest.mark.parametrize("text", ROOMS.values(), ids=ROOMS.keys())
def test_a_second_worker_does_not_export_and_its_weights_are_the_same_bits(
    text: str, exports: Exports, write: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_path = write(text)

    def run(name: str) -> list[tuple[str, str]]:
        url = str(tmp_path / name)
        manifest = run_single(job_path, steps=3, num_sections=3, micro_batch_size=2, checkpoint_url=url)
        return [(entry.unit, entry.sha256) for entry in manifest.units]

    cold = run("cold")
    assert exports.count == 1  # the run's own worker did not export
    assert run("warm") == cold
    assert exports.count == 1
    monkeypatch.setenv("MORPH_CACHE_DIR", "/dev/null")
    assert run("never kept") == cold
    assert exports.count == 2


def test_a_terminal_s_size_makes_no_other_cut(
    exports: Exports, write: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_path = write(PLAIN)
    load(job_path)
    monkeypatch.setenv("LINES", "24")  # as Python's readline sets it for every process that is started later
    monkeypatch.setenv("COLUMNS", "80")
    load(job_path)
    assert exports.count == 1


def made_here(job_path: str, num_sections: int = 2, m: int = 2) -> CutJob:
    with imported_once(job_path):
        job = load_job(job_path)
        exported = EXPORT_JOB(job)
    return CutJob(job, cut(exported, num_sections=num_sections, micro_batch_size=m), exported.initial_state)


def require_equal(made: CutJob, found: CutJob) -> None:
    for one, other in zip(made.model.sections, found.model.sections, strict=True):
        assert other.code.code == one.code.code  # type: ignore[attr-defined]
        left_out = {"code", "constant_values", "_on_device"}
        assert {k: v for k, v in vars(other).items() if k not in left_out} == {
            k: v for k, v in vars(one).items() if k not in left_out
        }
        for name in one.constants:
            assert torch.equal(one.constant_values[name], other.constant_values[name])
        metas = [
            [[node.meta.get(name) for name in ("stack_trace", WRITTEN)] for node in section.code.graph.nodes]  # type: ignore[attr-defined]
            for section in (one, other)
        ]
        assert metas[0] == metas[1]
    for field in ("units", "fingerprint", "specs", "unused_parameters", "metric_names", "micro_batch_size"):
        assert getattr(found.model, field) == getattr(made.model, field)
    assert list(found.initial) == list(made.initial)
    for name in made.initial:
        assert torch.equal(made.initial[name], found.initial[name])
        empty = found.initial.empty(name, torch.device("cpu"))
        assert (empty.stride(), empty.dtype) == (made.initial[name].stride(), made.initial[name].dtype)


@pytest.mark.parametrize("text", ROOMS.values(), ids=ROOMS.keys())
def test_a_cut_handed_to_another_machine_is_the_one_made(
    text: str, exports: Exports, write: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the other machine, the job is in another folder and the cache is empty."""
    job_path = write(text)
    with imported_once(job_path):
        handed = LoadedJob(job_path).handed(2, 2)
    there = f"{shutil.copytree(tmp_path / 'user', tmp_path / 'there')}/job.py:job"
    monkeypatch.setenv("MORPH_CACHE_DIR", "/dev/null")
    monkeypatch.setattr(torch, "__version__", f"{torch.__version__.partition('+')[0]}+of_the_gpu")
    require_equal(made_here(there), load(there, handed=HandedCut.model_validate_json(handed.model_dump_json())))
    assert exports.count == 1


def test_a_cut_of_another_torch_is_reported_and_made_anew(
    exports: Exports,
    plain: ExportedJob,
    write: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    exports.ready = plain
    job_path = write(PLAIN)
    with imported_once(job_path), monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99")
        handed = LoadedJob(job_path).handed(2, 2)
    found = load(job_path, handed=handed)
    assert (exports.count, found.model.micro_batch_size) == (2, 2)
    (record,) = caplog.records
    assert record.getMessage().endswith(f"cannot be used: it was made by torch 2.99, and this is torch {NUMBER}")


def test_a_handed_cut_whose_digest_differs_is_refused(
    exports: Exports, plain: ExportedJob, write: Callable[[str], str]
) -> None:
    exports.ready = plain
    job_path = write(PLAIN)
    with imported_once(job_path):
        handed = LoadedJob(job_path).handed(2, 2)
    with pytest.raises(JobError, match="its digest differs"):
        load(job_path, handed=handed.model_copy(update={"content": handed.content + b" "}))


def test_a_cut_that_is_too_long_for_a_setup_is_not_handed(
    exports: Exports, plain: ExportedJob, write: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exports.ready = plain
    monkeypatch.setattr("morph.cutting.cache.cut_job.MOST_CUT_BYTES", 1000)
    job_path = write(PLAIN)
    with imported_once(job_path), pytest.raises(CannotKeep, match=r"^\d{4} bytes, more than 1000$"):
        LoadedJob(job_path).handed(2, 2)


def test_a_moved_job_uses_its_cached_cut_with_the_new_paths(
    exports: Exports, write: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(write(TIED))
    there = f"{shutil.copytree(tmp_path / 'user', tmp_path / 'there')}/job.py:job"
    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "TMPDIR", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, str(tmp_path))
    found = load(there)
    assert exports.count == 1
    require_equal(made_here(there), found)
    assert str(found.model.sections[0].source).startswith(f"{tmp_path / 'there'}/job.py:")


def test_it_is_kept_under_the_number_of_sections_that_was_found(exports: Exports, write: Callable[[str], str]) -> None:
    job_path = write(PLAIN)
    found = load(job_path, None)
    assert load(job_path, None).model.fingerprint == found.model.fingerprint
    assert load(job_path, len(found.model.sections)).model.fingerprint == found.model.fingerprint
    assert exports.count == 1


def rewritten(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return a function that changes a cached file and updates its digest, as this user could have done."""

    def harm(path: Path) -> None:
        form = json.loads(zlib.decompress(path.read_bytes()[32:]))
        change(form)
        keep(path.parent, path.name, zlib.compress(json.dumps(form).encode()))

    return harm


def graph(form: dict[str, Any]) -> list[Any]:
    sections, *_ = form["model"]["CutModel"]
    found: list[Any] = next(field["graph"] for field in sections["tuple"][0]["Section"] if "graph" in (field or {}))
    return found


def call(form: dict[str, Any], name: str) -> None:
    node = next(node for node in graph(form) if node[0] == "call_function")
    node[2] = {"function": name}


HARM: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, 1000),
    "unreadable": lambda path: path.chmod(0o622),
    "no JSON": lambda path: keep(path.parent, path.name, b"\x80\x04cos\nsystem\n."),
    "another form": rewritten(lambda form: form.update(form=0)),
    "a part missing": rewritten(lambda form: form.pop("tape")),
    "another m": rewritten(lambda form: form["model"]["CutModel"].__setitem__(3, 4)),
    "a call of code": rewritten(lambda form: call(form, "operator.methodcaller")),
    "a call of a module": rewritten(lambda form: call(form, "os.system")),
    "a call of nothing": rewritten(lambda form: call(form, "aten.no_such_operation.default")),
    "a call of what is no function": rewritten(lambda form: graph(form)[-2].__setitem__(2, {"dtype": "float32"})),
    "a node that is not there": rewritten(lambda form: graph(form)[-1].__setitem__(3, {"node": 99})),
    "what has no type": rewritten(lambda form: form["tensors"][0][1].update(dict=[["w", {"dtype": "load"}]])),
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM.keys())
def test_a_damaged_cut_is_made_and_cached_again(
    harm: Callable[[Path], object], again: Callable[[], str], folder: Path
) -> None:
    (file,) = folder.iterdir()
    harm(file)
    assert again() == "made"
    assert again() == "read"


def edited(path: Path) -> None:
    path.write_text(path.read_text() + "# edited\n")


@pytest.mark.parametrize(
    "change",
    [
        lambda user, patch: edited(user / "job.py"),
        lambda user, patch: edited_data(user / "job.py"),
        lambda user, patch: patch.setenv("NUM_LAYERS", "3"),
        lambda user, patch: patch.setattr(torch, "__version__", "2.99"),
        lambda user, patch: patch.setattr("morph.__version__", "99"),
        lambda user, patch: patch.setattr("sys.version", "3.99"),
        lambda user, patch: patch.setattr(cut_job, "_own_code", lambda: "changed"),
        lambda user, patch: patch.setattr(cut_job, "_installed", lambda: "another package"),
        lambda user, patch: patch.setattr(torch.cuda, "is_available", lambda: True),
    ],
    ids=["code", "data", "variable", "torch", "morph", "python", "own code", "packages", "device"],
)
def test_a_cut_that_may_be_of_another_model_is_made_again(
    change: Callable[[Path, pytest.MonkeyPatch], object],
    again: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(tmp_path / "user", monkeypatch)
    assert again() == "made"
    assert again() == "read"


def edited_data(path: Path) -> None:
    path.write_text(path.read_text().replace("return 12", "return 13"))


@pytest.mark.parametrize("given", [{"m": 3}, {"num_sections": 1}])
def test_another_cut_is_made(given: dict[str, Any], again: Callable[..., str]) -> None:
    assert again(**given) == "made"


@pytest.mark.parametrize(
    "importing", ["from neighbour import WIDTH", "def later():\n    import neighbour"], ids=["at once", "later"]
)
def test_an_edited_neighbour_is_another_job(
    importing: str, exports: Exports, plain: ExportedJob, write: Callable[[str], str], tmp_path: Path
) -> None:
    exports.ready = plain
    job_path = write(f"{importing}\n{PLAIN}")
    for width, count in ((8, 1), (8, 1), (9, 2)):
        (tmp_path / "user" / "neighbour.py").write_text(f"WIDTH = {width}\n")
        load(job_path)
        assert exports.count == count


def test_code_in_folders_without_an_init_file_is_the_jobs(
    exports: Exports, plain: ExportedJob, write: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a folder is a package without a file: it is below the job's folder, or is the job's folder itself."""
    exports.ready = plain
    job_path = write(f"from parts.sizes import WIDTH\n{PLAIN}")
    (tmp_path / "user" / "parts").mkdir()
    (tmp_path / "user" / "other.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    import_module("user.other")
    for width, count in ((8, 1), (8, 1), (9, 2)):
        (tmp_path / "user" / "parts" / "sizes.py").write_text(f"WIDTH = {width}\n")
        load(job_path)
        assert exports.count == count
    for name in ("user", "user.other", "parts"):
        sys.modules.pop(name, None)


NOT_KEPT = {
    "a file read by the constructor": (
        "job = job_of(lambda: nn.Linear(8, len(Path(__file__[:-2] + 'txt').read_text())))"
    ),
    "a file read when it is loaded": (
        "WIDTH = len(Path(__file__[:-2] + 'txt').read_text())\njob = job_of(lambda: nn.Linear(8, 8))"
    ),
    "a process started": (
        "import subprocess\njob = job_of(lambda: nn.Linear(8, len(subprocess.check_output(['echo', '1234567']))))"
    ),
    "a neighbour imported by a name made up": (
        "def model():\n    from importlib import import_module\n"
        "    return nn.Linear(8, import_module('neigh' + 'bour').WIDTH)\njob = job_of(model)"
    ),
    "weights from elsewhere": (
        "job = job_of(lambda: nn.Sequential(nn.Linear(8, 8), Held(torch.tensor([[0.5] * 8] * 4096))))"
    ),
    "an autograd.Function": (
        "class Twice(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        return 2 * x\n"
        "    @staticmethod\n    def backward(ctx, g):\n        return 2 * g\n"
        "class Own(nn.Module):\n    def forward(self, x):\n        return Twice.apply(x)\n"
        "job = job_of(lambda: nn.Sequential(nn.Linear(8, 8), Own(), nn.Linear(8, 8)))"
    ),
    "marks": (
        "class Marked(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.first, self.cut, self.last = nn.Linear(8, 8), CutPoint(), nn.Linear(8, 8)\n"
        "    def forward(self, x):\n        x = self.cut(self.first(x))\n"
        "        return self.last(x * 2 if x.sum().item() > 0 else x)\n"
        "job = job_of(Marked)"
    ),
}
HELD = """
class Held(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.register_buffer("values", values)
    def forward(self, x):
        return x + self.values.mean(0)
"""


@pytest.mark.parametrize("text", NOT_KEPT.values(), ids=NOT_KEPT.keys())
def test_models_with_values_from_elsewhere_are_not_cached(
    text: str, exports: Exports, write: Callable[[str], str], folder: Path, tmp_path: Path
) -> None:
    job_path = write(HELD + text)
    (tmp_path / "user" / "job.txt").write_text("8 letter")
    (tmp_path / "user" / "neighbour.py").write_text("WIDTH = 8\n")
    for count in (1, 2):
        load(job_path, 1 if "CutPoint()" not in text else 2)
        assert exports.count == count
    assert not folder.exists()


def test_files_that_the_data_set_reads_are_not_part_of_the_model(
    exports: Exports, plain: ExportedJob, write: Callable[[str], str], tmp_path: Path
) -> None:
    exports.ready = plain
    job_path = write(
        "class OfFile(Samples):\n    def __getitem__(self, index):\n"
        "        return {'x': torch.full((8,), float(Path(__file__[:-2] + 'txt').read_text()))}\n"
        + PLAIN.replace("job_of(", "Job(name='kept', loss=loss, dataset=OfFile, optimizer=adam, batch_size=6, model=")
    )
    for number, count in (("1", 1), ("1", 1), ("2", 2)):
        (tmp_path / "user" / "job.txt").write_text(number)
        load(job_path)
        assert exports.count == count


def test_code_that_is_neither_installed_nor_the_jobs_is_not_known(
    exports: Exports, plain: ExportedJob, write: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exports.ready = plain
    (tmp_path / "elsewhere.py").write_text("WIDTH = 8\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    job_path = write("from elsewhere import WIDTH\n" + PLAIN)
    for count in (1, 2):
        load(job_path)
        assert exports.count == count


def test_a_job_whose_files_may_change_under_it_is_exported_each_time(
    exports: Exports, plain: ExportedJob, write: Callable[[str], str], folder: Path
) -> None:
    exports.ready = plain
    job_path = write(PLAIN)
    load_and_cut(job_path, num_sections=2, micro_batch_size=2)
    assert not folder.exists()


def test_only_this_threads_reads_count(tmp_path: Path) -> None:
    from threading import Thread

    from morph.cutting.source.reads import Reads, of_data

    path = tmp_path / "file"
    path.touch()
    with Reads() as reads:
        other = Thread(target=path.read_bytes)
        other.start()
        other.join()
        with of_data():
            path.read_bytes()
        path.write_bytes(b"")
        (tmp_path / "gone").exists()
        Path(os.__file__).read_bytes()
    path.read_bytes()
    assert reads.found == []
    with reads:
        path.read_bytes()
    assert reads.found == [str(path)]

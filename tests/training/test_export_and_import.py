"""A run's weights are exported as one plain state_dict, and a run can begin from one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor
from typer.testing import CliRunner

from manager.run_dir import RunDir, RunFacts, read_facts
from manager.trackers.process import Watching
from manager.trackers.supervisor import Watchers
from morph.checkpoint.frozen_weights import FrozenWeights
from morph.checkpoint.manifest import read_manifest, version_url, write_manifest
from morph.checkpoint.plain_file import write_plain_file
from morph.checkpoint.unit_files import read_unit
from morph.cli.main import app
from morph.contract.errors import InputError
from morph.contract.messages import Failed
from morph.cutting.cache.cut_job import load_and_cut
from morph.jobs.files import imported_once
from morph.jobs.job import load_job
from morph.runtime.process.single import run_single
from morph.runtime.state.model_state import model_state
from tests.cli.given import without_phases
from tests.crew import taking_part
from tests.system.harness import load_tiny_job
from tests.training.shapes import NAMES, ShapesCrew, spec_of
from tests.training.training_jobs import MICRO_BATCH_SIZE, NUM_SECTIONS, Net, Points

pytestmark = pytest.mark.slow

NUM_STEPS = 2


def morph(*arguments: object) -> tuple[int, str]:
    """Run the command line; return the exit code, and the output without progress reports."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, "".join(f"{line}\n" for line in without_phases(result.output))


def trained_run(job: str, path: Path, num_sections: int = NUM_SECTIONS) -> Path:
    """Return a run directory with a checkpoint after two steps."""
    with imported_once(job):  # cached, and read by the run's worker
        found = load_and_cut(job, num_sections=num_sections, micro_batch_size=MICRO_BATCH_SIZE)
    facts = RunFacts(
        job=job,
        fingerprint=found.model.fingerprint,
        micro_batch_size=MICRO_BATCH_SIZE,
        batch_size=found.job.batch_size,
        num_sections=num_sections,
    )
    with RunDir(path, facts) as opened:
        run_single(
            job,
            steps=NUM_STEPS,
            num_sections=num_sections,
            micro_batch_size=MICRO_BATCH_SIZE,
            checkpoint_url=opened.checkpoint_url,
        )
    return path


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return trained_run(spec_of("plain"), tmp_path_factory.mktemp("plain") / "run")


def trained_parameters(run_dir: Path, version: int = NUM_STEPS) -> dict[str, Tensor]:
    url = str(run_dir / "checkpoints")
    manifest = read_manifest(url, version)
    found: dict[str, Tensor] = {}
    for entry in manifest.units:
        tensors = read_unit(url, manifest, entry.unit)
        found |= {key.removeprefix("param/"): value for key, value in tensors.items() if key.startswith("param/")}
    return found


def test_the_users_model_loads_what_was_exported(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    code, said = morph("export", run_dir, out)
    assert (code, f"wrote version {NUM_STEPS} to {out}" in said) == (0, True)
    model = Net()
    before = model.first.weight.detach().clone()
    model.load_state_dict(safetensors.torch.load_file(str(out)), strict=True)
    trained = trained_parameters(run_dir)
    assert {name for name, _ in model.named_parameters()} == set(trained)
    assert all(torch.equal(parameter, trained[name]) for name, parameter in model.named_parameters())
    assert torch.equal(model.shift, torch.full_like(model.shift, 0.25))
    assert model.last.weight is model.first.weight
    assert not torch.equal(model.first.weight, before)


@pytest.mark.parametrize("name", ["out.pt", "out.pth", "pytorch_model.bin", "OUT.PT"])
def test_a_file_named_for_torch_is_read_by_torch_load(run_dir: Path, tmp_path: Path, name: str) -> None:
    assert morph("export", run_dir, tmp_path / "out.safetensors")[0] == 0
    assert morph("export", run_dir, tmp_path / name)[0] == 0
    state = torch.load(tmp_path / name, weights_only=True)
    others = safetensors.torch.load_file(str(tmp_path / "out.safetensors"))
    assert {type(value) for value in state.values()} == {Tensor}
    assert state.keys() == others.keys()
    assert all(torch.equal(state[key], others[key]) for key in others)
    Net().load_state_dict(state, strict=True)


@pytest.mark.parametrize("name", ["out.ckpt", "out.safetensors.zip"])
def test_a_name_that_says_no_format_is_refused(run_dir: Path, tmp_path: Path, name: str) -> None:
    code, said = morph("export", run_dir, tmp_path / name)
    assert code == 2
    assert "has a name that does not show the wanted format; allowed: a name that ends in .safetensors, or" in said
    assert list(tmp_path.iterdir()) == []


def test_tied_weights_are_in_the_file_under_each_name(run_dir: Path, tmp_path: Path) -> None:
    morph("export", run_dir, tmp_path / "out.safetensors")
    state = safetensors.torch.load_file(str(tmp_path / "out.safetensors"))
    assert set(state) == set(Net().state_dict())
    assert torch.equal(state["first.weight"], state["last.weight"])


def test_a_damaged_newest_checkpoint_is_skipped_unless_it_was_named(run_dir: Path, tmp_path: Path) -> None:
    url = tmp_path / "copy"
    shutil.copytree(run_dir / "checkpoints", url)
    whole = read_manifest(str(url), NUM_STEPS)
    newer = whole.model_copy(update={"version": NUM_STEPS + 1})
    shutil.copytree(version_url(str(url), NUM_STEPS), version_url(str(url), NUM_STEPS + 1))
    write_manifest(str(url), newer)
    damaged = Path(version_url(str(url), NUM_STEPS + 1)) / newer.units[-1].file
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    job, out = spec_of("plain"), tmp_path / "out.safetensors"
    code, said = morph("export", url, out, "--job", job)
    assert (code, f"wrote version {NUM_STEPS} to {out}" in said) == (0, True)
    assert f"{damaged.name}: the file differs from its manifest" in said
    assert f"version {NUM_STEPS + 1} is skipped, and version {NUM_STEPS} is the newest whole version" in said
    assert morph("export", run_dir, tmp_path / "other.safetensors")[0] == 0
    assert out.read_bytes() == (tmp_path / "other.safetensors").read_bytes()
    code, said = morph("export", url, out, "--job", job, "--version", NUM_STEPS + 1, "--overwrite")
    assert (code, f"{damaged.name}: the file differs" in said) == (1, True)
    code, said = morph("export", url, out, "--overwrite")
    assert (code, "--job: is not given" in said) == (2, True)


GPT2_JOB = """
from dataclasses import replace
from functools import partial
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel
from morph import Job

def loss(model, batch):
    logits = model(input_ids=batch["tokens"]).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())

class Tokens:
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return {"tokens": (torch.arange(8) * (index % 3 + 1) + index) % 32}

def model(own_tie=False):
    made = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2))
    if own_tie:  # the config does not tell it
        first, second = made.transformer.h
        first.mlp.c_fc.weight = second.mlp.c_fc.weight
    return made

job = Job(
    name="gpt2",
    model=model,
    loss=loss,
    dataset=Tokens,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
    batch_size=4,
    micro_batch_size=2,
    num_sections=2,
)
tied = replace(job, model=partial(model, True))
"""


@pytest.fixture(scope="module")
def gpt2_job(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("gpt2") / "gpt2_job.py"
    path.write_text(GPT2_JOB, encoding="utf-8")
    return f"{path}:job"


@pytest.mark.filterwarnings("default")  # transformers itself triggers it
def test_transformers_loads_what_was_exported_and_gives_back_what_can_be_imported(
    gpt2_job: str, tmp_path: Path
) -> None:
    run = trained_run(gpt2_job, tmp_path / "run", num_sections=2)
    folder = tmp_path / "model"
    assert morph("export", run, folder / "model.safetensors")[0] == 0
    # Importing it here would cost every process that collects tests two seconds.
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    config.save_pretrained(folder)
    loaded, told = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["mismatched_keys"]
    trained = trained_parameters(run)
    assert all(torch.equal(parameter, trained[name]) for name, parameter in loaded.named_parameters())

    loaded.save_pretrained(tmp_path / "again")
    again = tmp_path / "again" / "model.safetensors"
    assert "lm_head.weight" not in safetensors.torch.load_file(str(again)), (
        "transformers keeps one name of a tied weight"
    )
    assert morph("import", gpt2_job, again, tmp_path / "tuned")[0] == 0
    imported = trained_parameters(tmp_path / "tuned", version=0)
    assert imported.keys() == trained.keys()
    assert all(torch.equal(imported[name], trained[name]) for name in trained)


@pytest.mark.filterwarnings("default")  # transformers itself triggers it
@pytest.mark.parametrize(("name", "twice"), [("job", []), ("tied", ["transformer.h.0.mlp.c_fc.weight"])])
def test_an_exported_folder_holds_a_tied_tensor_once_as_save_pretrained_does(
    gpt2_job: str, tmp_path: Path, name: str, twice: list[str]
) -> None:
    """A tie that ``from_pretrained`` cannot know is written under both names."""
    spec = gpt2_job.replace(":job", f":{name}")
    run, folder = trained_run(spec, tmp_path / "run", num_sections=2), tmp_path / "folder"
    assert morph("export", run, folder)[0] == 0
    from transformers import GPT2LMHeadModel

    loaded, told = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"]
    trained = trained_parameters(run)
    own = dict(loaded.named_parameters())
    assert sorted(own.keys() - trained.keys()) == ["transformer.h.1.mlp.c_fc.weight"] * len(twice)
    assert all(torch.equal(own[key], value) for key, value in trained.items())
    loaded.save_pretrained(tmp_path / "host")
    written = safetensors.torch.load_file(folder / "model.safetensors")
    assert written.keys() == safetensors.torch.load_file(tmp_path / "host" / "model.safetensors").keys()
    plain = load_job(spec).model()
    told = plain.load_state_dict(written, strict=False)  # the host's own files lack the second name too
    assert (told.missing_keys, told.unexpected_keys) == (["lm_head.weight"], [])
    assert all(torch.equal(value, trained[key]) for key, value in plain.named_parameters())
    assert morph("export", run, tmp_path / "model.pt")[0] == 0
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    plain.load_state_dict(state, strict=True)


def test_what_is_imported_is_exported_again_bit_for_bit(run_dir: Path, tmp_path: Path) -> None:
    first, again = tmp_path / "first.safetensors", tmp_path / "again.safetensors"
    morph("export", run_dir, first)
    code, said = morph("import", spec_of("plain"), first, tmp_path / "tuned")
    assert (code, "begins with the weights of" in said) == (0, True)
    facts, original = read_facts(tmp_path / "tuned"), read_facts(run_dir)
    assert facts == original
    morph("export", tmp_path / "tuned", again)
    assert first.read_bytes() == again.read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_an_imported_state_is_version_zero_with_a_fresh_optimizer(run_dir: Path, tmp_path: Path) -> None:
    morph("export", run_dir, tmp_path / "w.safetensors")
    morph("import", spec_of("plain"), tmp_path / "w.safetensors", tmp_path / "tuned")
    url = str(tmp_path / "tuned" / "checkpoints")
    manifest = read_manifest(url, 0)
    tensors = read_unit(url, manifest, manifest.units[0].unit)
    assert not [name for name in tensors if name.startswith("optim/")]
    assert json.loads(bytes(tensors["numbers"].tolist()))["version"] == 0


def write(path: Path, **changes: Tensor | None) -> Path:
    """Return a fresh model's state_dict with some entries changed or removed; ``__`` stands for a dot."""
    torch.manual_seed(7)
    state = {name: value.clone() for name, value in Net().state_dict().items()}
    for name, value in changes.items():
        state.pop(name.replace("__", "."), None)
        if value is not None:
            state[name.replace("__", ".")] = value
    safetensors.torch.save_file(state, str(path))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"second__weight": None, "third__bias": None},
            "second.weight, third.bias: are missing, but the job's model trains them",
        ),
        ({"extra": torch.ones(1)}, "extra: are not in the job's model"),
        ({"second__bias": torch.ones(9)}, "second.bias: has another shape (got [9]); allowed: [8]"),
        (
            {"second__bias": torch.ones(8).double()},
            "second.bias: has a type that would lose digits (got 'torch.float64')",
        ),
        ({"last__weight": torch.ones(8, 8)}, "last.weight: differs; allowed: the same numbers as 'first.weight'"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_anything_is_written(
    changes: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "w.safetensors", **changes)
    code, said = morph("import", spec_of("plain"), file, tmp_path / "run")
    assert code == 2
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file; allowed: a .safetensors file"),
        (b"", "is not a safetensors file"),
        (b"PK\x03\x04 a pickle in a zip, as torch.save writes", "is not a safetensors file"),
        (b"\xff" * 64, "is not a safetensors file"),
    ],
)
def test_a_file_that_is_not_in_safetensors_format_is_refused(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "w.safetensors"
    if content is not None:
        file.write_bytes(content)
    code, said = morph("import", spec_of("plain"), file, tmp_path / "run")
    assert (code, message in said) == (2, True)


def test_a_tied_weight_needs_one_name_and_buffers_are_optional(tmp_path: Path) -> None:
    file = write(tmp_path / "w.safetensors", first__weight=None, shift=None)
    assert morph("import", spec_of("plain"), file, tmp_path / "run")[0] == 0
    assert torch.equal(
        trained_parameters(tmp_path / "run", 0)["first.weight"], safetensors.torch.load_file(str(file))["last.weight"]
    )


def test_narrower_types_are_widened(tmp_path: Path) -> None:
    file = write(tmp_path / "w.safetensors", second__bias=torch.full((8,), 0.3, dtype=torch.bfloat16))
    assert morph("import", spec_of("plain"), file, tmp_path / "run")[0] == 0
    bias = trained_parameters(tmp_path / "run", 0)["second.bias"]
    assert bias.dtype == torch.float32
    assert torch.equal(bias, torch.full((8,), 0.3, dtype=torch.bfloat16).float())


def test_entries_are_renamed_left_out_and_may_be_missing(tmp_path: Path) -> None:
    state = safetensors.torch.load_file(str(write(tmp_path / "w.safetensors")))
    other = {f"body.{name.replace('second', 'middle')}": value for name, value in state.items()}
    folder, run = tmp_path / "shards", tmp_path / "run"
    folder.mkdir()
    safetensors.torch.save_file({"old_head.weight": torch.ones(3)}, str(folder / "b.safetensors"))
    safetensors.torch.save_file(other, str(folder / "a.safetensors"))
    options = ["--rename", r"^body\.=", "--rename", "middle=second", "--skip", "old_head.*"]
    code, said = morph("import", spec_of("headed"), folder, run, *options)
    assert (code, "head.weight, head.bias: are missing, but the job's model trains them; allowed: names" in said) == (
        2,
        True,
    )
    code, said = morph("import", spec_of("headed"), folder, run, *options[:4], "--fresh", "head.*")
    assert (code, "old_head.weight: are not in the job's model; allowed: entries that --rename" in said) == (2, True)
    code, said = morph(
        "import", spec_of("headed"), folder, run, *options, "--fresh", "head.*", "--rename", "second=first"
    )
    assert (code, "become the same name" in said) == (2, True)
    code, said = morph("import", spec_of("headed"), folder, run, *options, "--fresh", "head.*")
    assert (code, "so the job initialises them: head.weight, head.bias" in said) == (0, True)
    found = trained_parameters(run, 0)
    assert all(torch.equal(found[name], state[name]) for name in state if name in found)
    fresh = model_state(load_job(spec_of("headed"))).values
    assert all(torch.equal(found[name], fresh[name]) for name in ("head.weight", "head.bias"))
    for option in ("--rename", "--skip"):
        code, said = morph("import", spec_of("headed"), folder, tmp_path / "other", option, "(=")
        assert (code, f"{option}: cannot be read" in said) == (2, True)


def trained_from(crew: ShapesCrew, job: str, run: Path, shape: str) -> dict[str, Tensor]:
    """Return parameters after two steps in a shape from a run directory's version 0."""
    crew.crew.job = load_tiny_job(NUM_SECTIONS, MICRO_BATCH_SIZE, spec_of(job))
    crew.crew.set_up(spec_of(job), crew.crew.job.fingerprint, run / "checkpoints")
    crew.crew.reshape(shape, NAMES, restore="checkpoint", version=0)
    crew.crew.train(NUM_STEPS)
    write_manifest(str(run / "checkpoints"), crew.crew.save())
    return trained_parameters(run)


def test_imported_frozen_weights_are_trained_over_and_kept_once(crew: ShapesCrew, tmp_path: Path) -> None:
    file = write(tmp_path / "w.safetensors", shift=torch.ones(8))
    code, said = morph("import", spec_of("plain"), file, tmp_path / "given")
    assert (code, "frozen, and stored once for the run: shift" in said) == (0, True)
    assert "stored once" not in morph("import", spec_of("shifted"), file, tmp_path / "own")[1]
    given = trained_from(crew, "plain", tmp_path / "given", "2x1")
    own = trained_from(crew, "shifted", tmp_path / "own", "1x2")
    assert given.keys() == own.keys()
    assert all(torch.equal(given[name], own[name]) for name in own)
    assert not list((tmp_path / "given" / "checkpoints" / f"v{NUM_STEPS:08d}").glob("*shift*"))
    assert morph("export", tmp_path / "given", tmp_path / "out.safetensors")[0] == 0
    assert torch.equal(safetensors.torch.load_file(str(tmp_path / "out.safetensors"))["shift"], torch.ones(8))
    assert morph("checkpoints", "copy", tmp_path / "given", tmp_path / "copy")[0] == 0
    assert torch.equal(FrozenWeights(str(tmp_path / "copy"))["shift"], torch.ones(8))

    shutil.rmtree(tmp_path / "given" / "checkpoints" / "frozen")
    crew.crew.set_up(spec_of("plain"), crew.crew.job.fingerprint, tmp_path / "given" / "checkpoints")
    order = crew.crew.order("1x1", NAMES, restore="checkpoint", version=0)
    (answer,) = crew.crew.ask(taking_part(order), "reshape", order)
    assert isinstance(answer, Failed)
    assert "was trained with other frozen weights: the folder 'frozen' beside the run's checkpoints" in answer.error


def test_a_changed_job_begins_with_a_runs_weights_and_optimizer_state(run_dir: Path, tmp_path: Path) -> None:
    options = ("--fresh", "head.*", "--optimizer-state")
    code, said = morph("import", spec_of("headed"), run_dir, tmp_path / "run", *options)
    assert (code, "begins with the weights of" in said) == (0, True)
    before, after = saved_state(run_dir, NUM_STEPS), saved_state(tmp_path / "run", 0)
    kept = {key for key in before if key.startswith(("param/", "optim/"))}
    assert {key.split("/")[2] for key in kept if key.startswith("optim/")} == {"step", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(after[key], before[key]) for key in kept)
    assert {key for key in after if "/" in key} - kept == {"param/head.weight", "param/head.bias"}
    code, said = morph("import", spec_of("headed_sgd"), run_dir, tmp_path / "sgd", *options)
    assert (code, "is trained by another optimizer" in said) == (2, True)
    assert not (tmp_path / "sgd").exists()
    file = write(tmp_path / "w.safetensors")
    code, said = morph("import", spec_of("plain"), file, tmp_path / "file", "--optimizer-state")
    assert (code, "--optimizer-state: has none; allowed: a run directory" in said) == (2, True)


def saved_state(run: Path, version: int) -> dict[str, Tensor]:
    manifest = read_manifest(str(run / "checkpoints"), version)
    units = [read_unit(str(run / "checkpoints"), manifest, entry.unit) for entry in manifest.units]
    return {key: value for unit in units for key, value in unit.items()}


def test_a_directory_that_is_not_empty_is_left_alone(tmp_path: Path, run_dir: Path) -> None:
    file = write(tmp_path / "w.safetensors")
    for target in (run_dir, tmp_path):
        before = sorted(str(path) for path in target.rglob("*"))
        code, said = morph("import", spec_of("plain"), file, target)
        assert (code, "is not a new or empty directory" in said) == (2, True)
        assert sorted(str(path) for path in target.rglob("*")) == before


def test_the_micro_batch_size_is_the_jobs_or_must_be_given(tmp_path: Path) -> None:
    file = write(tmp_path / "w.safetensors")
    for job, size in (("plain", 4), ("open_size", None), ("open_size", 3)):
        chosen = () if size is None else ("--m", size)
        code, said = morph("import", spec_of(job), file, tmp_path / "run", *chosen)
        assert (code, "the run needs a micro-batch size" in said) == (2, True)
    assert morph("import", spec_of("open_size"), file, tmp_path / "run", "--m", 4)[0] == 0
    assert read_facts(tmp_path / "run").micro_batch_size == 4


def test_an_existing_file_is_kept_unless_it_is_to_be_overwritten(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    out.write_text("precious", encoding="utf-8")
    assert morph("export", run_dir, out) == (2, f"error: {out}: exists already; allowed: a new file, or --overwrite\n")
    assert out.read_text(encoding="utf-8") == "precious"
    assert morph("export", run_dir, out, "--overwrite")[0] == 0


def test_what_cannot_be_exported_is_one_line(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    assert "is not a run directory" in morph("export", tmp_path, out)[1]
    code, said = morph("export", run_dir, out, "--version", 7)
    assert (code, f"--version: has no such checkpoint (got 7); allowed: {NUM_STEPS}" in said) == (2, True)
    code, said = morph("export", run_dir, out, "--job", spec_of("wider"))
    assert (code, "is not the model that was trained" in said) == (2, True)
    assert not out.exists()


def test_a_type_that_safetensors_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"m\.safetensors: z: cannot be written \(got torch\.complex128\)"):
        write_plain_file(tmp_path / "m.safetensors", {"w": torch.ones(2), "z": torch.zeros(2, dtype=torch.complex128)})
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    run = trained_run(spec_of("plain"), tmp_path / "run")
    file = next((run / "checkpoints" / f"v{NUM_STEPS:08d}").glob("s1-*"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    code, said = morph("export", run, tmp_path / "out.safetensors")
    assert (code, "differs from its manifest" in said) == (1, True)


def test_a_jobs_function_is_called_with_the_model_of_the_newest_checkpoint(tmp_path: Path) -> None:
    run_dir = trained_run(spec_of("judged"), tmp_path / "run")
    code, said = morph("sample", run_dir, "-o", tmp_path / "samples")
    path = tmp_path / "samples" / f"v{NUM_STEPS:08d}.json"
    assert (code, said.splitlines()[-1]) == (0, f"wrote {path}")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert morph("export", run_dir, tmp_path / "out.safetensors")[0] == 0
    net = Net().eval()
    net.load_state_dict(safetensors.torch.load_file(tmp_path / "out.safetensors"))
    with torch.no_grad():
        expected = net(Points()[0]["x"][None])[0].tolist()
    assert (found["step"], found["sample"]["said"]) == (NUM_STEPS, pytest.approx(expected))

    said_of_it: list[str] = []
    watching = Watching(
        kind="samples",
        run_dir=run_dir,
        journal=run_dir / "journal.sqlite",
        checkpoint_url="",
        job="judged",
        limit_s=60,
    )
    with Watchers((watching,), said_of_it.append):
        pass
    again = json.loads((run_dir / "samples" / path.name).read_text(encoding="utf-8"))
    assert (said_of_it, again) == ([], found), "what is drawn depends on the version alone"
    assert "the sample of the newest checkpoint is already in" in morph("sample", run_dir)[1]
    refused = "--device: this machine has no such device (got 'mps')"
    assert refused in morph("sample", run_dir, "--device", "mps")[1]

    code, said = morph("sample", trained_run(spec_of("plain"), tmp_path / "plain"))
    assert (code, "Job: sample: is not given; allowed: lambda model, step: text" in said) == (2, True)

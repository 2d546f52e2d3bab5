"""Each notebook runs from top to bottom in a fresh kernel of this interpreter."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

from tests.grids import IS_LONG
from tests.waiting import PATIENCE

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
PLAN, SPOT, ELASTIC = "plan_a_job.ipynb", "spot_job.ipynb", "elastic_loop.ipynb"
CELL_TIMEOUT_S = 300 * PATIENCE
SMALLER = {
    PLAN: {"MAX_GPUS = 128": "MAX_GPUS = 36"},
    SPOT: {
        "NUM_STEPS = 300": "NUM_STEPS = 50",
        "SEEDS = range(4)": "SEEDS = range(2)",
        "SIZES = (24, 36, 48)": "SIZES = (24, 30)",
    },
    ELASTIC: {
        "NUM_WORKERS = 4": "NUM_WORKERS = 2",
        "NUM_STEPS = 150": "NUM_STEPS = 30",
        "LOSSES = (50, 100)": "LOSSES = (10,)",
    },
}
"""Settings at the top of notebooks, reduced for each commit; `make test-long` runs notebooks unchanged."""
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module", params=[PLAN, SPOT, ELASTIC])
def executed(request: pytest.FixtureRequest) -> nbformat.NotebookNode:
    """Return a notebook with outputs. Kernel and client communicate through files, and leave nothing behind."""
    notebook = nbformat.read(FOLDER / request.param, as_version=4)
    top = next(cell for cell in notebook.cells if cell.cell_type == "code")
    for written, smaller in () if IS_LONG else SMALLER[request.param].items():
        assert written in top.source
        top.source = top.source.replace(written, smaller)
    with tempfile.TemporaryDirectory(prefix="kernel") as folder:  # a short path, because a socket's name is limited
        own = {"IPYTHONDIR": f"{folder}/ipython", "JUPYTER_RUNTIME_DIR": folder}
        backend = "module://matplotlib_inline.backend_inline"
        client = NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_S,
            startup_timeout=CELL_TIMEOUT_S,
            kernel_name="python3",
            resources={"metadata": {"path": str(FOLDER)}},
            config=Config(KernelManager={"transport": "ipc", "connection_file": f"{folder}/kernel.json"}),
        )
        return client.execute(env={**os.environ, **own, "MPLBACKEND": backend})


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.mark.system
def test_every_cell_runs_and_says_nothing_on_stderr(executed: nbformat.NotebookNode) -> None:
    ran = [cell.execution_count for cell in executed.cells if cell.cell_type == "code"]
    assert ran == list(range(1, len(ran) + 1))
    assert [output.text for output in outputs(executed) if output.get("name") == "stderr"] == []


@pytest.mark.system
@pytest.mark.parametrize("executed", [PLAN], indirect=True)
def test_it_shows_the_curves_the_timeline_and_the_ladder(executed: nbformat.NotebookNode) -> None:
    pictures = [output for output in outputs(executed) if "image/png" in output.get("data", {})]
    assert len(pictures) == 3
    tables = [output.data["text/plain"] for output in outputs(executed) if "text/html" in output.get("data", {})]
    assert [word in table for word, table in zip(("6x6", "USD per million", "imbalance"), tables, strict=True)] == [
        True,
        True,
        True,
    ]


@pytest.mark.system
@pytest.mark.parametrize("executed", [SPOT], indirect=True)
def test_the_notebook_says_how_many_vms_how_long_and_how_much(executed: nbformat.NotebookNode) -> None:
    said = outputs(executed)[-1].text
    number = r"(\d+(?:\.\d+)?)"
    found = re.search(rf"Take (\d+) spot VMs: expect {number} to {number} hours and {number} to {number} dollars", said)
    assert found is not None, said
    _, low_h, high_h, low_usd, high_usd = map(float, found.groups())
    assert 0 < low_h <= high_h < 2 * low_h
    assert 0 < low_usd <= high_usd < 2 * low_usd
    assert len([output for output in outputs(executed) if "image/png" in output.get("data", {})]) == 2


@pytest.mark.system
@pytest.mark.parametrize("executed", [ELASTIC], indirect=True)
def test_the_loop_that_loses_workers_ends_with_the_weights_of_one_worker(executed: nbformat.NotebookNode) -> None:
    digests = re.findall(r"weights (\w{16})$", outputs(executed)[-1].text, re.MULTILINE)
    assert len(digests) == 2
    assert len(set(digests)) == 1
    tables = [output.data["text/plain"] for output in outputs(executed) if "text/html" in output.get("data", {})]
    assert len(tables[0].splitlines()) >= 4, "a row for each number of workers"


@pytest.mark.parametrize("name", [PLAN, SPOT, ELASTIC])
def test_it_is_kept_without_outputs_and_without_paths_of_a_machine(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert outputs(notebook) == []
    assert all(cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
    assert re.findall(r"""["'(](?:/|[A-Z]:\\\\)\w+""", text) == []
    assert notebook.metadata.kernelspec.name == "python3"

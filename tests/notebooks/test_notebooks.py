"""Each notebook runs from top to bottom in a fresh kernel of this interpreter; some are kept with their outputs.

python -m tests.notebooks.test_notebooks     # writes the outputs anew
"""

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
PLAN, KILLS, BUDGET = "calibrate_and_plan.ipynb", "run_with_kills.ipynb", "budget_on_spot.ipynb"
ELASTIC = "elastic_loop.ipynb"
WITH_OUTPUTS = (PLAN, KILLS, BUDGET)
CELL_TIMEOUT_S = 300 * PATIENCE
SMALLER = {
    PLAN: {"MAX_GPUS = 12": "MAX_GPUS = 5"},
    KILLS: {"NUM_VMS = 4": "NUM_VMS = 3", "KILLS = (40, 80)": "KILLS = (20,)", "MORE_STEPS = 40": "MORE_STEPS = 10"},
    BUDGET: {"BUDGET_USD = 150": "BUDGET_USD = 40", "SEEDS = range(3)": "SEEDS = range(2)", "(20, 28, 36)": "(20, 28)"},
}
"""Settings at the top of notebooks, reduced for each commit; `make test-long` runs notebooks unchanged."""
pytestmark = pytest.mark.timeout(1200)


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return a notebook with outputs. Kernel and client communicate through files, and leave nothing behind."""
    with tempfile.TemporaryDirectory(prefix="kernel") as folder:  # a short path, because a socket's name is limited
        own = {"IPYTHONDIR": f"{folder}/ipython", "JUPYTER_RUNTIME_DIR": folder}
        backend = "module://matplotlib_inline.backend_inline"
        client = NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_S,
            startup_timeout=CELL_TIMEOUT_S,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": str(FOLDER)}},
            config=Config(KernelManager={"transport": "ipc", "connection_file": f"{folder}/kernel.json"}),
        )
        return client.execute(env={**os.environ, **own, "MPLBACKEND": backend})


def kinds(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """Return by cell what its outputs are: the name of a stream, or the best form of what is shown."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    forms = ("image/png", "text/html", "text/plain")
    return [
        [one.get("name") or next(form for form in forms if form in one.data) for one in cell.outputs] for cell in code
    ]


def printed(notebook: nbformat.NotebookNode) -> str:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return "".join(one.text for cell in cells for one in cell.outputs if one.output_type == "stream")


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "said"),
    [
        (PLAN, r"1x3: .*\n"),
        (KILLS, r" lost \(injected\)[\s\S]*\d+ units after [1-9]\d* steps[\s\S]*: (\w{16}) with kills, \1 alone"),
        pytest.param(ELASTIC, r"killed: weights (\w{16})\n.* weights \1", marks=pytest.mark.long),
        (BUDGET, r"Take \d+ spot VMs: \$40 buys [1-9]\d* to [1-9]\d* steps\n\(restarting .*: [1-9]"),
    ],
)
def test_every_cell_runs_and_has_outputs_of_the_stored_kinds(name: str, said: str) -> None:
    stored = nbformat.read(FOLDER / name, as_version=4)
    notebook = nbformat.read(FOLDER / name, as_version=4)
    top = next(cell for cell in notebook.cells if cell.cell_type == "code")
    for written, smaller in () if IS_LONG else SMALLER.get(name, {}).items():
        assert written in top.source
        top.source = top.source.replace(written, smaller)
    executed = execute(notebook)
    assert kinds(executed) == kinds(stored) or name not in WITH_OUTPUTS
    assert not [of_cell for of_cell in kinds(executed) if "stderr" in of_cell]
    assert re.search(said if not IS_LONG else said.replace("40", "150"), printed(executed)), printed(executed)


@pytest.mark.parametrize("name", WITH_OUTPUTS)
def test_it_is_kept_with_outputs_and_without_paths_of_a_machine(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert sum("image/png" in of_cell for of_cell in kinds(notebook)) >= 2
    assert len(text) < 400_000
    assert re.findall(r"""["'(\s](?:/(?:home|root|tmp|work|Users)|[A-Z]:\\\\)\w*""", text) == []
    assert notebook.metadata.kernelspec.name == "python3"


if __name__ == "__main__":
    for path in (FOLDER / name for name in WITH_OUTPUTS):
        done = execute(nbformat.read(path, as_version=4))
        done.metadata = {"kernelspec": done.metadata.kernelspec, "language_info": {"name": "python"}}
        nbformat.write(done, path)
        print(f"written: {path}")

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from manager.engine.loop.lease import Lease
from manager.host.folders import OWN_SOCKET, make_folder, remove
from morph.contract.cluster import Limits
from morph.contract.rules import CheckpointRules
from tests.engine.driver_scene import Run


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """Return a folder for sockets, as a run has one: unlike that of ``tmp_path``, its name is short enough."""
    folder = make_folder(OWN_SOCKET)
    yield folder
    remove(folder)


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(
        num_steps: int = 6,
        num_nodes: int = 2,
        limits: Limits | None = None,
        fewest: int = 1,
        checkpoints: CheckpointRules = CheckpointRules(),  # noqa: B008 (frozen)
        url: str | None = None,
        lease: Lease | None = None,
    ) -> Run:
        runs.append(Run(tmp_path, num_steps, num_nodes, limits, fewest, checkpoints, url, lease))
        return runs[-1]

    yield make
    for run in runs:
        run.provisioning.close()
        run.fleet.close()
        run.journal.close()

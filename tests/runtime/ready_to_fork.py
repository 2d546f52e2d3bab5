"""Imported once by the process from which tests fork workers, to prepare it as Morph's own process does.

Otherwise each worker would load the compiled sums again, for half a second of processor time.
"""

from __future__ import annotations

import gc
import importlib

from morph.runtime.state.fixed_point import prepare
from morph.runtime.state.optimizer_state import prepare_torch

for name in (
    "morph.runtime.workloads.job_workload",
    "torch._export",
    "torch.export._trace",
    "tests.crew",
):
    importlib.import_module(name)
prepare()
prepare_torch()
gc.collect()
gc.freeze()

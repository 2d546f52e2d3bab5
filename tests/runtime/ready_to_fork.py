"""Imported once by the process that tests fork workers from, which it makes ready as the product's own process is.

Each worker would load the compiled sums again, for half a second of processor time.
"""

from __future__ import annotations

import gc
import importlib

from morph.runtime.state.deferred_compiler import prepare_torch
from morph.runtime.state.fixed_point import prepare

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

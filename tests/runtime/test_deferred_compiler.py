"""Optimizers do without torch's compiler; whoever asks for it has it, whole. Each case is a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

TRAIN = """
import os, sys, threading, torch
from morph.jobs.files import file_of
from morph.runtime.state.deferred_compiler import defer_compiler, prepare_torch

prepare_torch()
parameter = torch.nn.Parameter(torch.ones(3))
for make in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor):
    parameter.grad = torch.ones(3)
    optimizer = make([parameter], lr=0.1)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
for name, module in sys.modules.items():  # as whoever looks for where something comes from does
    (name, module.__name__, getattr(module, "__spec__", None), getattr(module, "__file__", None), file_of(module))
assert "torch._dynamo.eval_frame" not in sys.modules


def case(use):
    if os.fork() == 0:
        code = 1
        try:
            use()
            assert "torch._dynamo.eval_frame" in sys.modules
            optimizer.zero_grad()
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
            optimizer.step()
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0, use.__name__
    print(use.__name__)


def compiled():
    optimized = torch.compile(lambda x: x.sin() + 1, backend="eager")
    assert torch.equal(optimized(torch.ones(2)), torch.ones(2).sin() + 1)


def exported():
    torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))


def submodule_and_again():
    import torch._dynamo.config as config

    assert config.recompile_limit
    real = sys.modules["torch._dynamo"]
    defer_compiler()
    assert sys.modules["torch._dynamo"] is real is torch._dynamo


def threads():
    found = []
    each = [threading.Thread(target=lambda: found.append(torch._dynamo.config.recompile_limit)) for _ in range(8)]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1


for use in (compiled, exported, submodule_and_again, threads):
    case(use)
"""


def test_the_compiler_is_loaded_by_whoever_uses_it_and_by_no_optimizer() -> None:
    found = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["compiled", "exported", "submodule_and_again", "threads"]

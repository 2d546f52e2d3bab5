"""The cause to which an error is attributed, and what the user sees of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from morph.contract.errors import CheckpointError, JobError, NonFiniteGradient
from morph.contract.messages import FailureCause
from morph.runtime.groups.interrupt import Interrupt
from morph.runtime.process.blame import cause_of, user_traceback


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "memory"),
        (MemoryError(), "memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), "memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "memory"),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), "device"),
        (RuntimeError("CUDA error: unspecified launch failure"), "device"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "device"),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), "job"),
        (KeyError("label"), "job"),
        (OSError(5, "Input/output error"), "job"),
        (JobError("is not a sample"), "job"),
        (CheckpointError("v1: the file is missing"), "checkpoint"),
        (NonFiniteGradient("step 3: the gradient of w is NaN or infinite"), "run"),
    ],
)
def test_errors_are_attributed_to_their_cause(error: Exception, cause: FailureCause) -> None:
    assert cause_of(error) == cause


def item(index: int) -> int:
    return [1, 2][index]


def test_a_traceback_begins_in_the_user_s_code_and_leaves_morph_out() -> None:
    """Morph calls the user's code, which calls Morph, which calls the user's code again."""
    with pytest.raises(IndexError) as raised:
        Interrupt(0).call(lambda: Interrupt(0).call(lambda: item(2), "inner", 10.0), "outer", 10.0)
    raised.value.__traceback__ = raised.tb.tb_next  # as if a worker had called it
    text = user_traceback(raised.value)
    assert "interrupt.py" not in text
    assert text.startswith("Traceback (most recent call last):\n")
    assert "return [1, 2][index]" in text
    assert text.endswith("IndexError: list index out of range\n")


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        looked_up = self.table(tokens)
        return looked_up.sum()


def test_a_traced_graphs_line_is_the_users_own() -> None:
    module = torch.export.export(Lookup(), (torch.tensor([1, 2]),), strict=False).module()
    graph = torch.fx.GraphModule(module, module.graph)
    with pytest.raises(IndexError) as raised:
        graph(torch.tensor([1, 9]))
    raised.value.__traceback__ = raised.tb.tb_next
    text = user_traceback(raised.value)
    assert f'File "{__file__}"' in text
    assert "looked_up = self.table(tokens)" in text
    assert "eval_with_key" not in text


def test_an_error_of_morph_s_own_has_no_traceback_of_the_user() -> None:
    with pytest.raises(JobError) as raised:
        Interrupt(0).call(lambda: (_ for _ in ()).throw(JobError("no")), "it", 10.0)
    raised.value.__traceback__ = None
    assert user_traceback(raised.value) == ""

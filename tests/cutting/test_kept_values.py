"""How values, data and graphs of a kept cut are written and read, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from morph.cutting.cache.artefact import CannotKeep, read_value, write_value
from morph.cutting.deferred_init.tape import TensorRef


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(1 << 70),
        0.1,
        -0.0,
        float("inf"),
        "text",
        [1, [2.5]],
        (1, (None,)),
        {"a": (1,)},
        1 + 2j,
        torch.float16,
        torch.channels_last,
        torch.strided,
        torch.device("cpu"),
        TensorRef(3, torch.bfloat16, (2, 3), (3, 1), 0),
    ],
    ids=repr,
)
def test_a_value_is_read_as_it_was(value: Any) -> None:
    found = read_value(json.loads(json.dumps(write_value(value))))
    assert (found, repr(found)) == (value, repr(value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_data_is_read_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    found = read_value(json.loads(json.dumps(write_value(tensor))))
    assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert torch.equal(found, tensor)


@pytest.mark.parametrize(
    "value", [object(), b"", len, nn.Linear, slice(1), Tensor, torch.zeros(4, 4).t(), torch.Size([1])]
)
def test_values_without_a_serialised_form_are_not_cached(value: Any) -> None:
    with pytest.raises(CannotKeep):
        write_value([value])


@pytest.mark.parametrize("form", [{"module": "os"}, {"dtype": "load"}, {"dtype": "strided"}, {"layout": "float32"}])
def test_a_form_that_names_something_else_is_refused(form: Any) -> None:
    with pytest.raises(ValueError, match="is no"):
        read_value(form)


@pytest.mark.parametrize("op", ["call_module", "call_method", "get_attr"])
def test_a_graph_calls_operations_alone(op: str) -> None:
    with pytest.raises(ValueError, match=op):
        read_value({"graph": [[op, "x", "eval", {"tuple": []}, {"dict": []}, {}]]})


@pytest.mark.parametrize("target", ["eval", "a.b", 'x"), print("'])
def test_a_graph_within_a_graph_has_a_plain_name(target: str) -> None:
    with pytest.raises(ValueError, match="get_attr"):
        read_value({"graph": [["get_attr", "x", target, {"tuple": []}, {"dict": []}, []]]})

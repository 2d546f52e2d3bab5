"""The two passes over fixed-point sums on a processor, compiled by numba: one pass each, where torch takes five.

They are called by addresses, because numba's own call takes as long as adding 10,000 numbers.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
import numpy as np
import torch
from numba import carray, types  # type: ignore[attr-defined] # numba ships no types
from numba.core.registry import cpu_target

from morph.user_cache import cache_folder, keep_as_it_is

# Where numba keeps what it compiles of Morph's loops: once for a user, wherever the code lies.
#
# Numba keeps it beside the file that has a function, and looks for it by that file's path. On each VM that file has
# another one, which goes with the VM's node: every node on a host, and every start of it, compiled the same anew.


_FOLDER = "loops"


def kept_for_user(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as if its file lay in this user's cache; itself where nothing can be kept there.

    The file is a copy by a name that stands for its content, numba's version and the processor: what was compiled of
    other code, or for another processor on shared storage, is not found.
    """
    assert isinstance(loop, FunctionType)
    try:
        source = Path(loop.__code__.co_filename).read_bytes()
    except OSError:  # it lies in an archive
        return loop
    about = f"{numba.__version__} {cpu_target.target_context.codegen().magic_tuple()}\n".encode()
    name = f"loops_{hashlib.sha256(about + source).hexdigest()}.py"
    copy = keep_as_it_is(cache_folder() / _FOLDER, name, source)
    if copy is None:
        return loop
    return FunctionType(loop.__code__.replace(co_filename=str(copy)), loop.__globals__, loop.__name__)


def _add(total: Any, values: Any, bits: Any, num: Any, scale: Any, largest: Any, is_first: Any) -> None:
    """Without its sign bit, a float's bits are ordered as its magnitude: infinity, then NaN last.

    ``bits`` are those of ``values``.
    """
    sums, found, unsigned = carray(total, num), carray(values, num), carray(bits, num)
    is_wide = unsigned.itemsize == 8
    no_sign = unsigned.dtype.type(2**63 - 1 if is_wide else 2**31 - 1)
    most = unsigned.dtype.type(0)
    if is_first:
        sums[:] = 0
    for i in range(num):
        sums[i] += np.int64(np.rint(np.float64(found[i]) * scale))
        most = max(most, unsigned[i] & no_sign)
    magnitude = np.uint64(most).view(np.float64) if is_wide else np.float64(np.uint32(most).view(np.float32))
    if magnitude > largest[0] or np.isnan(magnitude):
        largest[0] = magnitude


def _mean(totals: Any, members: Any, num: Any, stride: Any, scale: Any, into: Any) -> None:
    """Add up rows that lie ``stride`` numbers apart."""
    means = carray(into, num)
    for i in range(num):
        total = totals[i]
        for member in range(1, members):
            total += totals[member * stride + i]
        means[i] = np.float64(total) * scale


_TYPES = {torch.float32: (types.float32, types.uint32), torch.float64: (types.float64, types.uint64)}


def _pointer(to: Any) -> Any:
    return types.CPointer(to)  # type: ignore[no-untyped-call] # numba ships no types


_SUMS, _LARGEST = _pointer(types.int64), _pointer(types.float64)
_AT, _NUM = ctypes.c_void_p, ctypes.c_ssize_t


@cache
def adding(dtype: torch.dtype) -> Callable[..., None]:
    """Return ``_add`` for gradients of this type, compiled once for each user; their address is given twice."""
    values, bits = map(_pointer, _TYPES[dtype])
    signature = types.void(_SUMS, values, bits, types.intp, types.float64, _LARGEST, types.boolean)
    call = ctypes.CFUNCTYPE(None, _AT, _AT, _AT, _NUM, ctypes.c_double, _AT, ctypes.c_bool)
    return _kept_call(_add, signature, call)


@cache
def averaging(dtype: torch.dtype) -> Callable[..., None]:
    """Return ``_mean`` into this type, likewise."""
    signature = types.void(_SUMS, *(types.intp,) * 3, types.float64, _pointer(_TYPES[dtype][0]))
    return _kept_call(_mean, signature, ctypes.CFUNCTYPE(None, _AT, *(_NUM,) * 3, ctypes.c_double, _AT))


_COMPILED: list[Any] = []
"""Their code lasts as long as these."""


def _kept_call(loop: Callable[..., None], signature: Any, call: Any) -> Callable[..., None]:
    compiled = numba.cfunc(signature, cache=True)(kept_for_user(loop))
    _COMPILED.append(compiled)
    found: Callable[..., None] = call(compiled.address)
    return found

"""Two loops over fixed-point sums on the CPU, compiled by LLVM: each takes one pass where torch takes five.

Each process that sums compiles the loops from the text below. With the import of llvmlite this takes 0.1 s of processor
time, a third of the time to load the same loops from numba's cache, and there is no cached file that could be damaged.
The loops are called by address, because a call through numba takes as long as adding 10,000 numbers.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import torch

_TEXT = """
declare double @llvm.rint.f64(double)
declare {bits} @llvm.umax.{bits}({bits}, {bits})

define void @add(ptr noalias %sums, ptr noalias readonly %values, i64 %num, double %scale, ptr noalias %largest,
                 i1 zeroext %is_first) {{
begin:
  %is_empty = icmp eq i64 %num, 0
  br i1 %is_empty, label %end, label %each
each:
  %i = phi i64 [0, %begin], [%next, %each]
  %most = phi {bits} [0, %begin], [%larger, %each]
  %from = getelementptr {real}, ptr %values, i64 %i
  %value = load {real}, ptr %from
  {widen_value}
  %scaled = fmul double %{wide_value}, %scale
  %rounded = call double @llvm.rint.f64(double %scaled)
  %whole = fptosi double %rounded to i64
  %to = getelementptr i64, ptr %sums, i64 %i
  %held = load i64, ptr %to
  %before = select i1 %is_first, i64 0, i64 %held
  %sum = add i64 %before, %whole
  store i64 %sum, ptr %to
  %as_bits = bitcast {real} %value to {bits}
  %magnitude = and {bits} %as_bits, {no_sign}
  %larger = call {bits} @llvm.umax.{bits}({bits} %most, {bits} %magnitude)
  %next = add i64 %i, 1
  %is_more = icmp ult i64 %next, %num
  br i1 %is_more, label %each, label %end
end:
  %found_bits = phi {bits} [0, %begin], [%larger, %each]
  %found = bitcast {bits} %found_bits to {real}
  {widen_found}
  %known = load double, ptr %largest
  %is_larger = fcmp ogt double %{wide_found}, %known
  %is_nan = fcmp uno double %{wide_found}, %{wide_found}
  %is_new = or i1 %is_larger, %is_nan
  %kept = select i1 %is_new, double %{wide_found}, double %known
  store double %kept, ptr %largest
  ret void
}}

define void @mean(ptr noalias readonly %sums, i64 %rows, i64 %num, i64 %stride, double %scale, ptr noalias %means) {{
begin:
  %is_empty = icmp eq i64 %num, 0
  br i1 %is_empty, label %end, label %each
each:
  %i = phi i64 [0, %begin], [%next, %turned]
  %first = getelementptr i64, ptr %sums, i64 %i
  %own = load i64, ptr %first
  %is_alone = icmp ult i64 %rows, 2
  br i1 %is_alone, label %turned, label %down
down:
  %row = phi i64 [1, %each], [%next_row, %down]
  %above = phi i64 [%own, %each], [%joined, %down]
  %offset = mul i64 %row, %stride
  %from = getelementptr i64, ptr %first, i64 %offset
  %held = load i64, ptr %from
  %joined = add i64 %above, %held
  %next_row = add i64 %row, 1
  %is_more_rows = icmp ult i64 %next_row, %rows
  br i1 %is_more_rows, label %down, label %turned
turned:
  %total = phi i64 [%own, %each], [%joined, %down]
  %wide = sitofp i64 %total to double
  %scaled = fmul double %wide, %scale
  {narrow}
  %to = getelementptr {real}, ptr %means, i64 %i
  store {real} %{mean}, ptr %to
  %next = add i64 %i, 1
  %is_more = icmp ult i64 %next, %num
  br i1 %is_more, label %each, label %end
end:
  ret void
}}
"""
_WORDS = {
    torch.float32: {
        **{"real": "float", "bits": "i32", "no_sign": 2**31 - 1},
        **{"widen_value": "%wide = fpext float %value to double", "wide_value": "wide"},
        **{"widen_found": "%wide_found = fpext float %found to double", "wide_found": "wide_found"},
        **{"narrow": "%narrow = fptrunc double %scaled to float", "mean": "narrow"},
    },
    torch.float64: {
        **{"real": "double", "bits": "i64", "no_sign": 2**63 - 1},
        **{"widen_value": "", "wide_value": "value", "widen_found": "", "wide_found": "found"},
        **{"narrow": "", "mean": "scaled"},
    },
}
_AT, _NUM = ctypes.c_void_p, ctypes.c_ssize_t
_ADD = ctypes.CFUNCTYPE(None, _AT, _AT, _NUM, ctypes.c_double, _AT, ctypes.c_bool)
_MEAN = ctypes.CFUNCTYPE(None, _AT, *(_NUM,) * 3, ctypes.c_double, _AT)
_COMPILED: list[Any] = []
"""The engines that own the compiled code."""
_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class Loops:
    """Both loops for one type: ``add`` and ``mean``; they take addresses of arrays, and their sizes.

    ``add`` compares magnitudes as integers: without the sign bit, the bits of floats sort by magnitude, with infinity
    and then NaN as the largest.
    """

    add: Callable[..., None]
    mean: Callable[..., None]


def compile_loops(dtype: torch.dtype) -> Loops:
    """Compile both loops for float32 or float64. Raises RuntimeError if LLVM does not know this processor."""
    with _LOCK:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple()
        processor = {"cpu": llvm.get_host_cpu_name(), "features": llvm.get_host_cpu_features().flatten()}
        machine = target.create_target_machine(opt=3, **processor)
        module = llvm.parse_assembly(_TEXT.format(**_WORDS[dtype]), llvm.create_context())
        module.triple, module.data_layout = target.triple, str(machine.target_data)
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        options.loop_vectorization = True
        passes = llvm.create_pass_builder(machine, options)
        passes.getModulePassManager().run(module, passes)
        engine = llvm.create_mcjit_compiler(module, machine)
        engine.finalize_object()
        _COMPILED.append(engine)
        return Loops(_ADD(engine.get_function_address("add")), _MEAN(engine.get_function_address("mean")))

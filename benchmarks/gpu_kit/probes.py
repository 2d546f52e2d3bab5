"""Suspicions about the device path, each with the smallest thing that shows it.

    python -m benchmarks.gpu_kit.probes cuda|cpu [NAME..]

Each runs in a process of its own, so that one that breaks its context breaks no other. A line says `as hoped`,
`SUSPICION HOLDS`, or gives numbers.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

DEVICE = sys.argv[1]
CUDA = DEVICE == "cuda"
NAMED: dict[str, Callable[[], None]] = {}


def probe(work: Callable[[], None]) -> Callable[[], None]:
    NAMED[work.__name__] = work
    return work


def say(what: str) -> None:
    print(what, flush=True)


def timed(work: Callable[[], object], runs: int) -> float:
    """Microseconds of the host for one call, launches only."""
    import torch

    for _ in range(3):
        work()
    if CUDA:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(runs):
        work()
    took = time.perf_counter() - begun
    if CUDA:
        torch.cuda.synchronize()
    return took / runs * 1e6


@probe
def fork() -> None:
    """A job file that asks torch.cuda.is_available() spoils the process that workers are forked from."""
    import torch

    torch.cuda.is_available()
    pid = os.fork()
    if pid == 0:
        try:
            torch.zeros(1, device=DEVICE)
            say("fork: as hoped, a fork of a process that asked is_available() can use the device")
        except Exception as error:
            say(
                f"fork: SUSPICION HOLDS (initialized in the parent: {torch.cuda.is_initialized()}): "
                f"{type(error).__name__}: {str(error)[:110]}"
            )
        os._exit(0)
    os.waitpid(pid, 0)


@probe
def bits() -> None:
    """Exact sums of odd values: the device's kernel against the processor's loop; NaN and infinity; 2**31 elements."""
    import torch

    from morph.runtime.state.fixed_point import _fused, add_fixed, fixed_sum, from_fixed

    fused = _fused(torch.device(DEVICE, 0)) if CUDA else None
    say(f"bits: one kernel of Triton: {fused is not None}")
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        values = torch.cat(
            [
                torch.randn(5000, generator=generator, dtype=torch.float64),
                torch.randn(5000, generator=generator, dtype=torch.float64).exp() * 1e-4,
                (torch.arange(-500, 500, dtype=torch.float64) + 0.5) / 1024,
                torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e-45, 6e-8, 2.0**-24, -(2.0**-25)], dtype=torch.float64),
            ]
        ).to(dtype)
        for exponent in (10, 23, 24, 40, 52, 58, -3):
            found = []
            for device in ("cpu", DEVICE):
                total, largest = (
                    torch.zeros(len(values), dtype=torch.int64, device=device),
                    torch.zeros(1, dtype=torch.float64, device=device),
                )
                for _ in range(3):
                    add_fixed([fixed_sum(total, largest, exponent)], [values.to(device)], [False])
                mean = torch.empty(len(values), device=device)
                from_fixed([torch.stack([total, total])], [exponent], 24, [mean])
                found.append((total.cpu(), largest.cpu(), mean.cpu()))
            same = [torch.equal(a, b) for a, b in zip(*found, strict=True)]
            if not all(same):
                say(f"bits: SUSPICION HOLDS for {dtype} at {exponent}: sums, largest, means equal: {same}")
    for bad in (float("nan"), -float("nan"), float("inf"), -float("inf")):
        largest = torch.zeros(1, dtype=torch.float64, device=DEVICE)
        values = torch.ones(5000, device=DEVICE)
        values[4321] = bad
        if bad != bad:  # with its sign bit set too
            values.view(torch.int32)[1234] = -1
        total = torch.zeros(5000, dtype=torch.int64, device=DEVICE)
        add_fixed([fixed_sum(total, largest, 10)], [values], [False])
        told = largest.item()
        say(
            f"bits: {bad}: largest {told} ({'as hoped' if told != told or told == float('inf') else 'SUSPICION HOLDS'})"
        )
    if CUDA:
        num = 2**31 + 4099
        values, total = (
            torch.ones(num, dtype=torch.bfloat16, device=DEVICE),
            torch.zeros(num, dtype=torch.int64, device=DEVICE),
        )
        values[-1] = 3.0
        largest = torch.zeros(1, dtype=torch.float64, device=DEVICE)
        add_fixed([fixed_sum(total, largest, 4)], [values], [False])
        ok = (
            int(total[-1]) == 48
            and int(total[2**31 - 1]) == 16
            and int(total[2**31 + 7]) == 16
            and largest.item() == 3.0
            and bool((total[:-1] == 16).all())
        )
        say(f"bits: 2**31 + 4099 elements: {'as hoped' if ok else 'SUSPICION HOLDS'}")


@probe
def alignment() -> None:
    """Weights that a worker receives lie at multiples of 64 bytes, its own of 512: cuBLASLt is told the alignment."""
    import torch

    if not CUDA:
        say("alignment: needs a device")
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    other, tried = [], 0
    for dtype in (torch.bfloat16, torch.float32):
        for m, k, n in (
            (512, 512, 2048),
            (4096, 1024, 4096),
            (4096, 4096, 1024),
            (2048, 1920, 7680),
            (256, 128, 512),
            (1024, 1024, 3072),
            (64, 1000, 1000),
        ):
            x, weight, bias = (torch.randn(s, device=DEVICE, dtype=dtype) for s in ((m, k), (k, n), (n,)))
            flat = torch.empty(k * n * dtype.itemsize + 1024, dtype=torch.uint8, device=DEVICE)
            for offset in (64, 128, 192):
                moved = flat[offset : offset + k * n * dtype.itemsize].view(dtype).view(k, n)
                moved.copy_(weight)
                small = torch.empty(n * dtype.itemsize + 64, dtype=torch.uint8, device=DEVICE)[
                    64 : 64 + n * dtype.itemsize
                ].view(dtype)
                small.copy_(bias)
                g = torch.randn(m, n, device=DEVICE, dtype=dtype)
                pairs = {
                    "mm": (x @ weight, x @ moved),
                    "addmm": (torch.addmm(bias, x, weight), torch.addmm(small, x, moved)),
                    "linear": (torch.nn.functional.linear(g, weight), torch.nn.functional.linear(g, moved)),
                }
                for name, (a, b) in pairs.items():
                    tried += 1
                    if not torch.equal(a, b):
                        other.append((name, str(dtype)[6:], m, k, n, offset))
    say(f"alignment: {'SUSPICION HOLDS: ' + str(other[:6]) if other else 'as hoped'} ({len(other)} of {tried})")


@probe
def repeated() -> None:
    """A section's forward and backward, run again with its seed, beside other work and in another process's company."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from morph.cutting.cache.cut_job import load_and_cut
    from morph.data import MicroBatchLoader
    from morph.runtime.device.staging import placed
    from morph.runtime.step.kernels import kernels_for, kernels_now, set_kernels
    from morph.runtime.step.section_run import run_section, section_backward
    from morph.runtime.step.stage import seed_section

    path = f"{Path(__file__).resolve().parent}/jobs.py:{'bits' if CUDA else 'tiny'}"
    loaded = load_and_cut(path, num_sections=None, micro_batch_size=4)
    job, model, device = loaded.job, loaded.model, torch.device(DEVICE)
    set_kernels(kernels_for("exact", kernels_now()))
    loader = MicroBatchLoader(job.dataset(), job.seed, job.batch_size, 4)
    parameters = {
        name: loaded.initial[name].to(device).requires_grad_(True) for unit in model.units for name in unit.parameters
    }

    def once(noise: bool) -> list[torch.Tensor]:
        if noise and CUDA:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(30):
                    torch.randn(2048, 2048, device=device, dtype=torch.bfloat16) @ torch.ones(
                        2048, 2048, device=device, dtype=torch.bfloat16
                    )
        made: list[torch.Tensor] = []
        values: tuple[torch.Tensor, ...] = ()
        runs = []
        for section in model.sections:
            batch = placed(loader.load(0, 0, section.batch_keys), device) if section.batch_keys else {}
            seed_section(7, 0, 0, section.index)
            runs.append(run_section(section, values, batch, parameters, job.precision))
            values = tuple(one.detach() for one in runs[-1].outputs)
        gradients = (torch.ones_like(values[0]), *(None for _ in values[1:]))
        for section, done in zip(reversed(model.sections), reversed(runs), strict=True):
            gradients = section_backward(
                section, done, gradients, parameters, lambda _, gradient: made.append(gradient.clone())
            )
        return [*values, *made]

    first = once(False)
    same = [
        all(torch.equal(a, b) for a, b in zip(first, once(noise), strict=True))
        for noise in (False, True, True, False, True)
    ]
    say(f"repeated: {'as hoped' if all(same) else 'SUSPICION HOLDS'} {same}")


@probe
def host_times() -> None:
    """What the training thread spends a call, in microseconds."""
    import torch

    from morph.runtime.device.task_clock import clock_of
    from morph.runtime.state import fixed_point
    from morph.runtime.state.unit_state import squared_norm
    from morph.runtime.step.stage import seed_section

    device = torch.device(DEVICE, 0) if CUDA else torch.device("cpu")
    torch.zeros(1, device=device)
    values, total, largest = (
        torch.randn(1024, device=device),
        torch.zeros(1024, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.float64, device=device),
    )
    sums, clock = fixed_point.fixed_sum(total, largest, 20), clock_of(device)
    twelve = [fixed_point.fixed_sum(total.clone(), largest.clone(), 20) for _ in range(12)]
    x = torch.randn(8, 8, device=device, requires_grad=True)
    say(
        f"host_times: add_fixed {timed(lambda: fixed_point.add_fixed([sums], [values], [False]), 500):.0f} us"
        f", of twelve tensors {timed(lambda: fixed_point.add_fixed(twelve, [values] * 12, [False] * 12), 500):.0f}"
        f", by torch's kernels {timed(lambda: fixed_point._add_by_torch(sums, values), 200):.0f}"
        f", an in-place addition {timed(lambda: values.add_(1.0), 500):.0f}"
        f", seed_section {timed(lambda: seed_section(1, 2, 3, 4), 500):.0f}, a mark of the clock "
        f"{timed(clock.mark, 500):.0f}"
        f", autograd.grad of one operation {timed(lambda: torch.autograd.grad((x * 2).sum(), x), 300):.0f}"
        f", ops.aten.mul.Tensor {timed(lambda: torch.ops.aten.mul.Tensor(values, values), 500):.0f}, torch.mul "
        f"{timed(lambda: torch.mul(values, values), 500):.0f}"
    )
    sizes = [(1024, 4096), (4096, 1024), (1024, 3072), (1024, 1024), *[(1024,)] * 6, (4096,), (3072,)] * (
        24 if CUDA else 1
    ) + [(50257 if CUDA else 500, 1024)]
    many = [torch.randn(size, device=device) for size in sizes]
    begun = time.perf_counter()
    squared_norm(many)
    first = time.perf_counter() - begun
    begun = time.perf_counter()
    squared_norm(many)
    again = time.perf_counter() - begun
    begun = time.perf_counter()
    sum((one.double().square().sum() for one in many), torch.zeros((), dtype=torch.float64, device=device)).item()
    say(
        f"host_times: squared_norm of {sum(one.numel() for one in many) / 1e6:.0f} M parameters {again * 1e3:.0f} "
        f"ms (first {first * 1e3:.0f}); torch's sums {(time.perf_counter() - begun) * 1e3:.0f} ms"
    )


def resident_kib() -> int:
    """Memory of this process that is in use."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@probe
def pinning() -> None:
    """Pinned memory: what asking for it costs, what it is rounded to, and whether it waits for a kernel; so for "
    "others."""
    import torch

    if not CUDA:
        say("pinning: needs a device")
        return
    torch.cuda.init()
    for num_bytes in (1 << 30, (1 << 30) + 4096):
        before = resident_kib()
        begun = time.perf_counter()
        kept = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        took = time.perf_counter() - begun
        after = resident_kib()
        say(f"pinning: {num_bytes >> 20} MiB took {took:.2f} s and {(after - before) >> 10} MiB of memory")
        del kept
    stats = getattr(torch.cuda, "host_memory_stats", None)
    if stats is not None:
        say(
            f"pinning: { ({k: v for k, v in stats().items() if 'allocated_bytes.peak' in k or 'num_host_alloc' in k}) }"
        )
    one = torch.empty(1 << 20, device=DEVICE)
    for name, work in (
        ("pinned memory", lambda: torch.empty(12345678, dtype=torch.uint8, pin_memory=True)),
        ("device memory", lambda: torch.empty(345678901, dtype=torch.uint8, device=DEVICE)),
        ("a kernel not used before", lambda: one.erfinv_()),
        ("a kernel of cuBLAS", lambda: one.view(1024, 1024) @ one.view(1024, 1024)),
        ("an event", lambda: torch.cuda.Event(blocking=True).record()),
    ):
        torch.cuda.synchronize()
        torch.cuda._sleep(1 << 30)
        begun = time.perf_counter()
        work()
        took = time.perf_counter() - begun
        running = not torch.cuda.current_stream().query()
        say(
            f"pinning: {name}, requested under a kernel: {took * 1e3:.1f} ms ("
            f"{'as hoped' if running else 'SUSPICION HOLDS: it waited for the kernel'})"
        )
    torch.cuda.synchronize()


@probe
def reduction_waits() -> None:
    """One piece of a reduction on the device: exchange, wait of the host, means, gather (world of one)."""
    import torch
    from torch._C._distributed_c10d import HashStore

    if not CUDA:
        say("reduction_waits: needs a device")
        return
    from morph.runtime.device.nccl import library_for
    from morph.runtime.device.rings import CommunicatorSet
    from morph.runtime.groups.channels import GroupSpec
    from morph.runtime.groups.interrupt import Interrupt
    from morph.runtime.state.accumulators import ExactAccumulator
    from morph.runtime.state.parts import Memory
    from morph.runtime.state.reduction import Reduction

    device = torch.device(DEVICE, 0)
    found = library_for("auto", device)
    assert found is not None, "NCCL is not there"
    library, stream = found
    interrupt, store = Interrupt(1), HashStore()
    rings = CommunicatorSet([GroupSpec("alone", ("a",))], "a", library, stream, interrupt, lambda: store)
    ring = rings.ring("alone")
    num = 100_000_000
    took = []
    for _ in range(5):
        sums = ExactAccumulator({"w": torch.zeros(1, device=device).expand(num)}, {"w": 20}, 8, memory=Memory(device))
        sums.add("w", torch.ones(num, device=device))
        torch.cuda.synchronize()
        begun = time.perf_counter()
        reduction = Reduction(interrupt, 8)
        reduction.put(sums, ring)
        reduction.finish()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - begun)
        del sums
    best = statistics.median(took[1:])
    say(
        f"reduction_waits: 100 M parameters in {-(-num * 8 // (16 << 20))} pieces: {best * 1e3:.0f} ms, "
        f"{best / -(-num * 8 // (16 << 20)) * 1e6:.0f} us a piece (bytes alone: about {num * 40 / 3e12 * 1e3:.0f} "
        f"ms)"
    )
    interrupt.abort()
    rings.close()


@probe
def ipc_room() -> None:
    """What 32 MiB of a mailbox keep others from, and whether torch exports with expandable segments."""
    if not CUDA:
        say("ipc_room: needs a device")
        return
    code = (
        "import torch; from morph.runtime.device.devices import CudaDevice as C; "
        "m, h = C(torch.device('cuda')).shared(32 << 20); print(len(h), 'bytes of handle')"
    )
    for setting in ("", "expandable_segments:True"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting},
        )
        say(f"ipc_room: {setting or 'default'}: {done.stdout.strip() or done.stderr.strip().splitlines()[-1][:150]}")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2] in NAMED:
        NAMED[sys.argv[2]]()
        sys.exit(0)
    for name in sys.argv[2:] or NAMED:
        begun = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.gpu_kit.probes", DEVICE, name],
                capture_output=True,
                text=True,
                timeout=60 if CUDA else 200,
            )
            print(done.stdout.strip(), flush=True)
            if done.returncode:
                print(
                    f"{name}: rc {done.returncode}: {' | '.join(done.stderr.strip().splitlines()[-3:])[:400]}",
                    flush=True,
                )
        except subprocess.TimeoutExpired:
            print(f"{name}: TIMED OUT", flush=True)
        print(f"  ({name} took {time.perf_counter() - begun:.0f} s)", flush=True)

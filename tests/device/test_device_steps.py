"""The calls to the device in docs/how-it-works/gpu.md, counted again in a process with an additional device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked_modules import run_python

ROOT = Path(__file__).resolve().parents[2]
DOCS = (ROOT / "docs/how-it-works/gpu.md").read_text().splitlines()
TIMEOUT_S = 280
AGAIN = "what a step asks has changed: python -m tests.device.step_counts --write docs/how-it-works/gpu.md"


def said(*arguments: str) -> str:
    code, output, errors = run_python(*arguments, timeout=TIMEOUT_S)
    assert code == 0, errors[-4000:]
    return output


def documented(*names: str) -> None:
    """Assert that what is counted for some jobs is what the docs say."""
    counted = said("-m", "tests.device.step_counts", *(word for name in names for word in ("--job", name)))
    jobs, sites = counted.strip().split("\n\n")
    for row in jobs.splitlines():
        assert row in DOCS, f"{AGAIN}\n{row}"
    places = {tuple(row.split("|")[1:3]): row.split("|")[3] for row in DOCS if row.count("|") == 4}
    for row in sites.splitlines():
        what, where, named = row.split("|")[1:4]
        assert (what, where) in places, f"{AGAIN}\n{row}"
        assert set(named.strip().split(", ")) <= set(places[what, where].strip().split(", ")), f"{AGAIN}\n{row}"


@pytest.mark.slow
def test_what_a_small_jobs_step_asks_of_its_device_is_documented() -> None:
    documented("tiny_gpt", "four layers, bf16, clipped", "batch norm, fp16", "four layers, fast sums")


@pytest.mark.slow
@pytest.mark.long
def test_what_a_larger_jobs_step_asks_of_its_device_is_documented() -> None:
    documented("gpt2_stdlib")


_CHECKS = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tests.device.step_counts import Counting, Numbers, ShapeDevice

device = ShapeDevice()
counting = Counting(device.kind, device.pinned_tensors)
with FakeTensorMode(), counting, Numbers(counting):
    there, here = torch.zeros(4, device=device.kind), torch.zeros(4)
    try:
        there + here
    except RuntimeError as error:
        print("refused:", "two devices" in str(error))
    float(there[0]); bool((there > 0).any()); there.tolist()  # three syncs
    float(here[0]); here.tolist()  # none
    there.cpu(); there.copy_(here); there.copy_(device.pinned((4,), torch.float32), non_blocking=True)
    there.to(torch.float64); there.clone()  # no copies between devices
for site, number in sorted(item for item in counting.counts.sites.items() if item[0].kind != "operation"):
    print(site.kind, site.pinned, number, counting.counts.site_bytes[site])

from morph.runtime.state.unit_state import squared_norms

vectors, wide = [(1024,)] * 6, 4 * 1024
block = [(1024, 3072), (3072,), (1024, 1024), *vectors, (1024, wide), (wide,), (wide, 1024)]
gpt2_355m = {"first": [(50257, 1024), (1024, 1024)], **{str(index): block for index in range(24)}, "last": vectors[:2]}
for shapes in ({"": [(1 << 20,)]}, gpt2_355m):
    counting = Counting(device.kind, device.pinned_tensors)
    with FakeTensorMode(), Numbers(counting):
        made = {unit: [torch.empty(shape, device=device.kind) for shape in some] for unit, some in shapes.items()}
        with counting:
            squared_norms(made)
    print(sum(number for site, number in counting.counts.sites.items() if site.kind == "operation"))
"""


@pytest.mark.slow
def test_syncs_and_copies_of_a_device_are_counted_and_mixed_devices_refused() -> None:
    *counted, chunk, norms = said("-c", _CHECKS).splitlines()
    assert counted == [
        "refused: True",
        "sync False 3 21",
        "to device False 1 16",
        "to device True 1 16",
        "to host False 1 16",
    ]
    assert f"take {norms} operations; one such chunk alone takes {chunk}." in "\n".join(DOCS)

"""Mistakes in options, cluster files and traces, each refused in one line; nothing is started or written."""

from __future__ import annotations

import pytest

from tests.cli.given import Given

HEADER = "time_s,event,node_id\n"


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--steps", "0", "--steps: Input should be greater than or equal to 1 (got '0')"),
        ("--steps", "nan", "--steps: Input should be a valid integer"),
        ("--trace-speed", "0", "--trace-speed: Input should be greater than or equal to 0.001 (got '0')"),
        ("--trace-speed", "nan", "--trace-speed: Input should be greater than or equal to 0.001 (got 'nan')"),
        (
            "--steps",
            str(10**20),
            f"--steps: is out of range (got {10**20}); allowed: a whole number from 1 to 2147483648",
        ),
        ("--price", "inf", "--price: is out of range (got inf); allowed: a number from 0 to 1000000"),
        ("--on-demand-price", "1e300", "--on-demand-price: is out of range (got 1e+300); allowed: a number from 0 to"),
        (
            "--trace-speed",
            "inf",
            "--trace-speed: is out of range (got inf); allowed: a number from 0.001 to 1000000000",
        ),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(given: Given, option: str, value: str, problem: str) -> None:
    assert problem in given.run_refused(option, value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("vms: {gpus: 3}", "vms.gpus: unknown key (got 3); allowed: the keys kind, launcher, num_vms, memory_bytes, d"),
        (
            "vms: {num_vms: two}",
            "vms.num_vms: Input should be a valid integer (got 'two'); allowed: an integer at least 1",
        ),
        ("policy: {checkpoint_every_steps: 1.5}", "policy.checkpoint_every_steps: Input should be a valid integer"),
    ],
)
def test_a_wrong_cluster_file_is_refused(given: Given, text: str, problem: str) -> None:
    path = given.file("cluster.yaml", text)
    assert f"{path}: {problem}" in given.run_refused()


def test_a_number_of_vms_to_keep_and_a_trace_exclude_one_another(given: Given) -> None:
    path = given.file("cluster.yaml", "vms: {keep: 2}")
    told = given.run_refused("--trace", given.file("trace.csv", HEADER + "0,add,x\n"))
    assert told == (
        f"{path}: vms.keep: a trace decides itself which VMs come and go (got 2); "
        "allowed: vms.keep or --trace, not both"
    )


def test_a_device_that_this_machine_lacks_is_refused(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = given.file("cluster.yaml", "vms: {device: cuda}")
    assert given.run_refused() == f"{path}: vms.device: this machine has no such device (got 'cuda'); allowed: cpu"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a,b\n0,add,x\n", ", line 1: wrong header (got 'a,b'); allowed: time_s,event,node_id,zone"),
        (HEADER + "zero,add,x\n", ", line 2: time_s: Input should be a valid number"),
        (HEADER + "nan,add,x\n", ", line 2: time_s: Input should be a finite number (got 'nan')"),
        (HEADER + "0,add,x\n1,explode,x\n", ", line 3: event: is not a kind of event (got 'explode')"),
        (HEADER + "0,add,x\n1,remove,y\n", ", line 3: node_id: node is not there (got 'y')"),
        (HEADER + "0,add,x\n0,add,x\n", ", line 3: node_id: node is already there (got 'x')"),
        (HEADER + "5,add,x\n4,add,y\n", ", line 3: time_s: time steps back (got 4.0); allowed: at least 5.0"),
        (HEADER + "0,add\n", ", line 2: wrong number of columns; allowed: 3 columns"),
        (HEADER, ": holds no events"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(given: Given, text: str, problem: str) -> None:
    path = given.file("trace.csv", text)
    assert f"{path}{problem}" in given.run_refused("--trace", path)

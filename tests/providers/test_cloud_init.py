from __future__ import annotations

import argparse
import base64
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from manager.providers.azure.spec import planned
from manager.providers.boot import first_boot
from manager.providers.boot.cloud_init import (
    AUTHORITY_PATH,
    BOOT_PATH,
    MAX_CUSTOM_DATA_BYTES,
    MAX_USER_DATA_BYTES,
    SECRET_PATH,
    STAY_PATH,
    TLS_DIRECTORY,
    TOKEN_PATH,
    NodeStart,
    cloud_init,
    custom_data,
    ray_command,
    user_data,
)
from manager.providers.boot.first_boot import packed, program
from manager.providers.boot.own_wheel import requirements
from manager.providers.hosts.static_node import secret_of, static_node
from manager.providers.interface.provider import Misconfigured
from tests.providers.azure_world import NODE_SECRET, RAY_TOKEN, SPEC, START
from tests.waiting import BOUND_S


def written(start: NodeStart = START) -> dict[str, dict[str, str]]:
    config = yaml.safe_load(cloud_init(start, "tiny-1-0", "azure"))
    return {entry["path"]: entry for entry in config["write_files"]}


def test_a_first_boot_runs_the_users_lines_then_morph_then_the_node() -> None:
    text = cloud_init(START, "tiny-1-0", "azure")
    assert text.startswith("#cloud-config\n")
    config = yaml.safe_load(text)
    assert list(config) == ["bootcmd", "write_files", "runcmd"]
    ((_, _, line),) = config["runcmd"]
    setup, program, reload, started = line.split(" && ")
    assert f"{setup} {program}".count(f'p=/usr/bin/python3; [ -x "$p" ] || p=python3; "$p" -I {BOOT_PATH} ') == 2
    assert (reload, started) == (
        "systemctl daemon-reload",
        "systemctl enable --now morph-agent.service morph-node.service",
    )
    assert shlex.split(setup.removesuffix("; }"))[-2:] == ["--", "mount /data"]
    assert "--only=setup" in setup
    assert {f"--sha256={'5c' * 32}", "--python-version=3.12.3", "--end=azure"} <= set(shlex.split(program))
    assert shlex.split(program.removesuffix("; }"))[-3:] == ["--", "ray==2.60.0", "numpy>=1.26"]


def test_a_watchdog_comes_first_at_each_boot_and_needs_no_disk(tmp_path: Path) -> None:
    """The lines of cloud-init's ``bootcmd`` are run here, with another folder in place of the one in memory."""
    (text,) = yaml.safe_load(cloud_init(START, "tiny-1-0", "azure"))["bootcmd"]
    tool = tmp_path / "bin" / "systemctl"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n')
    tool.chmod(0o755)
    lines = tmp_path / "lines"
    lines.write_text(text.replace("/run/", f"{tmp_path}/run/"))
    path = f"{tool.parent}:{os.environ['PATH']}"
    subprocess.run(["sh", lines], env={"PATH": path}, check=True, timeout=BOUND_S)
    brought = tmp_path / "run/morph"
    done = subprocess.run(
        ["python3", "-I", brought / "boot", "--help"], capture_output=True, text=True, timeout=BOUND_S
    )
    assert "--only" in done.stdout, done.stderr
    assert {path: (brought / "boot" / path).read_text().rstrip() for path in program()} == {
        path: text.rstrip() for path, text in program().items()
    }
    assert (brought / "node-secret").read_text().strip() == NODE_SECRET
    assert {file.stat().st_mode & 0o777 for file in brought.rglob("*") if file.is_file()} == {0o600}
    unit = (tmp_path / "run/systemd/system/morph-watchdog.service").read_text()
    assert "DefaultDependencies=no\n" in unit
    assert "--only=watch" in unit
    assert (tmp_path / "asked").read_text().splitlines() == [
        "daemon-reload",
        "--no-block start morph-watchdog.service",
    ]


def test_a_forgotten_vm_is_ended_whatever_becomes_of_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended(Exception):
        pass

    def refuse(*_: object) -> None:
        raise KeyError("kind")

    def end(*asked: object) -> None:
        raise Ended(asked)

    monkeypatch.setattr(first_boot, "tell", refuse)
    monkeypatch.setattr(first_boot, "end_vm", end)
    stay = str(tmp_path / "stay")
    given = argparse.Namespace(patience_s=0.0, stay=stay, end="azure", node="a-0", management_url="https://arm")
    with pytest.raises(Ended, match="a-0"):
        first_boot._watch_for_ever(given, first_boot.Caller("127.0.0.1:1", "a-0", 1, "secret"))


def test_units_come_again_after_a_reboot_and_close_the_metadata_first() -> None:
    closed = written(START.model_copy(update={"uid": 1000, "metadata": False}))
    for files in (written(), closed):
        for name in ("node", "agent"):
            assert (
                "[Install]\nWantedBy=multi-user.target\n"
                in files[f"/etc/systemd/system/morph-{name}.service"]["content"]
            )
    assert "ExecStartPre" not in written()["/etc/systemd/system/morph-node.service"]["content"]
    unit = closed["/etc/systemd/system/morph-node.service"]["content"]
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStartPre=")]
    assert {"--only=close-metadata", "--uid=1000", "--close-metadata"} <= set(shlex.split(line))


def test_the_largest_cloud_config_is_well_below_what_clouds_take() -> None:
    certificate = f"{base64.b64encode(os.urandom(700)).decode()}\n"  # random characters, which do not compress
    start = START.model_copy(update={"authority": certificate, "requirements": requirements(), "uid": 1000})
    text = cloud_init(start, "tiny-1-0", "azure", 8)
    assert len(custom_data(text)) < 0.3 * MAX_CUSTOM_DATA_BYTES
    assert len(base64.b64decode(user_data(text))) < 0.85 * MAX_USER_DATA_BYTES


def test_secrets_stand_in_files_for_root_alone_and_on_no_command_line() -> None:
    files = written()
    assert files[TOKEN_PATH]["content"] == RAY_TOKEN
    assert (files[TOKEN_PATH]["permissions"], files[TOKEN_PATH]["owner"]) == ("0600", "root:root")
    config = yaml.safe_load(cloud_init(START, "tiny-1-0", "azure"))
    assert NODE_SECRET not in str(config["write_files"]) + str(config["runcmd"])
    for path, entry in files.items():
        if path.endswith(".service"):
            assert RAY_TOKEN not in entry["content"]
            assert NODE_SECRET not in entry["content"]
    assert RAY_TOKEN not in repr(START)
    assert NODE_SECRET not in str(START.model_dump())


def test_the_node_joins_with_its_token_and_its_own_resource() -> None:
    unit = written()["/etc/systemd/system/morph-node.service"]["content"]
    assert f"Environment=RAY_AUTH_TOKEN_PATH={TOKEN_PATH}\n" in unit
    assert "Environment=RAY_AUTH_MODE=token\n" in unit
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    command = shlex.split(line.removeprefix("ExecStart="))
    assert "--address=10.0.0.4:6379" in command
    assert '--resources={"morph_vm_tiny-1-0": 1}' in command
    assert "--include-log-monitor=false" in command  # the output of this command is not read


def test_the_node_listens_where_a_firewall_lets_it() -> None:
    options = ray_command(START.model_copy(update={"first_port": 20000}), "tiny-1-0", 1)
    assert {"--node-manager-port=20010", "--min-worker-port=20020", "--max-worker-port=20099"} <= set(options)
    assert not [option for option in ray_command(START, "tiny-1-0", 1) if "-port" in option]


def test_the_agent_ends_a_vm_that_is_forgotten() -> None:
    unit = written()["/etc/systemd/system/morph-agent.service"]["content"]
    assert "--lonely-s=900 --source=azure --end=azure" in unit
    assert f"--stay={STAY_PATH}" in unit
    assert "poweroff" not in unit  # a VM that is only switched off is still billed


PEM = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


def test_an_encrypted_node_gets_its_certificate_before_it_joins() -> None:
    config = yaml.safe_load(cloud_init(START.model_copy(update={"authority": PEM}), "tiny-1-0", "azure"))
    files = {entry["path"]: entry for entry in config["write_files"]}
    assert (files[AUTHORITY_PATH]["content"], files[AUTHORITY_PATH]["permissions"]) == (PEM, "0644")
    (line,) = [
        line
        for line in files["/etc/systemd/system/morph-node.service"]["content"].splitlines()
        if line.startswith("ExecStart=")
    ]
    enrolling, _, node = line.removeprefix("ExecStart=").partition(" -- ")
    assert shlex.split(enrolling) == [
        "/usr/bin/python3",
        *("-m", "manager.enrolment.node", "--manager=10.0.0.4:7070", "--node=tiny-1-0"),
        *(f"--secret-file={SECRET_PATH}", f"--authority={AUTHORITY_PATH}", f"--directory={TLS_DIRECTORY}"),
        "--patience-s=900",
    ]
    assert shlex.split(node) == ray_command(START, "tiny-1-0", 1)
    assert AUTHORITY_PATH not in written()


def test_an_encrypted_node_uses_the_address_that_it_is_given() -> None:
    start = START.model_copy(update={"authority": PEM})
    plain, encrypted = (static_node(given)[-1].splitlines() for given in (START, start))
    added = [line for line in encrypted if line not in plain]
    assert added[0] == 'sed 1,3d "$MORPH_SECRET_FILE" >"$d/authority.pem"'
    assert '--secret-file="$d"/node-secret --authority="$d"/authority.pem --directory="$d"/tls' in added[1]
    assert '${ip:+--address="$ip"} -- /usr/bin/python3 -m manager.engine.on_ray.node start' in added[1]
    assert secret_of(start) == f"{RAY_TOKEN}\n{NODE_SECRET}\n{packed()}\n{PEM}"
    assert secret_of(START) == f"{RAY_TOKEN}\n{NODE_SECRET}\n{packed()}\n"


@pytest.mark.parametrize("node", ["a b", "a\nExecStart=/bin/sh", "A", ""])
def test_a_name_that_could_break_out_is_refused(node: str) -> None:
    with pytest.raises(ValueError, match="are not names of"):
        cloud_init(START, node, "azure")


def test_custom_data_that_is_too_large_is_refused_before_sending() -> None:
    with pytest.raises(ValueError, match=str(MAX_CUSTOM_DATA_BYTES)):
        custom_data("#cloud-config\n" + os.urandom(MAX_CUSTOM_DATA_BYTES).hex())
    with pytest.raises(Misconfigured, match=rf"compressed, and AWS takes {MAX_USER_DATA_BYTES}: vms.environment.setup"):
        user_data("#cloud-config\n" + os.urandom(MAX_USER_DATA_BYTES).hex())


def test_the_planned_vm_is_shown_without_secrets() -> None:
    calls = planned(SPEC, "tiny-1", "tiny", "tiny-1", 2)
    assert [call["put"].rsplit("/", 2)[-2:] for call in calls] == [
        ["virtualMachineScaleSets", "tiny-1"],
        ["virtualMachines", "tiny-1-0"],
        ["virtualMachines", "tiny-1-1"],
    ]
    assert [call["body"]["zones"] for call in calls[1:]] == [["1"], ["2"]]
    assert RAY_TOKEN not in str(calls)


def test_an_interpreter_that_the_user_may_not_run_is_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(first_boot.subprocess, "run", refused)
    with pytest.raises(first_boot.Unfit, match=r"for the job's code cannot run .*Permission denied"):
        first_boot.make_user(os.getuid())

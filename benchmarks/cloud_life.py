"""The whole life of a run on spot VMs of a virtual Azure: VMs that came and went, costs, and what is left at the end.

    python -m benchmarks cloud_life
    python -m benchmarks cloud_life --keep 4 --steps 600 --evictions 6 --seed 1 --screenshot page.png

`morph run` with `vms.kind: azure` runs on a host of its own; Azure's resource manager and metadata services are fakes
under their real names, and VMs are network, process and mount namespaces of this machine that run the real cloud-config
(tests/cloud). Evictions are seeded, every other one without a notice; each waits until all VMs train, and the run is
stopped 50 steps after recovery from the last one. At the end the bill is compared with the run's own account, VM by VM,
and the weights, bit for bit, with those of as many undisturbed steps on one worker. Needs Linux and root. Exit code 1:
some check failed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

from benchmarks.harness import Seed, machine, option
from manager.accounting.account import Part
from manager.accounting.spent import NOTHING
from manager.report.values import RunReport
from morph.checkpoint.manifest import read_manifest
from tests.cloud.accounts import Split, requests, splits
from tests.cloud.hosts import not_permitted
from tests.cloud.life import JOB, Life, digests, seeded_takings
from tests.cloud.virtual_azure import USD_PER_H, VirtualAzure

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
BROWSER_TIMEOUT_S = 100.0
USD = USD_PER_H["Standard_NC6"]
M = 2
MANY_STEPS, STEPS_AFTER = 10**6, 50


class Photographer:
    """Takes one picture of the run's page: when all VMs train after so many evictions."""

    def __init__(self, azure: VirtualAzure, path: Path | None, after: int) -> None:
        self._azure, self._path, self._after = azure, path, after
        self.life: Life | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self, line: dict[str, Any]) -> None:
        life = self.life
        if self._path is None or life is None or self.process is not None or line["phase"] != "training":
            return
        if len(life.taken) < self._after or len(self._azure.region.living()) < life.keep:
            return
        assert BROWSER is not None, "no Chromium on PATH: the page cannot be looked at"
        address = self._azure.popen([sys.executable, "-m", "morph.cli.main", "page", str(life.run_dir)])
        url = address.communicate(timeout=BROWSER_TIMEOUT_S)[0].strip().splitlines()[-1]
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
        options += ["--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"]
        options += ["--hide-scrollbars", "--window-size=1200,1250", "--virtual-time-budget=6000"]
        profile = life.directory / "browser"
        where = ["nsenter", f"--net=/run/netns/{self._azure.manager.namespace}", "--"]
        self.process = subprocess.Popen(
            [*where, BROWSER, *options, f"--user-data-dir={profile}", f"--screenshot={self._path.resolve()}", url],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def wait(self) -> None:
        """Wait until the picture is taken."""
        if self.process is not None:
            self.process.wait(BROWSER_TIMEOUT_S)


def undisturbed(directory: Path, steps: int) -> dict[str, str]:
    """Return the sha256 of every unit after as many steps on one worker."""
    command = [sys.executable, "-m", "morph.runtime.process.single", f"{JOB}:job", "--steps", str(steps)]
    command += ["--micro-batch", str(M), "--sections", "6", "--checkpoints", str(directory)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {entry.unit: entry.sha256 for entry in read_manifest(str(directory), steps).units}


def tell_of_vms(azure: VirtualAzure, life: Life, report: RunReport) -> None:
    asked, region = requests(life.run_dir), azure.region
    warned = [taken for taken in life.taken if taken.taking.notice_s is not None]
    print(f"VMs: {asked.asked} requested, {asked.granted} granted, {len(life.taken)} evicted")
    print(f"evictions with a notice: {len(warned)}; {region.num_approved} acknowledged, and so over before their time")
    for taken in life.taken:
        found = [morph for morph in report.morphs if taken.vm in (*morph.lost_workers, *morph.cause.split())]
        notice = f"a notice of {taken.taking.notice_s:g} s" if taken.taking.notice_s else "no notice"
        what = "no shape was left for it"
        if found:
            pause = "" if found[0].pause_ms is None else f", {found[0].pause_ms:.0f} ms"
            kind = "planned" if found[0].planned else "forced"
            what = (
                f"{kind} morph {found[0].from_shape} -> {found[0].to_shape}{pause}, {found[0].steps_redone} steps lost"
            )
        print(f"  {taken.vm} at version {taken.version}, {notice}: {what}")


def tell_of_cost(azure: VirtualAzure, report: RunReport, parts: list[Split]) -> bool:
    """Print the account and the bill; return whether they agree."""
    account, bill_s = report.account, azure.region.node_seconds()
    print(f"node-seconds of the run: {account.total_s:.1f}")
    for part in Part:
        if account.parts_ns[part]:
            print(f"  {part:11} {account.part_s(part):8.1f}  {account.share(part):6.1%}")
    before_s, after_s = sum(one.before_s for one in parts), sum(one.after_s for one in parts)
    print(f"Azure's bill: {bill_s:.1f} node-seconds, {azure.region.dollars():.5f} dollars at {USD:g} an hour")
    for name, figure_s in (("before", before_s), ("in the run", account.total_s), ("after", after_s)):
        print(f"  {name:11} {figure_s:8.1f}  {figure_s * USD / 3600:.5f} dollars")
    paid = account.bill()
    adds_up = sum(account.parts.values(), NOTHING) == account.total and paid is not None
    if paid is not None:
        adds_up &= sum(paid.parts.values()) == paid.total
        adds_up &= abs(paid.total_usd - account.total_s * USD / 3600) < 1e-9
    adds_up &= abs(before_s + account.total_s + after_s - bill_s) < 0.05
    adds_up &= abs(azure.region.dollars() - bill_s * USD / 3600) < 1e-9
    for split in parts:
        if not split.fits:
            print(f"  {split.vm} lives otherwise for the run than for Azure: {split}")
    return adds_up and all(split.fits for split in parts)


def main(
    steps: Annotated[int, option("over which evictions are spread")] = 600,
    keep: int = 4,
    evictions: int = 6,
    seed: Seed = 1,
    notice_s: float = 30.0,
    profile: Annotated[Path | None, option("of tiny_gpt.py, m 2; absent: calibrated first")] = None,
    screenshot: Annotated[Path | None, option("of the run's page, while it runs")] = None,
) -> None:
    if reason := not_permitted():
        sys.exit(f"error: {reason}")
    with tempfile.TemporaryDirectory(prefix="morph-life-") as name:
        directory = Path(name)
        given, told = directory / "profile.json", machine()
        if profile is None:
            command = [sys.executable, "-m", "morph.cli.main", "calibrate", f"{JOB}:job", "-m", str(M), "-o"]
            subprocess.run([*command, str(given)], check=True, stdout=subprocess.DEVNULL)
        else:
            shutil.copy(profile, given)
        takings = seeded_takings(seed, evictions, steps, notice_s)
        with VirtualAzure(directory) as azure:
            photographer = Photographer(azure, screenshot, max(1, evictions // 2))
            life = Life(
                azure,
                directory,
                given,
                MANY_STEPS,
                keep,
                takings,
                seed=seed,
                steps_after=STEPS_AFTER,
                on_line=photographer,
            )
            adds_up, left, troubles, report = play(azure, life, photographer)
        left["namespaces"] = [path.name for path in Path("/run/netns").glob(f"morph-{os.getpid()}-*")]
        print("left: " + ", ".join(f"{len(found)} {kind}" for kind, found in left.items()))
        same = digests(life.run_dir) == undisturbed(directory / "alone", report.version)
    for true, what in (
        (adds_up, "the parts add up to the whole, and with what is before and after to Azure's bill"),
        (not any(left.values()), "nothing is left"),
        (report.steps_redone == 0, "no step was lost"),
        (same, "weights and optimizer state are bit-identical to an undisturbed run on one worker"),
        (not troubles, "the fake had no trouble" + "".join(f": {trouble}" for trouble in troubles)),
    ):
        print(f"{'yes' if true else 'NO '} {what}")
    print(f"{told} before, seed {seed}")
    holds = adds_up and same and not troubles and not any(left.values())
    sys.exit(0 if holds else 1)


def play(
    azure: VirtualAzure, life: Life, photographer: Photographer
) -> tuple[bool, dict[str, Any], list[str], RunReport]:
    """Play the run, and print it; return whether the account adds up, what is left, the fake's troubles, the report."""
    photographer.life, start_s = life, time.monotonic()
    report = life.live()
    wall_s = time.monotonic() - start_s
    photographer.wait()
    left = azure.region.left() | {"processes of the manager's host": azure.processes()}
    left["hosts"] = [name for name in azure.hosts.living if name != "manager"]
    print(f"{report.outcome}: {report.version} steps, {report.steps_redone} redone; {wall_s:.0f} s", flush=True)
    tell_of_vms(azure, life, report)
    adds_up = tell_of_cost(azure, report, splits(azure.region.bill, life.run_dir))
    return adds_up, left, [*azure.region.troubles, *azure.region.wrong], report

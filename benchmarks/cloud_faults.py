"""Inject each fault of a cloud provider and of its notices, one at a time; prints a table of Morph's reactions.

    python -m benchmarks cloud_faults

The controller, the thread that requests VMs, the clouds' SDKs (AWS's on moto) and the agents are real, and communicate
over HTTP and TCP on loopback; VMs are only names, and time runs 20 times as fast for the controller. Each case checks
that the run gets its VMs back and leaves no resources behind: tests/cloud/provider_faults.py, ending_faults.py,
notice_faults.py and aws_faults.py, which tests/cloud/test_faults.py runs.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import head, row
from tests.cloud import aws_faults, ending_faults, notice_faults, provider_faults
from tests.providers.fake_arm import served
from tests.providers.fake_ec2 import ec2_region

SHORTER = (
    (r"http://127\.0\.0\.1:\d+/metadata/", ""),
    (r"HTTPConnectionPool\(.*?\): ", ""),
    (r"\('Connection aborted\.', RemoteDisconnected\('(.*?)'\)\)", r"\1"),
    (r"VM (tiny-\d-\d): ", r"\1: "),
    (r" ?\(?\bi-[0-9a-f]{17}\)?", ""),
    (r"vm boot log: Linux version[^;]*(?=;|$)", "vm boot log: what the console said"),  # moto's, of many lines
    (r"\s*\n\s*", " "),
)


def sentence(told: list[str]) -> str:
    """Join the sentences in one cell, without the first request, which every case has."""
    parts = [part for index, part in enumerate(dict.fromkeys(told)) if index or "requested as tiny-1" not in part]
    text = "; ".join(parts)
    for pattern, short in SHORTER:
        text = re.sub(pattern, short, text)
    return text.replace("|", "\\|")


def main() -> None:
    logging.getLogger().addHandler(logging.NullHandler())  # warnings would stand among the rows, which say the same
    begin_s, failed = time.monotonic(), 0
    tables = {
        "fault of the provider": (served, provider_faults.CASES),
        "fault of an end": (served, ending_faults.CASES),
        "fault of notices": (served, notice_faults.CASES),
        "fault of AWS": (ec2_region, aws_faults.CASES),
        "fault of an end on AWS": (ec2_region, aws_faults.ENDING_CASES),
        "fault of AWS's notices": (ec2_region, aws_faults.NOTICE_CASES),
    }
    for title, (opened, cases) in tables.items():
        head(f"{title} | what Morph did")
        for name, play in cases.items():
            with opened() as arm, tempfile.TemporaryDirectory(prefix="morph-faults-") as directory:
                try:
                    did = sentence(play(arm, Path(directory)))
                except Exception as error:
                    failed, did = failed + 1, f"**FAILED** {type(error).__name__}: {error}"
            row(name, did)
    count = sum(len(cases) for _, cases in tables.values())
    print(f"\n{count - failed} of {count} faults borne, nothing left; {time.monotonic() - begin_s:.0f} s")
    sys.exit(1 if failed else 0)

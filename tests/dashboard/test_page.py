"""The page in a real headless browser: it draws the run, or says why it may not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "manager"))

from simulated_cluster import played

from manager.dashboard.server import serving
from tests.waiting import BOUND_S

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OFFLINE = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--virtual-time-budget=4000",
)  # fmt: skip

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on PATH: the page cannot be looked at"),
]


def looked_at(url: str, profile: Path, *options: str) -> str:
    """Return the page's document after its scripts ran."""
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, *OFFLINE, f"--user-data-dir={profile}", *options, url],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_draws_the_run(tmp_path: Path) -> None:
    with serving(played(stop_at=6), tmp_path) as address:
        document = looked_at(address.with_token, tmp_path / "profile", "--dump-dom")
    assert 'data-version="6"' in document
    assert '<main id="run">' in document, "hidden until there is something to show"
    assert "<span>generation</span>" not in document
    assert len(re.findall(r'<td class="ready">n\d+</td>', document)) == 4
    assert all(words in document for words in ("stage 1", "replica 1", "<h2>Workers</h2>"))
    assert document.count("<polyline") == 5  # workers, examples per second, loss, learning rate, the job's metric
    assert document.count('class="axis"><span>0 s</span>') == 5, "a time axis below each of them"
    assert re.findall(r"<div><h2>([^<]*)</h2><div class=\"plot\" id=\"training", document) == ["learning rate", "right"]
    assert "<b>0.0001667 to 0.001</b><span>learning rate</span>" in document
    assert "<b>0.25</b><span>right</span>" in document
    assert "<tr><td>4</td><td>0.5</td><td>0.5</td></tr>" in document
    assert re.search(r"<b>2x2</b>", document)
    assert re.findall(r'<div title="(\dx\d) from', document) == ["3x2", "2x2"]
    assert "computing " in document
    assert '<p id="problem" role="alert"></p>' in document


def test_the_page_of_a_run_that_has_ended_says_so(tmp_path: Path) -> None:
    with serving(played(), tmp_path) as address:
        document = looked_at(address.with_token, tmp_path / "profile", "--dump-dom")
    assert re.search(r'<p id="headline">ended after \d+ s</p>', document)


def test_without_the_token_the_page_stays_empty_and_says_why(tmp_path: Path) -> None:
    with serving(played(stop_at=6), tmp_path) as address:
        document = looked_at(f"{address.url}#wrong", tmp_path / "profile", "--dump-dom")
    assert "the token is missing or wrong" in document
    assert "data-version" not in document
    assert "gpt2-stdlib" not in document

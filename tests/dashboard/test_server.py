"""The page of a run is served only on loopback, and only to requests with the token."""

from __future__ import annotations

import http.client
import json
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parents[1] / "manager"))

from simulated_cluster import played

from manager.accounting.account import TimeUse
from manager.dashboard.server import PageAddress, read_address, serving
from manager.journal import journal as patience
from manager.run_dir import PAGE
from morph.contract.errors import RunDirError
from tests.small_disk import small_disk
from tests.waiting import BOUND_S, own_time


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PageAddress, Path]]:
    directory = tmp_path_factory.mktemp("run")
    with serving(played(), directory) as address:
        yield address, directory


def ask(address: PageAddress, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Send one request, with the token unless another is given."""
    place = urlsplit(address.url)
    assert place.hostname is not None
    connection = http.client.HTTPConnection(place.hostname, place.port or 0, timeout=BOUND_S)
    try:
        connection.request(method, path, headers={"Authorization": f"Bearer {address.token}", **headers})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_clients_with_the_token_get_the_runs_state(page: tuple[PageAddress, Path]) -> None:
    status, _, body = ask(page[0], "/api/run")
    run = json.loads(body)
    assert status == 200
    assert (run["version"], run["shape"], run["phase"]) == (12, "2x2", "ended")
    assert [cells for _, cells in run["shapes"]] == ["3x2", "2x2"]
    assert run["losses"][-1][1] == pytest.approx(1 / 12)
    assert run["events"][-1]["code"] == "finished"
    assert run["dollars_on_demand"] == pytest.approx(3 * run["dollars"])
    assert sum(run["part_dollars"].values()) == pytest.approx(run["dollars"], rel=1e-12)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic TOKEN"}, 401),
        ({"Origin": "http://elsewhere.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "elsewhere.example"}, 403),
        ({"Host": "127.0.0.1"}, 403),  # an origin with another port
        ({"Host": "localhost.elsewhere.example:PORT"}, 403),
        ({"Host": "elsewhere.example", "Authorization": "Bearer TOKEN"}, 403),  # a name that resolves to loopback
        ({"Origin": "http://127.0.0.1"}, 403),
        ({"Origin": "https://127.0.0.1:PORT"}, 403),
        ({"Authorization": "Bearer TOKEN "[:-1] + "x"}, 401),
        ({"Authorization": "bearer"}, 401),
        ({"Authorization": "Bearer \xe9\xff"}, 401),
    ],
)
@pytest.mark.parametrize("path", ["/api/run", "/metrics"])
def test_strangers_and_other_origins_are_refused(
    page: tuple[PageAddress, Path], path: str, headers: dict[str, str], status: int
) -> None:
    port = str(urlsplit(page[0].url).port)
    given = {name: value.replace("TOKEN", page[0].token).replace("PORT", port) for name, value in headers.items()}
    refused, _, body = ask(page[0], path, **given)
    assert refused == status
    assert set(json.loads(body)) == {"error"}
    assert page[0].token.encode() not in body


@pytest.mark.parametrize(
    "path", ["/api/run?token=TOKEN", "/metrics?token=TOKEN", "/TOKEN", "/api/run?Authorization=Bearer%20TOKEN"]
)
def test_the_token_in_an_address_opens_nothing_and_is_not_repeated(page: tuple[PageAddress, Path], path: str) -> None:
    status, _, body = ask(page[0], path.replace("TOKEN", page[0].token), Authorization="")
    assert status in (401, 404)
    assert page[0].token.encode() not in body


def test_no_other_page_may_read_or_frame_an_answer(
    page: tuple[PageAddress, Path],
) -> None:
    for path in ("/", "/page.js", "/api/run", "/metrics", "/nothing"):
        _, headers, _ = ask(page[0], path)
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Cache-Control"] == "no-store"
        assert not any(name.lower().startswith("access-control-") for name in headers)
        assert "Set-Cookie" not in headers


def test_tokens_are_compared_in_constant_time_whatever_is_sent(
    page: tuple[PageAddress, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[bytes] = []
    compare = secrets.compare_digest

    def noted(given: bytes, wanted: bytes) -> bool:
        compared.append(given)
        return compare(given, wanted)

    monkeypatch.setattr("manager.dashboard.server.secrets.compare_digest", noted)
    for kind in ("Bearer", "Basic"):
        ask(page[0], "/api/run", Authorization=f"{kind} {page[0].token[:-1]}")
        ask(page[0], "/metrics", Authorization=f"{kind} {page[0].token}")
    assert compared == [page[0].token[:-1].encode(), page[0].token.encode()] * 2


def test_nothing_that_is_asked_is_logged(page: tuple[PageAddress, Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(0):
        ask(page[0], "/api/run")
        ask(page[0], f"/api/run?token={page[0].token}", Authorization="Bearer wrong")
        ask(page[0], "/nothing")
    assert page[0].token not in caplog.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(page: tuple[PageAddress, Path], method: str) -> None:
    assert ask(page[0], "/api/run", method)[0] == 405


def test_the_empty_page_holds_nothing_of_the_run_and_asks_nobody_else(page: tuple[PageAddress, Path]) -> None:
    for path in ("/", "/page.js"):
        status, headers, body = ask(page[0], path, Authorization="")
        assert status == 200
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert b"http://www.w3.org/2000/svg" in body or b"http" not in body
        assert page[0].token.encode() not in body
    assert ask(page[0], "/../pyproject.toml")[0] == 404
    assert ask(page[0], "/page.json")[0] == 404


def test_the_metrics_are_prometheus_text_with_every_part_of_the_worker_seconds(page: tuple[PageAddress, Path]) -> None:
    status, _, body = ask(page[0], "/metrics")
    assert status == 200
    found = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert found["morph_version"].samples[0].value == 12
    parts = {sample.labels["part"]: sample.value for sample in found["morph_worker_seconds"].samples}
    assert set(parts) == {part.value for part in TimeUse}
    assert parts["compute"] > 0
    dollars = {sample.labels["part"]: sample.value for sample in found["morph_part_dollars"].samples}
    assert set(dollars) == set(parts)
    assert sum(dollars.values()) == pytest.approx(found["morph_dollars"].samples[0].value, rel=1e-12)


def test_the_token_lies_in_a_private_file_and_in_no_address(
    page: tuple[PageAddress, Path],
) -> None:
    address, directory = page
    assert stat.S_IMODE((directory / PAGE).stat().st_mode) == 0o600
    assert read_address(directory) == address
    assert address.token not in repr(address)
    assert len(address.token) >= 32


def test_nothing_is_left_of_a_page_when_the_run_is_over(tmp_path: Path) -> None:
    with serving(played(), tmp_path) as address:
        assert ask(address, "/")[0] == 200
    with pytest.raises(OSError):
        ask(address, "/")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RunDirError, match="serves no page"):
        read_address(tmp_path)


def test_a_full_disk_delays_the_page_and_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        disk.fill()
        own_time(monkeypatch, patience, sleep=lambda _pause_s: disk.free())
        with serving(played(), disk.path) as address:
            assert PageAddress.model_validate_json((disk.path / PAGE).read_text()) == address
        assert not (disk.path / PAGE).exists()
    assert f"the run pauses: {disk.path}" in caplog.text

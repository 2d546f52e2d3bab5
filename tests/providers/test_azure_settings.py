"""Azure's logins, prices and times, and which modules their lookup loads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import formatdate
from urllib.parse import parse_qs, urlsplit

import pytest
from pydantic import ValidationError

from manager.providers.azure.client import azure_client
from manager.providers.azure.prices import disk_price, retail_price
from manager.providers.azure.spec import AzureSize, AzureSpec
from manager.providers.interface.cloud import RETRY_S, Remembered, paid_since_s
from manager.providers.interface.provider import Price
from tests.notices.metadata_server import MetadataServer, Reply, json_reply, served
from tests.providers.azure_world import SPEC
from tests.providers.fake_arm import FakeArm
from tests.waiting import BOUND_S


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataServer]:
    """Give tokens as an App Service's managed identity does."""
    for name in ("AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID", "AZURE_FEDERATED_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    token = {"access_token": "t0k", "expires_on": "4000000000", "resource": "r", "token_type": "Bearer"}
    with served() as server:
        headers = {"Content-Type": "application/json", "Connection": "close"}
        server.script("GET", "/token", json_reply(token, headers=headers))
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"{server.url}/token")
        monkeypatch.setenv("IDENTITY_HEADER", "h3ader")
        yield server


@pytest.mark.parametrize("name", ["root", "admin", "support_388945a0", "Me", "m" * 32])
def test_a_user_that_azure_refuses_is_refused_with_the_cloud_file(name: str) -> None:
    with pytest.raises(ValidationError, match="admin_username"):
        AzureSpec.model_validate({**SPEC.model_dump(), "admin_username": name})


def test_a_local_resource_manager_is_asked_with_its_own_token(arm: FakeArm, identity: MetadataServer) -> None:
    spec = AzureSpec.model_validate({**SPEC.model_dump(), "resource_manager": arm.url})
    assert (SPEC.provider, spec.provider) == ("azure", "local"), "what a stand-in does says nothing of Azure's VMs"
    client = azure_client(spec.subscription_id, base_url=spec.resource_manager, authority=spec.authority)
    assert [*client.virtual_machines.list(spec.resource_group)] == []
    assert [parse_qs(urlsplit(asked.path).query)["resource"] for asked in identity.asked] == [[arm.url]]


@pytest.mark.parametrize(
    "url",
    ["http://management.example.org", "http://10.0.0.4:8080", "ftp://127.0.0.1", "127.0.0.1:80", "http://1270.0.0.1"],
)
def test_a_token_goes_nowhere_else_without_tls(url: str) -> None:
    with pytest.raises(ValidationError, match="resource_manager"):
        AzureSpec.model_validate({**SPEC.model_dump(), "resource_manager": url})


def test_a_sovereign_cloud_is_taken() -> None:
    names = {
        "resource_manager": "https://management.usgovcloudapi.net",
        "authority": "https://login.microsoftonline.us",
    }
    spec = AzureSpec.model_validate({**SPEC.model_dump(), **names})
    assert (spec.resource_manager, spec.authority) == tuple(names.values())


PATH = "/api/retail/prices"


@pytest.fixture
def prices() -> Iterator[MetadataServer]:
    with served() as server:
        yield server


def item(price: float, sku: str = "NC6 Spot", product: str = "Virtual Machines NC Series", **fields: object) -> object:
    figures = {"currencyCode": "USD", "retailPrice": price, "unitOfMeasure": "1 Hour", "skuName": sku}
    return {**figures, "meterName": sku, "productName": product, **fields}


def test_the_spot_price_is_found_among_others_on_all_pages(prices: MetadataServer) -> None:
    url = prices.url + PATH
    first = [item(0.9, "NC6"), item(0.7, "NC6 Low Priority"), item(0.5, product="NC Series Windows"), item(0.2)]
    second = [item(0.25), item(99.0, unitOfMeasure="1 Month")]
    replies = [
        json_reply({"Items": first, "NextPageLink": f"{url}?$skip=100"}),
        json_reply({"Items": second, "NextPageLink": None}),
    ]
    prices.script("GET", PATH, *replies)
    assert retail_price("westus2", "Standard_NC6", spot=True, url=url) == 0.25
    query = parse_qs(urlsplit(prices.asked[0].path).query)["$filter"][0]
    assert query == "armRegionName eq 'westus2' and armSkuName eq 'Standard_NC6' and priceType eq 'Consumption'"
    prices.script("GET", PATH, *replies)
    assert retail_price("westus2", "Standard_NC6", spot=False, url=url) == 0.9


@pytest.mark.parametrize(
    "reply",
    [Reply(status=500), Reply(body="<html>"), Reply(drop=True), json_reply({"Items": []}), json_reply({"Items": [1]})],
    ids=["500", "no JSON", "dropped", "nothing", "another shape"],
)
def test_a_price_list_without_an_answer_gives_no_price(prices: MetadataServer, reply: Reply) -> None:
    prices.script("GET", PATH, reply)
    assert retail_price("westus2", "Standard_NC6", spot=True, url=prices.url + PATH) is None


def test_a_disk_costs_what_its_tier_does(prices: MetadataServer) -> None:
    monthly = {"unitOfMeasure": "1/Month", "retailPrice": 21.9}
    items = [
        {**monthly, "meterName": "P10 LRS Disk"},
        {**monthly, "meterName": "P10 LRS Disk Mount", "retailPrice": 99.0},
    ]
    prices.script("GET", PATH, json_reply({"Items": items, "NextPageLink": None}))
    url = prices.url + PATH
    assert disk_price("westus2", "Premium_LRS", 128, url) == pytest.approx(0.03)
    assert "skuName eq 'P10 LRS'" in parse_qs(urlsplit(prices.asked[0].path).query)["$filter"][0]
    assert disk_price("westus2", "Premium_LRS", 30, url) is None  # another tier, which is missing from the list
    assert disk_price("westus2", "UltraSSD_LRS", 128, url) is None


@pytest.mark.parametrize("reply", [Reply(status=429), json_reply({}), Reply(drop=True)], ids=["429", "{}", "dropped"])
def test_a_price_list_with_a_missing_page_gives_no_price(prices: MetadataServer, reply: Reply) -> None:
    url = prices.url + PATH
    prices.script("GET", PATH, json_reply({"Items": [item(0.2)], "NextPageLink": f"{url}?$skip=100"}), reply)
    assert retail_price("westus2", "Standard_NC6", spot=True, url=url) is None


def test_a_missing_price_is_asked_for_again_and_a_known_one_never() -> None:
    now_s, asked = [5.0], list[tuple[str, float]]()
    said: dict[str, float] = {"known": 0.3}

    def find(size: AzureSize) -> float | None:
        asked.append((size.name, now_s[0]))
        return said.get(size.name)

    prices, sizes = Remembered(find, clock=lambda: now_s[0]), [AzureSize(name="known"), AzureSize(name="silent")]

    def look(at_s: float) -> list[float | None]:
        now_s[0] = at_s
        return [prices(size) for size in sizes]

    for at_s in (5.0, 65.0, 4.9 + RETRY_S, 5.0 + RETRY_S, 65.0 + RETRY_S):
        assert look(at_s) == [0.3, None]
    assert asked == [("known", 5.0), ("silent", 5.0), ("silent", 5.0 + RETRY_S)]
    said["silent"] = 1.4
    assert look(65.0 + RETRY_S) == [0.3, None]
    assert look(5.0 + 2 * RETRY_S) == [0.3, 1.4]
    assert look(5.0 + 9 * RETRY_S) == [0.3, 1.4]
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("listed", "price"),
    [
        ({}, None),
        ({"b": 0.2}, Price(usd_per_h=0.5, source="Azure's retail price list")),
        ({"b": 0.7}, Price(usd_per_h=0.7, source="Azure's retail price list")),
    ],
)
def test_the_price_is_that_of_the_dearest_size_if_all_are_known(listed: dict[str, float], price: Price | None) -> None:
    sizes = (AzureSize(name="a", usd_per_h=0.5), AzureSize(name="b"))
    assert SPEC.model_copy(update={"sizes": sizes}).price(lambda size: listed.get(size.name)) == price
    own = SPEC.model_copy(update={"sizes": sizes[:1]}).price(lambda _size: None)
    assert own == Price(usd_per_h=0.5, source="the cluster file")


NOW_S = 1_790_000_000.0


@pytest.mark.parametrize(
    ("ahead_s", "told", "paid_s"),
    [
        (0.0, True, 100.25),
        (-0.5, True, 100.25),  # clocks that agree as far as a date in whole seconds shows
        (30.0, True, 100.25),
        (-3600.0, True, 100.25),
        (30.0, False, 70.25),  # without a date there is only this machine's clock
        (150.0, False, 0.0),
    ],
)
def test_paid_time_does_not_depend_on_the_local_clock(ahead_s: float, told: bool, paid_s: float) -> None:
    azure_s = NOW_S + ahead_s
    created = datetime.fromtimestamp((NOW_S if abs(ahead_s) < 2 else azure_s) - 100.25, UTC)
    answered = formatdate(azure_s, usegmt=True) if told else None
    since_s = paid_since_s(created, answered, NOW_S)
    assert since_s is not None
    assert NOW_S - since_s == pytest.approx(paid_s, abs=1e-3)


@pytest.mark.parametrize("answered", ["", "yesterday", "Mon, 99 Jan 2026 00:00:00 GMT"])
def test_an_invalid_date_is_ignored(answered: str) -> None:
    created = datetime.fromtimestamp(NOW_S - 5.0, UTC)
    assert paid_since_s(created, answered, NOW_S) == NOW_S - 5.0
    assert paid_since_s(None, answered, NOW_S) is None


def test_no_cloud_sdk_is_loaded_before_its_provider() -> None:
    code = (
        "import sys, manager.providers.local, manager.providers.hosts.static, manager.providers.azure.spec, "
        "manager.providers.aws.spec, manager.run.markets, "
        "manager.providers.boot.cloud_init, manager.notices.azure, morph.cli.main; "
        "print({'azure.core', 'azure.mgmt.compute', 'boto3', 'botocore', 'ray', 'torch'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=BOUND_S, check=True)
    assert done.stdout.strip() == "set()"

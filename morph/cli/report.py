"""``morph report``: one HTML page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from morph.contract import ranges

if TYPE_CHECKING:
    from manager.report.prices import Prices
    from morph.contract.errors import InputError

PriceOption = Annotated[
    float | None,
    typer.Option(
        "--price",
        min=0,
        help="Dollars per VM and hour that are paid, for all VMs; else what is known of each.",
        show_default=False,
    ),
]
OnDemandOption = Annotated[
    float | None,
    typer.Option("--on-demand-price", min=0, help="What such a VM costs on demand, to compare.", show_default=False),
]


def report_command(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: report.html in the run's directory.")
    ] = None,
    price: PriceOption = None,
    on_demand_price: OnDemandOption = None,
) -> None:
    """Write one self-contained HTML page about a run: where its time and money went, its shapes, its morphs.

    \b
    Example:
      morph report runs/tiny --price 0.9 --on-demand-price 3.06
    """
    from manager.report.reading import read_report
    from manager.run_dir import as_its_folder, read_facts
    from morph.cli.checks import check_output
    from morph.cli.report_page import report_page
    from morph.contract.errors import RunDirError
    from morph.contract.files import write_whole

    for option, given in (("--price", price), ("--on-demand-price", on_demand_price)):
        if given is not None:
            ranges.USD_PER_HOUR.check(option, given)
    prices = prices_of(price, on_demand_price)
    read_facts(run_dir)
    path = output or run_dir / "report.html"
    check_output(path, RunDirError)
    report = read_report(run_dir)
    if prices is not None and report.account.bill(prices) is None:
        raise no_price()
    page = report_page(report, prices)
    try:
        with as_its_folder(path):
            write_whole(path, page)
    except OSError as error:
        raise RunDirError(f"cannot be written: {error.strerror}", source=str(path)) from error
    print(f"report: {path}")


def prices_of(price: float | None, on_demand_price: float | None) -> Prices | None:
    """Return the prices given on the command line, which count for all VMs; None for none."""
    from manager.report.prices import Prices

    if price is None and on_demand_price is None:
        return None
    return Prices(paid_usd_per_h=price, on_demand_usd_per_h=on_demand_price, for_all=price is not None)


def no_price() -> InputError:
    """Return the error of a price to compare with where none that is paid is known."""
    from morph.contract.errors import InputError

    return InputError("is not given", field="--price", allowed="dollars per VM and hour, with --on-demand-price")

"""Count what a step asks of its device: ``python -m benchmarks.device_steps [--job NAME ...] [--write docs/gpu.md]``.

Runs the real step of each job's first, a middle and the last stage on tensors that have shapes and no numbers
(torch's fake tensors, on a device that is not the CPU), so it needs no GPU and no memory, and it stops where an
operation mixes devices. Prints the tables of docs/gpu.md; ``--write`` replaces them there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.device_steps.cases import CASES
from benchmarks.device_steps.counting import Site
from benchmarks.device_steps.table import HEAD, SITES_HEAD, count_case, site_rows

BEGIN, END = "<!-- counts: begin -->", "<!-- counts: end -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", action="append", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--write", type=Path, help="replace the tables of this file")
    options = parser.parse_args()
    lines, found = list(HEAD), dict[Site, set[str]]()
    for case in CASES:
        if options.job and case.name not in options.job:
            continue
        rows, sites = count_case(case)
        lines += rows
        for site in sites:
            found.setdefault(site, set()).add(case.name)
    text = "\n".join([*lines, "", *SITES_HEAD, *site_rows(found)])
    if options.write is None:
        print(text)
        return
    before, _, rest = options.write.read_text().partition(BEGIN)
    options.write.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()

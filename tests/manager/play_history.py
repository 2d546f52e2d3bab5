"""Plays one seeded history again and prints it.

python tests/manager/play_history.py 4711
"""

from __future__ import annotations

import sys

from random_history import play, random_faults
from simulated_cluster import BrokenHistoryError


def main() -> int:
    seed = int(sys.argv[1])
    print(random_faults(seed))
    try:
        print(play(seed).told())
    except BrokenHistoryError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

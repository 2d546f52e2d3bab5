"""``ray`` on a VM of a provider, as ``python -m manager.engine.on_ray.node start ..``: its agents are Morph's."""

from __future__ import annotations

from typing import Any

from ray.scripts import scripts

from manager.engine.on_ray.agents import start_agents_of_ours

if __name__ == "__main__":
    main: Any = scripts.main  # which has no types
    start_agents_of_ours()
    main()

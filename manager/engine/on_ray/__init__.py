"""Everything about Ray: its cluster, its driver and actors, and their confinement."""

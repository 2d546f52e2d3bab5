"""Everything about Ray: its cluster, its driver and actors, and what confines them."""

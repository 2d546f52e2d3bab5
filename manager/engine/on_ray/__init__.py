"""Everything that imports Ray: its cluster, its actors, and what keeps them harmless."""

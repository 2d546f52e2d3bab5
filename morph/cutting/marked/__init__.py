"""Models whose cut-points the user marked, for what cannot be exported."""

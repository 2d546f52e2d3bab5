"""Models that cannot be exported, cut at places that the user marked."""

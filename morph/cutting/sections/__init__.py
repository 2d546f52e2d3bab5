"""What a cut model is made of: sections, cut-points, positions, statistics of the global batch."""

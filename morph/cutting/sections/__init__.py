"""The parts of a cut model: sections, cut-points, positions, running statistics."""

"""What Morph's packages agree on: typed, frozen, serialisable values. No torch, no Ray, no I/O beyond reading files."""

"""Cut models kept on disk, so that a worker need not export the model again (docs/decisions/0016)."""

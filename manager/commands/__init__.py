"""Commands that start, watch or end a run. Each module's top level imports nothing heavy."""

"""Commands that measure. Each module's top level imports nothing heavy."""

"""Commands that ask for a plan, a simulation or a trace. Each module's top level imports nothing heavy."""

"""Workers as plain processes of this machine, without Ray."""

HOST = f"{__name__}.process_host"
"""The module that runs as the process from which workers are forked."""

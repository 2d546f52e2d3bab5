"""The machines of a managed run: brought up, taken over, ended."""

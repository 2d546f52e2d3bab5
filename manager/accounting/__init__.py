"""Where node-seconds and money of a run went."""

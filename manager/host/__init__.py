"""What this machine and its system give: clocks, processes, folders, ports, signals."""

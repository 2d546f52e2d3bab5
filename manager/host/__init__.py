"""Services of this machine and its system: clocks, processes, folders, ports, signals."""

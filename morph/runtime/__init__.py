"""The training runtime inside a worker process: sections, schedule, reduction, commit, state."""

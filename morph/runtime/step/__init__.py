"""One step on one worker: its schedule, sections, links and times."""

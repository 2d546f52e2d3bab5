"""Commands that show a run, or end it: status, events, report, timeline, page, stop."""

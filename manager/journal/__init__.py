"""The journal: every event and decision of a run in one SQLite file, from which the run can be read back."""

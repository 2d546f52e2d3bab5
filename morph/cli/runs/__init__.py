"""Commands that run a job: run, resume, demo."""

"""Commands about a job's model: cut, trace-deps, export, import."""

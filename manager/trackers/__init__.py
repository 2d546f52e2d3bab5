"""Trackers and callbacks: processes beside the manager that read its journal and tell others what happens."""

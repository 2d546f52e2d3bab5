"""Trackers, callbacks and alerts: processes beside the manager that read its journal and tell others what happens."""

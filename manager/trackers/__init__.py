"""Trackers, callbacks and alerts: processes beside the manager that read its journal and report events elsewhere."""

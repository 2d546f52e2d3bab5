"""Preemptions on purpose: which VMs are taken when, and the requests to the manager of a running run."""

"""Policies of a job on spot VMs: Morph, and the policies that it is compared with."""

"""Rehearsals: a job's shape run by emulated workers under the real manager, held against the simulator."""

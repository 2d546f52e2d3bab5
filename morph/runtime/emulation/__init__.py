"""Emulated devices: workers that take a profile's times and memory instead of computing, with everything else real."""

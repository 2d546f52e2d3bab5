"""Cluster files and what they make on a cloud: config, cloud."""

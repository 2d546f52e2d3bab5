"""Processes that help to measure, on this machine and on another one."""

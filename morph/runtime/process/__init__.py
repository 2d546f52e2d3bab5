"""The long-lived process that drives one device, and its two connections to the manager."""

"""The lives of VMs over all runs of a user, read from journals, and what they predict for the next VMs."""

"""What became of VMs, over all runs of a user: their lives, out of journals, and what is to be expected of the next."""

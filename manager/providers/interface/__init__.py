"""What every provider does, and what is said of its VMs."""

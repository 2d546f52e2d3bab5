"""What a VM does at its first boot, whichever provider made it."""

"""What a VM does at its first boot, for every provider."""

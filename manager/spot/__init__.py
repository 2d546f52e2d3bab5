"""One script on one spot VM at a time: it is saved before the VM is taken, and resumed on the next VM (Spotify)."""

"""One script on one spot VM at a time: saved before it is taken, and gone on with on the next (Spotify)."""

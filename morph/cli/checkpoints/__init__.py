"""Stored checkpoints, as a user looks at them and looks after them."""

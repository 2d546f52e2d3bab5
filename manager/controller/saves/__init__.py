"""When the next checkpoint is due, and what that is worked out from."""

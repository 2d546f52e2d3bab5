"""What the controller knows, what happens to it, and what it can order."""

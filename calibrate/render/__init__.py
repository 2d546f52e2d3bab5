"""A profile as tables and a picture."""

"""Workers that are lost or fail."""

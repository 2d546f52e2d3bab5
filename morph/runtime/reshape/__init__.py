"""Where the state of a new shape comes from: every unit and sum that a worker keeps, receives, loads or makes."""

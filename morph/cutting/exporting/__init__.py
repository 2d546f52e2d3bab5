"""From the user's model to a graph whose every operation is known."""

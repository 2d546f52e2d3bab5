"""Where in the user's code something stands, and how a refusal names it."""

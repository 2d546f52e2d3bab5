"""Locating lines of the user's code, and explaining refusals with them."""

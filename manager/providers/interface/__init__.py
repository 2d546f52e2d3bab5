"""The interface of providers, and what they share."""

"""The manager: a pure controller, its journal and report, and the shells that carry its decisions out."""

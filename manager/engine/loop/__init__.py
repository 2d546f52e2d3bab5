"""The live loop: events in, decisions written down, actions out."""

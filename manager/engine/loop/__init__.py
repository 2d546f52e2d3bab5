"""The live loop: events in, decisions journalled, actions out."""

"""The controller's state, the events that it handles, and the actions that it orders."""

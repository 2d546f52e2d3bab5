"""The live shell around the controller: the one place that knows Ray."""

"""Sending units ahead of a planned change: the state once, then each step's gradients, beside the training."""

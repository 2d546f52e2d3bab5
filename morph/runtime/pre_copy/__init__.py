"""Pre-copying units before a planned change: the state once, then each step's gradients, beside the training."""

"""What a worker holds of the model: units, their sums and optimizers, and how they are saved."""

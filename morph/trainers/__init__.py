"""Makes jobs from a Trainer of transformers, or from a LightningModule of Lightning."""

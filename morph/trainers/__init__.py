"""Jobs from what trains elsewhere: a Trainer of transformers, a LightningModule of Lightning."""

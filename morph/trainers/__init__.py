"""What ``morph.hf`` and ``morph.lightning`` honour of a Trainer, and the host's own steps to compare with."""

"""Checkpoints: one safetensors file per parameter unit and a manifest that is written last."""

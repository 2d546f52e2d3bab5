"""Checks of a job before it starts: its data, its loss, and Morph's gradients against the plain model's."""

"""What is checked of a job before it starts: its data, its loss, and Morph's gradients beside the plain model's."""

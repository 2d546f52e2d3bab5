"""Building a model without memory for its weights, and making any of its tensors on request."""

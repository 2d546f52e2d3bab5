"""Making a model without its numbers, and any one unit of it with them."""

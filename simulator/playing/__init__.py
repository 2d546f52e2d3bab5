"""How a mini-batch is played to the nanosecond: compiled loops, and the orders that they play."""

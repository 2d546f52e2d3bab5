"""What a stage costs in time and memory, the bounds that no plan beats, and the answer to a question."""

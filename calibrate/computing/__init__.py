"""What a job computes: sections, optimizer, memory, contention."""

"""What a plan is made under: nodes, links, jitter, slow and shared cores."""

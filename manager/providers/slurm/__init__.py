"""Jobs of Slurm, each with the node of a run."""

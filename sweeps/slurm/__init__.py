"""Plans into Slurm arrays: what is submitted, what of it is in the queue, and what runs on a node."""

"""The sweep runner: expand the grid, plan packs, launch them here or on Slurm."""

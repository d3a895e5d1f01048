"""From trials to packs: campaigns of faults, what packs cost, what a machine cannot hold, and a plan in words."""

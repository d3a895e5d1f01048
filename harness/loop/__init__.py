"""The loop over the steps of a pack: passes, their replay as graphs, and how a run begins and goes on."""

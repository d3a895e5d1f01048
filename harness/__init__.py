"""The training engine: packs of GPTs with the trial as the first axis of every tensor."""

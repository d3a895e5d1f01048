"""A model and a training loop of the user's own: faults, detectors, playbooks, golden twins and campaigns for them.

This is the other place, beside the runner of sweeps, where harness and injectors meet: nothing else of harness imports
it, and it knows neither packs nor the loop. `from harness import attach` is its door.
"""

"""A model and a training loop of the user's own: faults, detectors, playbooks, golden twins and campaigns for them.

It finds faults by name, as the runner of sweeps does, and knows neither packs nor the loop; nothing else of harness
imports it. `from harness import attach` is its entry.
"""

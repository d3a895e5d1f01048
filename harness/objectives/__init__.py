"""What a model is trained for: one file each. What a batch is, what the loss is, how a run is judged.

A new one is a new file here, or a module of an installed package; the pack and the loop know only the interface.
"""

"""What was trained, made again from its configuration and its corpus: batches with their poison, and whole runs.

The one folder of this package that knows how a batch is made, what a fault does to it, and how a run is trained. What a
results folder names is not opened here: text that is not the built-in one, or a start from weights, is given by whoever
asks.
"""

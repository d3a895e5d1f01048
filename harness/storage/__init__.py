"""Everything on the disk.

The store and its reader, checkpoints, last weights, small files, and the results folder itself.

It knows configurations and arrays, and neither models nor training.
"""

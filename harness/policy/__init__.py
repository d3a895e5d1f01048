"""Policy gradients: text that a model samples, what it is worth, and the losses by which the model learns from it.

harness/objectives/policy.py makes an objective of it (`objective=policy`). Nothing here knows the loop.
"""

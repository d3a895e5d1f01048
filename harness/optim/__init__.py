"""From gradients to new weights: clippers, optimizers, schedules, the loss's scale, QK-Clip.

Each works on flat arrays [R, P] row by row; it knows the model's tensors, and neither data nor the loop.
"""

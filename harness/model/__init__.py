"""A GPT of a pack, trial first: its tensors and their sizes, its layers and branches, number formats, taps.

It computes logits and gradients of given weights, and knows neither losses, data, optimizers nor faults.
"""

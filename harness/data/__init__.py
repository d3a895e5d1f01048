"""Text into batches: corpora, tokenizers, windows, screening, and batches that are cut while they grow.

What a trial reads at a step is a function of its seed and the step alone; no model and no optimizer is known here.
"""

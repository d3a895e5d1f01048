"""What a model is trained for: what a batch is, what the loss is, how a run is judged."""

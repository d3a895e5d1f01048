"""Optimizers over flat [R, P] state. Every hyperparameter that is a number is a column [R, 1], one value a trial."""

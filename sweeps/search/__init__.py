"""Searches: asks Optuna, instead of training a whole grid."""

"""From a results folder to one dataset: signals, events, weights, searches, and what follows of a trial alone."""

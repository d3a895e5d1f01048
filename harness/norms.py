"""The norms."""

NORMS = ("layer", "rms")

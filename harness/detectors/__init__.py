"""Detectors: one file each. A detector sees numbers of rows, step by step, and says at which an alarm is due.

It knows neither the pack nor the loop: the same code judges while a run trains and what a store holds of it. A new one
is a new file here, or a module of an installed package, with its constants in `Options`: section `detect.NAME`.
"""

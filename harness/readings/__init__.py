"""Readings: one file each. What is measured of a run beside its loss, every step or now and then (`signals.NAME`).

A new one is a new file here, or a module of an installed package; its switch, its arrays in the store and its
variables follow from it. A reading sees tensors of rows, and neither the pack nor the loop;
harness/training/readings.py takes it.
"""

"""The loop and the pack: rows, twins and forks, ranks, sites and strikes, signals, and how a run ended.

Here the other folders meet; nothing of the harness stands above it.
"""

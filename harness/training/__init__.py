"""A step of a pack: rows and slots, twins and forks, ranks, sites and strikes, signals and readings.

It knows nothing of alarms and of the loop over steps: `harness/incidents/` and `harness/loop/` build on it.
"""

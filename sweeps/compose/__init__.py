"""From a command line, a study and YAML files to checked trials, and the settings of a run.

Nothing here plans, trains or writes.
"""

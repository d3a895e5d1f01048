"""Recovery: what is done to a trial at an alarm, one action each file; `playbook.ladder` says which, and when.

An action is shown one trial's row through a narrow door (`Row`), and decides on the host: it is asked at alarms alone.
It knows neither the pack nor the loop. A new one is a new file here, or a module of an installed package, with its
settings in `Options`: section `playbook.NAME`.
"""

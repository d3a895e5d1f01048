"""Rewards: what a completion is worth, one file each; `policy.reward` says which (`objective=policy`).

A new one is a new file here, or a module of an installed package that an entry point of the group
`stability_harness.rewards` names, with its settings in `Options`: section `policy.NAME`. A reward sees token ids alone.
"""

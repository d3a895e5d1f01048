"""Stored results into trackers and tables of others.

What of a sweep goes there (`runs`, `tables`), and how far each trial has gone already (`tracking`). Nothing here writes
into a results folder, and nothing asks a network. Each target is a file in `targets`.
"""

"""What a results folder has of a claim that is going to be tested in it, written before its first trial."""

from __future__ import annotations

from dataclasses import dataclass

REGISTERED = "registered"  # a folder in the results folder


@dataclass(frozen=True, kw_only=True)
class Registration:
    """What stands in `registered/NAME.json`: the hash of a claim, and when it was written, in UTC."""

    name: str
    registration: str
    at: str

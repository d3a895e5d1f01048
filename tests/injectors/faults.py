"""Every fault that the project has, found by itself, ready for a small trial."""

from __future__ import annotations

from functools import cache

from harness.config import Fault
from harness.config.names import Site
from harness.testing.faults import START
from injectors import value
from sweeps.compose.arguments import config_loader
from sweeps.compose.grid import Composer

NEEDED = {"schedule_offset": ["fault.offset=-2"]}
SPECIAL = {"none", "replay"}  # `replay` does what another fault did: it is tested for each of them
OF_EXPERTS = {
    "bypassed_expert",
    "late_routing",
    "lost_expert",
    "one_expert",
    "swapped_experts",
    "wrong_expert",
}  # in test_routing.py
OF_POLICIES = {"late_reward", "shifted_advantage", "flipped_reward", "stuck_reward", "sampler_bit"}
"""In test_rewards.py."""
SITES = tuple(site for site in value.SITES if site not in (*value.OF_POLICIES, Site.BUFFER))
OF_EXPERTS |= {"large_expert"}  # a value that is scaled, of a tensor that others lack


@cache
def composer() -> Composer:
    return Composer(config_loader(), "grid")


@cache
def fault(case: str) -> Fault:
    """The fault of a case: `name`, or `value at site`."""
    name, _, site = case.partition(" at ")
    given = [f"fault={name}", f"fault.start={START}", "train.ranks=2", "train.batch=4", "schedule.warmup=6"]
    given += ["train.loss_scaling=static"]
    given += [f"fault.site={site}", "fault.bit=27"] if site else []
    return composer().trial([*given, *NEEDED.get(name, [])]).fault


def cases() -> list[str]:
    """All options of `fault`, and a bit flip at every site."""
    options = sorted(set(config_loader().get_group_options("fault")) - SPECIAL - OF_EXPERTS - OF_POLICIES)
    return [*options, *(f"value at {site}" for site in SITES)]

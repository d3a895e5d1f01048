"""Faults in an optimizer's moments: where it has them they strike, and where it has not they are refused beforehand."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from harness.config import ConfigError
from harness.faults.facts import facts_of
from harness.model.tensors import MATRICES
from harness.optim.optimizers import OPTIMIZERS
from harness.testing import engine
from harness.training.sites import Site
from injectors.ranks import MissedUpdate
from injectors.value import Value
from tests.injectors.faults import composer
from tests.injectors.spies import START, trial

MOMENTS = (Site.MOMENT_1, Site.MOMENT_2)
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def refused(fault, name):
    struck = trial(fault, name=name)
    with pytest.raises(ConfigError) as error:
        fault.check(facts_of(struck))
    (reason,) = error.value.reasons
    assert "\n" not in reason
    return reason


def scaled(site, name="adamw"):
    """Muon has no second moment of matrices inside of blocks, and zeros in their place."""
    tensor = "embedding" if name == "muon" else "blocks.0.feedforward.up"
    return Value(start=START, site=site, tensor=tensor, element=5, model="scale", value=100.0)


@cache
def runs(name):
    """A golden trial, one struck at each moment that there is, and another golden one; and the same without faults."""
    golden, other = trial(name=name), trial(name=name, seed=1)
    struck = [trial(scaled(site, name), name=name) for site in MOMENTS if site in OPTIMIZERS[name].slots]
    return engine.run([golden, *struck, other]), engine.run([*(golden for _ in range(1 + len(struck))), other])


@every_optimizer
@pytest.mark.parametrize("site", MOMENTS)
def test_a_moment_is_struck_or_refused(name, site):
    fault = scaled(site, name)
    if site not in OPTIMIZERS[name].slots:
        reason = refused(fault, name)
        assert reason.startswith(f"fault.site={site}: optim.name={name} keeps no such array; allowed: ")
        assert "adamw" in reason and f", {name}" not in reason.split("optim.name=")[2]
        return
    struck = trial(fault, name=name)
    fault.check(facts_of(struck))
    run, clean = runs(name)
    number, last = run.pack.planned.index(struck), len(run.pack.planned) - 1
    (event,) = run.result.events[number]
    assert event.site == site and event.changed and event.step == START
    assert engine.same_bits(run[0], run[number]) != [] and run.result.masked_step[number] is None
    assert [engine.same_bits(run[i], clean[i]) for i in (0, last)] == [[], []]


def test_the_reason_names_what_is_allowed():
    fault = Value(start=START, site=Site.MOMENT_2)
    assert "allowed: moment_1, a site that is no moment, or optim.name=" in refused(fault, "lion")
    assert "allowed: a site that is no moment, or optim.name=" in refused(fault, "adafactor")


@every_optimizer
def test_a_missed_update_leaves_all_that_belongs_to_the_shard(name):
    fault = MissedUpdate(start=START, tensor="blocks.0.*")
    if not OPTIMIZERS[name].slots:
        reason = refused(fault, name)
        assert (
            reason.startswith(f"optim.name={name}: keeps no moment element by element")
            and "allowed: adamc, adamw, " in reason
        )
        return
    before, after, golden = {}, {}, {}
    trials = [trial(name=name), trial(fault, name=name)]

    def watch(pack):
        step = pack.optimizer.step
        arrays = {
            "weights": lambda: pack.weights,
            **{s: lambda s=s: pack.optimizer.slot(s) for s in pack.optimizer.slots},
        }

        def watching(*arguments, **options):
            if int(pack.optimizer.updates[0]) == START:
                before.update({key: array()[1].clone() for key, array in arrays.items()})
            norms = step(*arguments, **options)
            if int(pack.optimizer.updates[0]) == START + 1:
                golden.update({key: array()[0].clone() for key, array in arrays.items()})
            return norms

        pack.optimizer.step = watching
        done = pack.row_steps.done

        def after_a_step(pack_step):
            if pack_step.steps == START:
                after.update({key: array()[1].clone() for key, array in arrays.items()})
            done(pack_step)

        pack.row_steps.done = after_a_step

    run = engine.run(trials, prepare=watch)
    assert run.result.changes[1] == 1
    layout = run.pack.layout
    for key in before:
        for scaled in layout.tensors:
            whole = {
                when: layout.view(values[key][None], scaled.name)
                for when, values in (("before", before), ("after", after), ("golden", golden))
            }
            as_before, as_golden = (torch.equal(whole["after"], whole[when]) for when in ("before", "golden"))
            if name == "muon" and key == "moment_2" and scaled.kind in MATRICES:
                assert not whole["golden"].any() and not whole["after"].any()
                continue
            assert (as_before, as_golden) == (
                (True, False) if scaled.name.startswith("blocks.0.") else (False, True)
            ), key


@pytest.mark.parametrize(
    "arguments",
    [["fault=moment_bit", "optim.name=lars"], ["fault=moment_bit", "optim.name=adafactor", "fault.site=moment_1"]],
)
def test_a_sweep_refuses_them_before_it_trains(arguments):
    with pytest.raises(ConfigError) as error:
        composer().trial(arguments)
    assert "keeps no such array" in str(error.value)


def test_a_sweep_takes_those_that_are_there():
    found = composer().trial(["fault=moment_bit", "optim.name=lars", "fault.site=moment_1"])
    assert found.optim.name == "lars"

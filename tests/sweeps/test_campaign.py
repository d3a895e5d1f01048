"""Campaigns as a user runs them: what is drawn and planned, what is stored, and that it can be done again."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from analysis.reading.open_sweep import fault_events
from harness.config import Model, trial_from_dict
from harness.model.outline import tap_shapes
from harness.model.scaling import tensor_table
from harness.storage.store import open_store
from harness.storage.stored import read_packs
from injectors import fault_types
from sweeps.planning.packs import PackPlan
from sweeps.running.job import Finished, train_pack_safely
from tests.jobs import job_of
from tests.sweeps import command
from tests.sweeps.traps import recorded

TENSORS = ("weight", "reduced_gradient", "moment_1", "moment_2", "update", "gradient", "clipped_gradient")
SITES = (*TENSORS, "activation", "activation_gradient", "learning_rate")
SAMPLES = 5
FLIPS = ("fault=bit_flip", "fault.start=2", "fault.until=4", "pack.size=auto")
EVERYWHERE = (*FLIPS, f"fault.site={','.join(SITES)}")
DRAWN = (*EVERYWHERE, "fault.seed=10")  # of these some are masked, and some break their run
SHAPES = {row.name: row.shape for row in tensor_table(Model(width=16, depth=1, head_dim=8, context=16), 32)}
TAPS = tap_shapes(Model(width=16, depth=1, head_dim=8, context=16), sequences=2, vocabulary=32)
WEIGHTS = sum(math.prod(shape) for shape in SHAPES.values())


@dataclass(frozen=True)
class Stored:
    """One trial as the store has it."""

    config: dict[str, Any]
    events: list[dict[str, Any]]
    masked_step: int | None
    changes: int

    @property
    def fault(self) -> dict[str, Any]:
        return self.config["fault"]

    @property
    def address(self) -> tuple:
        return tuple(self.fault[name] for name in ("tensor", "element", "bit", "start"))


def stored(out: Path) -> dict[str, Stored]:
    """Every trial by its id."""
    names = ("ids", "trials", "faults", "masked_step", "changes")
    rows = [row for pack in read_packs(out) for row in zip(*(pack.attributes[name] for name in names), strict=True)]
    return {trial: Stored(*values) for trial, *values in rows}


def drawn(out: Path, name: str = "bit_flip") -> dict[str, Stored]:
    """The faults of that name."""
    return {trial: values for trial, values in stored(out).items() if values.fault["name"] == name}


def by_site(trials: dict[str, Stored]) -> dict[str, list[Stored]]:
    found = defaultdict(list)
    for trial in trials.values():
        found[trial.fault["site"]].append(trial)
    return found


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    """A fixture that runs the command in this process leaves the number of threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five faults at each site."""
    out = tmp_path_factory.mktemp("campaign") / "out"
    sweep(out, *DRAWN, f"fault.samples={SAMPLES}")
    return out


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(results, what was printed) of faults of which many do nothing, or nothing that lasts."""
    out = tmp_path_factory.mktemp("stuck") / "out"
    given = ["fault.model=stuck_at_0", "fault.site=moment_1,moment_2,update,gradient", "fault.field=mantissa"]
    given.append("fault.seed=1")  # of these some change a value and are rounded away
    return out, sweep(out, *FLIPS, *given, "fault.samples=16", "train.steps=8", "campaign.envelope=0")


@pytest.fixture
def copied(campaign: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(campaign, tmp_path / "out"))


def sweep(out: Path, *arguments: str) -> str:
    """What the command prints, once it has ended well; of several values of a key the last holds."""
    last = {text.partition("=")[0]: text for text in arguments}
    ended = command.call(*command.tiny(*last.values(), f"out={out}"))
    assert (ended.status, ended.err) == (0, "")
    return ended.out


# --- what is drawn -----------------------------------------------------------------------------------------------


def test_each_description_gives_that_many_faults_inside_of_it(campaign: Path) -> None:
    found = by_site(drawn(campaign))
    assert {site: len(trials) for site, trials in found.items()} == dict.fromkeys(SITES, SAMPLES)
    for site, trials in found.items():
        shapes = TAPS if site.startswith("activation") else SHAPES if site in TENSORS else {"learning_rate": ()}
        assert len({trial.address for trial in trials}) == SAMPLES
        for trial in trials:
            tensor, element, bit, start = trial.address
            assert 0 <= element < math.prod(shapes[tensor]) and 0 <= bit < 32 and 2 <= start <= 4
            assert trial.fault["samples"] is None and trial.fault["until"] is None
            (event,) = trial.events  # what was drawn is what was struck
            assert (event["site"], event["tensor"], event["bit"], event["step"]) == (site, tensor, bit, start)
            assert element == (np.ravel_multi_index(event["index"], shapes[tensor]) if event["index"] else 0)
    assert len({trial.fault["start"] for trial in drawn(campaign).values()}) == 3


def test_what_the_description_leaves_open_alone_is_drawn(tmp_path: Path) -> None:
    """Not the field, the format, the layer and the step."""
    given = [
        "fault.tensor=*.attention.*",
        "fault.layer=1",
        "fault.field=exponent",
        "fault.format=bf16",
        "fault.start=3",
    ]
    whole = ["fault.samples=12", "campaign.envelope=0", "pack.size=auto"]
    sweep(tmp_path, "fault=gradient_bit", "model.depth=2", "fault.bit=null", *given, *whole)
    found = list(drawn(tmp_path, "gradient_bit").values())
    assert len(found) == 12
    assert {re.sub(r"[^.]+$", "", trial.fault["tensor"]) for trial in found} == {"blocks.1.attention."}
    assert {trial.fault["bit"] for trial in found} <= set(range(7, 15)) and len({t.fault["bit"] for t in found}) > 2
    assert {trial.fault["start"] for trial in found} == {3}


def test_the_same_command_trains_nothing(copied: Path) -> None:
    before = command.tree(copied)
    out = sweep(copied, *DRAWN, f"fault.samples={SAMPLES}")
    assert "58 trials asked for, 1 golden twin added, 59 complete already: 0 to train in 0 packs" in out
    assert command.tree(copied) == before


def test_more_samples_go_on_from_fewer(copied: Path) -> None:
    few = stored(copied)
    out = sweep(copied, *DRAWN, "fault.samples=8")
    assert "88 trials asked for, 1 golden twin added, 59 complete already: 30 to train" in out
    assert recorded(copied) == sorted(stored(copied)) and len(stored(copied)) == 89
    assert few.items() <= stored(copied).items()
    assert {len(trials) for trials in by_site(drawn(copied)).values()} == {8}


def test_another_seed_draws_others(copied: Path) -> None:
    """The fault's own, or that of the whole trial: both mean the same faults."""

    def addresses(seed: int) -> set[tuple]:
        trials = [trial for trial in drawn(copied).values() if trial.config["seed"] == seed]
        return {(trial.fault["site"], *trial.address) for trial in trials}

    first = addresses(0)
    sweep(copied, *EVERYWHERE, f"fault.samples={SAMPLES}", "fault.seed=1")
    sweep(copied, *EVERYWHERE, f"fault.samples={SAMPLES}", "seed=1")
    others = addresses(1)
    assert len(first) == len(others) == 50 and first | others == addresses(0)
    assert {site for site, *_ in first & others} <= {"learning_rate"}  # which has no more than 96


def test_sites_draw_independently(campaign: Path) -> None:
    """No address of one site is that of another, as nearly all would be if they shared their draws."""
    found = by_site(drawn(campaign))
    for sites in (TENSORS, ("activation", "activation_gradient")):
        assert len({trial.address for site in sites for trial in found[site]}) == SAMPLES * len(sites)
        assert len({trial.fault["element"] for site in sites for trial in found[site]}) >= SAMPLES * len(sites) - 2


# --- the clean envelope ------------------------------------------------------------------------------------------


def test_each_recipe_has_an_envelope(tmp_path: Path) -> None:
    """Shared by its seeds and campaigns, and from the earliest step of those on."""
    grid = ["model.width=16,32", "seed=range(3)", "optim.clip=null,1.0", "fault.samples=1", "campaign.envelope=4"]
    sweep(tmp_path, *grid, "fault=bit_flip", "fault.start=3,2", "fault.site=weight,update", "pack.size=auto")
    clean = [trial.config for trial in drawn(tmp_path, "last_bit").values()]
    recipes = Counter((config["model"]["width"], config["optim"]["clip"]) for config in clean)
    assert recipes == {(width, clip): 6 for width in (16, 32) for clip in (None, 1.0)}  # two for each of three seeds
    assert Counter(config["seed"] for config in clean) == dict.fromkeys(range(3), 8)
    assert {(c["fault"]["site"], c["fault"]["bit"], c["fault"]["start"]) for c in clean} == {("weight", 0, 2)}
    assert len(drawn(tmp_path)) == 2 * 3 * 2 * 2 * 2


def test_no_envelope_if_none_is_wanted(tmp_path: Path) -> None:
    sweep(tmp_path, *FLIPS, "fault.samples=3", "campaign.envelope=0")
    assert sorted(trial.fault["name"] for trial in stored(tmp_path).values()) == ["bit_flip"] * 3 + ["none"]


# --- the plan ----------------------------------------------------------------------------------------------------


def test_the_plan_counts_the_population(empty: Path) -> None:
    """Elements times bits times steps; Wilson's interval is widest at one half, z / sqrt(n + z^2)."""
    ended = command.call(*command.tiny(*DRAWN, "fault.samples=40", "plan=true"))
    assert (ended.status, ended.err, list(empty.iterdir())) == (0, "", [])
    activations = sum(math.prod(shape) for shape in TAPS.values())
    sizes = dict.fromkeys(TENSORS, WEIGHTS) | dict.fromkeys(("activation", "activation_gradient"), activations)
    half = 1.959964 / (2 * math.sqrt(40 + 1.959964**2))
    for site in SITES:
        size = sizes.get(site, 1) * 32 * 3
        share = "42%" if site == "learning_rate" else "under 1%"
        words = f"the 95% interval of a share of them will be at most {2 * half:.3f} wide"
        assert f"campaign bit_flip at {site}: 40 of {size:,} faults ({share}); {words}\n" in ended.out
    assert "408 trials asked for, 1 golden twin added, 0 complete already: 409 to train" in ended.out


def test_the_plan_of_a_narrow_description(empty: Path) -> None:
    given = ["fault.tensor=head", "fault.field=sign", "fault.format=fp16", "fault.samples=256", "campaign.width=0.1"]
    ended = command.call(*command.tiny("fault=weight_bit", *given, "fault.bit=null", "fault.start=2", "plan=true"))
    assert (
        "campaign weight_bit at weight: 256 of 512 faults (50%); the 95% interval of a share of them will be at most"
        in ended.out
    )
    assert "264 trials asked for, 1 golden twin added" in ended.out and not list(empty.iterdir())


# --- what is stored ----------------------------------------------------------------------------------------------


def test_fifty_faults_of_every_site_are_replayed_from_their_records(campaign: Path, tmp_path: Path) -> None:
    """Every loss bit for bit, and every event value for value."""
    first = drawn(campaign)
    records = ",".join(f"{campaign}:{trial}" for trial in first)
    sweep(tmp_path / "again", "fault=replay", f"fault.record={records}", "pack.size=auto")
    again = drawn(tmp_path / "again", "replay")
    assert len(first) == len(again) == 50

    def left(out: Path, trials: dict[str, Stored]) -> Counter:
        losses = command.results(out).loss
        return Counter(
            (json.dumps(trial.events, sort_keys=True), trial.masked_step, losses.sel(trial=name).values.tobytes())
            for name, trial in trials.items()
        )

    assert left(campaign, first) == left(tmp_path / "again", again)
    assert all(trial.events for trial in again.values())


def test_a_study_does_a_trial_of_its_own_again(empty: Path) -> None:
    """As documented: what the study says of other faults, its own `fault.start` among it, is not in the way."""
    given = ["study=campaign", "train.steps=26"]
    few = ["fault.site=weight", "fault.until=24", "fault.samples=3", "campaign.envelope=0"]
    assert command.call(*command.tiny(*given, *few, "out=first")).status == 0
    # In 26 steps the study's own start, 20 of 100, is 5.
    trial, first = next((n, found) for n, found in drawn(empty / "first").items() if 5 < found.fault["start"] != 20)
    replay = ["fault=replay", f"fault.record=first:{trial}", "out=again"]
    (line,) = command.refused(empty, *command.tiny(*given, *replay, "fault.start=20"))
    assert line == f"error: fault.start=20: but fault.record has {first.fault['start']}; allowed: leave it out"
    ended = command.call(*command.tiny(*given, *replay))
    assert (ended.status, ended.err) == (0, "")
    (again,) = drawn(empty / "again", "replay").values()
    assert again.events == first.events != []


def test_a_trial_of_a_campaign_is_that_trial_alone(campaign: Path, tmp_path: Path) -> None:
    """The same config gives the same id; in a pack of two it has a row of its own from the first step to the last."""
    found, shared = drawn(campaign), command.results(campaign)
    masked = [name for name, trial in found.items() if trial.masked_step is not None]
    lost = shared.trial.values[~np.isnan(shared.nonfinite_step.values)].tolist()
    chosen = {*masked[:2], *lost[:1]}
    for site in ("activation", "update"):
        chosen.add(next(n for n, trial in found.items() if trial.fault["site"] == site and n not in chosen))
    assert len(chosen) == 5
    for name in chosen:
        given = [f"fault.{key}={found[name].fault[key]}" for key in ("site", "tensor", "element", "bit", "start")]
        sweep(tmp_path, "fault=bit_flip", *given, "pack.size=2")
    assert drawn(tmp_path) == {name: found[name] for name in chosen}
    alone = command.results(tmp_path)
    assert not command.differing(alone, shared.sel(trial=alone.trial))


@pytest.mark.parametrize("which", ["campaign", "stuck"])
def test_no_trial_shows_that_it_has_shared(campaign: Path, stuck: tuple[Path, str], tmp_path: Path, which: str) -> None:
    """In a pack without its golden twin nothing is forked, and nobody is found to be masked and let go."""
    out = campaign if which == "campaign" else stuck[0]
    open_store(tmp_path, "grid")
    trials = [trial_from_dict(trial.config, fault_types()) for trial in drawn(out).values()]
    for two in zip(trials[::2], trials[1::2], strict=True):
        assert isinstance(train_pack_safely(job_of(PackPlan(two, frozenset()), tmp_path, block=2)), Finished)
    alone, shared = command.results(tmp_path), command.results(out)
    assert not command.differing(alone, shared.sel(trial=alone.trial))
    assert np.isnan(alone.masked_step).all() and not np.isnan(shared.masked_step).all()


def test_idle_faults_are_counted_and_masked_ones_known(stuck: tuple[Path, str]) -> None:
    """Bits that are stuck at what they were are idle; whoever is masked is its golden twin from then on."""
    out, said = stuck
    found, events = drawn(out), fault_events(out).set_index("trial")
    idle = [name for name in found if events.before[name] == events.after[name]]
    assert idle == [name for name, trial in found.items() if not trial.changes]
    assert f"{len(idle)} faults never fired, or wrote the value that was there\n" in said
    assert all(found[name].masked_step == found[name].fault["start"] for name in idle)
    masked = [name for name, trial in found.items() if trial.masked_step is not None]
    assert 0 < len(idle) < len(masked) < len(found)
    losses, golden = command.results(out).loss, next(name for name, trial in stored(out).items() if not trial.events)
    for name in found:
        is_equal = losses.sel(trial=name).values == losses.sel(trial=golden).values
        assert is_equal[: found[name].fault["start"]].all()
        assert name not in masked or is_equal[found[name].masked_step :].all()

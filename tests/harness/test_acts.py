"""Which parts of a recipe acted, how often, and which could not."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest

from harness.config import Trial, sections
from harness.testing import engine
from harness.training.activation_counts import idle_parts, parts_of

STEPS = 12


def with_section(trial: Trial, section: str, /, **fields: Any) -> Trial:
    parts = {part: trial.section(part) for part in sections()}
    parts[section] = dataclasses.replace(parts[section], **fields)
    return Trial.of(parts, fault=trial.fault, mitigation=trial.mitigation, seed=trial.seed)


def different(count: int, **fields: Any) -> list[Trial]:
    """Trials that differ, none of them clipped."""
    return [with_section(trial, "optim", clip=None) for trial in engine.different(count, steps=STEPS, **fields)]


def counted(trials: list[Trial], **options: Any) -> list[dict[str, int]]:
    return engine.run(trials, **options).result.acts


# --- how often ---------------------------------------------------------------------------------------------------


def test_clipping_by_norm_is_counted_where_the_norm_was_above() -> None:
    plain = different(4)
    norms = engine.run(plain).signals["grad_norm"]
    limits = [*np.median(norms[:3], axis=1).tolist(), 1e9]
    trials = [with_section(t, "optim", clip=limit) for t, limit in zip(plain, limits, strict=True)]
    run = engine.run(trials)
    above = [int((norm > t.optim.clip).sum()) for norm, t in zip(run.signals["grad_norm"], trials, strict=True)]
    assert run.result.acts == [{"optim.clip": count} for count in above]
    assert above[-1] == 0 and all(0 < count < STEPS for count in above[:3]), above


def test_a_part_that_is_off_is_not_there() -> None:
    off, on = different(2)
    on = with_section(on, "optim", clip=0.1)
    assert counted([off, on]) == [{}, {"optim.clip": STEPS}]


SIZES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # part: (section, fields with which it acts at some step, fields with which it never does)
    "optim.clip_value": ("optim", {"clip_value": 1e-4}, {"clip_value": 1e9}),
    "optim.clip_tensor": ("optim", {"clip_tensor": 1e-2}, {"clip_tensor": 1e9}),
    "rank_clip.limit": ("rank_clip", {"limit": 1e-2}, {"limit": 1e9}),
    "optim.clip_update": ("optim", {"clip_update": 0.5}, {"clip_update": 1e9}),
    "zclip.threshold": ("zclip", {"threshold": 0.01, "warmup": 3}, {"threshold": 1e9, "warmup": 3}),
    "adagc.threshold": ("adagc", {"threshold": 0.5, "warmup": 3}, {"threshold": 1e9, "warmup": 3}),
    "model.qk_clip": ("model", {"qk_clip": 1e-3}, {"qk_clip": 1e9}),
    "model.swiglu_clamp": ("model", {"swiglu_clamp": 0.1}, {"swiglu_clamp": 1e9}),
    "screen.rarity": ("screen", {"rarity": 1.0}, {"rarity": 50.0}),
}
UNLIKE = {
    "adagc.threshold": "its warm-up clips too, at a norm of 1",
    "optim.clip_update": "it takes AdamW's equations one by one, and the recipe a fused kernel",
    "model.swiglu_clamp": "on a CPU SiLU rounds by where an element lies, which the clamp changes",
}


@pytest.mark.parametrize("part", SIZES)
def test_each_part_is_counted_at_the_steps_at_which_it_acted(part: str) -> None:
    """And the losses are those of the recipe without it, bit for bit, exactly where the count is zero."""
    section, acts, never = SIZES[part]
    plain = different(2, **({"activation": "swiglu"} if part == "model.swiglu_clamp" else {}))
    runs = [engine.run([with_section(t, section, **fields) for t in plain]) for fields in (acts, never)]
    digest = engine.run(plain).result.digest
    for run, is_acting in zip(runs, (True, False), strict=True):
        counts = [own[part] for own in run.result.acts]
        assert all(0 < count <= STEPS for count in counts) if is_acting else counts == [0, 0]
        is_equal = [own == other for own, other in zip(run.result.digest, digest, strict=True)]
        assert part in UNLIKE or is_equal == [not is_acting] * 2


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("spam", {"interval": 4, "grace": 4}, {"spam.threshold": 0, "spam.interval": STEPS // 4}),
        ("spam", {"interval": 5, "grace": 2, "threshold": 1e-3}, {"spam.interval": STEPS // 5}),
        ("stable_spam", {"interval": 5}, {"stable_spam.interval": STEPS // 5}),
        ("stable_spam", {"interval": STEPS + 1}, {"stable_spam.interval": 0}),
    ],
)
def test_resets_are_counted(name: str, fields: dict, expected: dict[str, int]) -> None:
    trials = [with_section(t, "optim", name=name) for t in different(2)]
    for own in counted([with_section(t, name, **fields) for t in trials]):
        assert expected.items() <= own.items()
        if fields.get("threshold", 1e9) < 1:
            assert own["spam.threshold"] > STEPS // 2, "in all steps but those of the grace"


# --- what cannot act ---------------------------------------------------------------------------------------------

CANNOT: dict[str, tuple[dict[str, dict[str, Any]], str, str]] = {
    "a reset that never comes": (
        {"optim": {"name": "spam"}, "spam": {"interval": 500}},
        "spam.interval",
        "spam.interval=500: nothing is reset in 100 steps",
    ),
    "grace for the whole run": (
        {"optim": {"name": "spam"}, "spam": {"grace": 20}},
        "spam.threshold",
        "spam.grace=20: nothing is clipped in 100 steps with a reset every 20",
    ),
    "Stable-SPAM's reset": (
        {"optim": {"name": "stable_spam"}, "stable_spam": {"interval": 1000}},
        "stable_spam.interval",
        "stable_spam.interval=1000: nothing is reset in 100 steps",
    ),
    "a warm-up longer than the run": (
        {"adagc": {"threshold": 1.04, "warmup": 100}},
        "adagc.threshold",
        "adagc.warmup=100: gradients are clipped by global norm alone in 100 steps, which are all warm-up",
    ),
    "ZClip's": (
        {"zclip": {"threshold": 2.5, "warmup": 100}},
        "zclip.threshold",
        "zclip.warmup=100: nothing is clipped in 100 steps, which are all warm-up",
    ),
    "a ramp of the whole run": (
        {"model": {"placement": "branchnorm", "branch_steps": 100}},
        "model.branch_steps",
        "model.branch_steps=100: branches still grow at the last of 100 steps",
    ),
    "half in place of a quarter": (
        {"model": {"placement": "mix", "depth": 2}},
        "model.mix",
        "model.mix=0.25: of model.depth=2 one block is post-LN, a share of 0.5; it takes model.depth >= 4",
    ),
    "muP at its base": (
        {"model": {"parametrization": "mup", "width": 16, "base_width": 16}},
        "model.parametrization",
        "model.parametrization=mup: is the standard one at its base sizes, model.base_width=16, model.base_head_dim=8",
    ),
    "CompleteP at its base": (
        {"model": {"parametrization": "completep", "width": 16, "base_width": 16, "depth": 2, "base_depth": 2}},
        "model.parametrization",
        "is the standard one at its base sizes, model.base_width=16, model.base_head_dim=8, model.base_depth=2",
    ),
    "all warm-up": (
        {"schedule": {"warmup": 100}},
        "schedule.decay",
        "schedule.decay=cosine: the warm-up takes all 100 steps",
    ),
    "nothing grows": (
        {"schedule": {"sequence_start": 8}},
        "schedule.sequence_start",
        "schedule.sequence_start=8: is the full size, so that nothing grows",
    ),
    "no narrower format": (
        {"train": {"norms": "products"}},
        "train.norms",
        "train.norms=products: train.precision=fp32 has no narrower format",
    ),
    "one rank": (
        {"train": {"accumulation": "bf16"}},
        "train.accumulation",
        "train.accumulation=bf16: with train.ranks=1 there is nothing to add up",
    ),
}


def configured(parts: dict[str, dict[str, Any]]) -> Trial:
    trial = engine.trial(steps=100, warmup=5)
    for name, fields in parts.items():
        trial = with_section(trial, name, **fields)
    return trial


@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_act_is_told_with_its_key_and_the_number(case: str) -> None:
    parts, key, words = CANNOT[case]
    found = idle_parts(configured(parts))
    assert list(found) == [key] and words in found[key]


NUMBERS = {
    "spam": ({"optim": {"name": "spam"}}, []),
    "stable_spam": ({"optim": {"name": "stable_spam"}}, []),
    "adagc": ({"adagc": {"threshold": 1.04}}, []),
    "zclip": ({"zclip": {"threshold": 2.5}}, []),
    "branchnorm": ({"model": {"placement": "branchnorm"}}, []),
    "mix": ({"model": {"placement": "mix", "depth": 4}}, []),
    "mup": ({"model": {"parametrization": "mup", "base_width": 8}}, []),
    "completep": ({"model": {"parametrization": "completep", "base_width": 16, "base_depth": 1}}, []),
    "nothing": ({}, []),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("steps", [100, 200, 10_000])
def test_by_default_what_has_a_time_scale_acts_in_short_and_long_runs(name: str, steps: int) -> None:
    trial = with_section(configured(NUMBERS[name][0]), "train", steps=steps)
    assert idle_parts(trial) == {}


def test_time_scales_follow_the_run_and_the_authors_numbers_are_a_field_away() -> None:
    from harness.model.placements import branch_steps
    from harness.optim.clippers.adagc import warmup_steps
    from harness.optim.optimizers.spam import Spam, grace_of, warmup_of
    from harness.optim.optimizers.stable_spam import StableSpam

    def times(trial: Trial) -> list[int]:
        readers = (Spam.interval_of, warmup_of, grace_of, StableSpam.interval_of, warmup_steps, branch_steps)
        return [read(trial) for read in readers]

    short, long = (with_section(engine.trial(), "train", steps=steps) for steps in (100, 2500))
    assert times(short) == [20, 6, 2, 40, 5, 25] and times(long) == [500, 150, 20, 1000, 125, 625]
    own = with_section(short, "spam", interval=500, warmup=150, grace=20)
    own = with_section(with_section(own, "stable_spam", interval=1000), "adagc", warmup=100)
    assert times(with_section(own, "model", branch_steps=7)) == [500, 150, 20, 1000, 100, 7]


def test_parts_are_those_that_are_switched_on() -> None:
    trial = with_section(engine.trial(), "optim", name="spam", clip=1.0, clip_update=1.0)
    trial = with_section(trial, "screen", entropy=0.5)
    assert parts_of(trial) == ["optim.clip", "spam.threshold", "spam.interval", "optim.clip_update", "screen.entropy"]


def test_counts_survive_a_checkpoint() -> None:
    """A pack that is killed and goes on has the counts of one that was not: test_checkpoints compares whole results."""
    trials = [with_section(t, "optim", clip=0.6) for t in different(2)]
    pack = engine.pack_of(trials)
    pack.acts.count("optim.clip", pack.active)
    other = engine.pack_of(trials)
    other.restore(copy.deepcopy(pack.whole_state()))
    assert np.array_equal(other.acts.state()["optim.clip"], [1, 1])

"""What faults refuse: the key, its value and what is allowed, a line each; and what they allow."""

from __future__ import annotations

import re
from typing import Any

import pytest

from harness.config import ConfigError, Fault, checked, shown
from harness.faults.facts import facts_of
from harness.training.sites import Site
from injectors import fault_types
from injectors.batch import DuplicatedBatch, Repetition
from injectors.ranks import DroppedRank, MissedUpdate, Reduction, StaleGradient
from injectors.realistic import RealisticSDC
from injectors.schedule import WarmupSkipped
from injectors.value import Value
from tests.injectors.spies import trial

FUSED, ALONE = {"attention": "fused"}, {"ranks": 1}
ACTIVATION: Any = {"site": Site.ACTIVATION}
IN_BLOCKS: Any = {"site": Site.MOMENT_2, "block": 64}
# (fault, fields of its trial, key -> what is allowed in its place)
REFUSED: list[tuple[Fault, dict[str, Any], dict[str, str]]] = [
    (Value(tensor="tail*"), {}, {"tensor": ".*embedding, .*head"}),
    (Value(tensor="blocks.*.tail", **ACTIVATION), {}, {"tensor": ".*blocks.1.residual, .*logits"}),
    (Value(tensor="head", site=Site.LEARNING_RATE), {}, {"tensor": "a glob over learning_rate"}),
    (Value(tensor="blocks.*", layer=2), {}, {"layer": "0 to 1$"}),
    (Value(tensor="head", layer=0), {}, {"layer": "null$"}),
    (Value(tensor="*.up", element=1024), {}, {"element": "0 to 1023$"}),
    (Value(element=8), {}, {"element": "0 to 7$"}),
    (Value(element=3, elements=2), {}, {"elements": "1$"}),
    (Value(tensor="head", elements=1025), {}, {"elements": "1 to 1024$"}),
    (Value(bit=16, format="fp16"), {}, {"bit": "0 to 15$"}),
    (Value(bit=8, format="fp8_e4m3"), {}, {"bit": "0 to 7$"}),
    (Value(bit=30, bits=3), {}, {"bit": "0 to 29$"}),
    (Value(field="sign", bits=2), {}, {"bits": "1 to 1$"}),
    (Value(bits=17, format="bf16"), {}, {"bits": "1 to 16$"}),
    (Value(site=Site.GRADIENT, rank=2), {}, {"rank": "0 to 1$"}),
    (Value(tensor="*.scores", **ACTIVATION), FUSED, {"tensor": ".*model.attention=explicit"}),
    (Value(tensor="head", elements=5000, bits=2, field="sign", rank=7), {}, {"elements": "", "bits": "", "rank": ""}),
    (Value(format="fp32", **IN_BLOCKS), {}, {"block": "null, or a narrower format"}),
    (Value(format="fp16", **IN_BLOCKS | {"site": Site.UPDATE}), {}, {"block": ""}),
    (Value(format="fp16", **IN_BLOCKS | {"site": Site.LEARNING_RATE}), {}, {"block": ""}),
    (RealisticSDC(tensor="tail*"), {}, {"tensor": ".*embedding"}),
    (RealisticSDC(tensor="tail*", **ACTIVATION), {}, {"tensor": ".*logits"}),
    (RealisticSDC(tensor="blocks.*", layer=2), {}, {"layer": "0 to 1$"}),
    (RealisticSDC(site=Site.GRADIENT, rank=2), {}, {"rank": "0 to 1$"}),
    (StaleGradient(start=4, rank=2), {}, {"rank": "0 to 1$"}),
    (StaleGradient(start=4, late=5), {}, {"late": "1 to fault.start=4$"}),
    (DroppedRank(start=4, rank=7), {}, {"rank": "0 to 1$"}),
    (DroppedRank(start=4, rescale=True), ALONE, {"rescale": "false"}),
    (MissedUpdate(start=4, tensor="tail*"), {}, {"tensor": ".*embedding"}),
    (MissedUpdate(start=4, tensor="blocks.*", layer=5), {}, {"layer": "0 to 1$"}),
    (MissedUpdate(start=4, shards=3, shard=3), {}, {"shard": "0 to 2$"}),
    (MissedUpdate(start=4, tensor="final_norm", shards=17, shard=20), {}, {"shards": "1 to 16$"}),
    (Repetition(pattern=9), {}, {"pattern": "1 to 8$"}),
    (Repetition(length=9), {}, {"length": "1 to 8$"}),
    (Repetition(pattern=10, length=11), {}, {"pattern": "", "length": ""}),
    (DuplicatedBatch(start=3, late=4), {}, {"late": "1 to fault.start=3$"}),
    (WarmupSkipped(start=6), {"warmup": 6}, {"start": "0 to 5$"}),
    (WarmupSkipped(start=1), {"warmup": 1}, {"start": "0 to 0$"}),
    (WarmupSkipped(start=0), {"warmup": 0}, {"start": "a schedule with a warm-up$"}),
    (WarmupSkipped(start=0), {"warmup": None}, {"start": ""}),  # 5% of 8 steps
]
ALLOWED: list[tuple[Fault, dict[str, Any]]] = [
    (Value(start=1, tensor="*.up", element=1023), {}),
    (Value(start=1, tensor="head", elements=1024), {}),
    (Value(start=1, bit=15, format="fp16"), {}),
    (Value(start=1, bit=29, bits=3), {}),
    (Value(start=1, field="exponent", bits=8), {}),
    (Value(start=1, bit=31, format="fp16", model="zero"), {}),  # it has no bits
    (Value(start=1, site=Site.GRADIENT, rank=1), {}),
    (Value(start=1, tensor="*.query", **ACTIVATION), FUSED),
]
OUT_OF_RANGE = {
    ("rare_tokens", "share"): (0.0, 1.5),
    ("rare_tokens", "tokens"): (0,),
    ("realistic_sdc", "single"): (1.5, -0.1),
    ("realistic_sdc", "nonfinite"): (1.5, -0.1),
    ("realistic_sdc", "most"): (1, 9),
    ("realistic_sdc", "elements"): (0,),
    ("realistic_sdc", "site"): ("learning_rate",),
    ("dropped_rank", "rank"): (-1,),
    ("reduction", "order"): ("random",),
    ("schedule_offset", "offset"): (1.5,),
}


@pytest.mark.parametrize(
    ("fault", "fields", "refused"), REFUSED, ids=[f"{type(case[0]).__name__}: {', '.join(case[2])}" for case in REFUSED]
)
def test_what_a_trial_cannot_have_is_refused(fault: Fault, fields: dict[str, Any], refused: dict[str, str]) -> None:
    """All that is wrong at once."""
    with pytest.raises(ConfigError) as caught:
        fault.check(facts_of(trial(fault, **fields)))
    for reason, (key, allowed) in zip(caught.value.reasons, refused.items(), strict=True):
        assert reason.startswith(f"fault.{key}={shown(getattr(fault, key))}: "), reason
        assert re.search(f"; allowed: {allowed}", reason), reason


def test_one_rank_has_nothing_to_add() -> None:
    fault = Reduction(start=4)
    with pytest.raises(ConfigError, match=r"^train.ranks=1: .*; allowed with fault=reduction: 2 or more$"):
        fault.check(facts_of(trial(fault, **ALONE)))


@pytest.mark.parametrize(("fault", "fields"), ALLOWED)
def test_what_a_trial_can_have_is_allowed(fault: Fault, fields: dict[str, Any]) -> None:
    fault.check(facts_of(trial(fault, **fields)))


@pytest.mark.parametrize(("kind", "name"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused(kind: str, name: str) -> None:
    for value in OUT_OF_RANGE[kind, name]:
        with pytest.raises(ConfigError, match=rf"^fault.{name}={shown(value)}: .*; allowed: "):
            checked(f"fault.{name}", fault_types()[kind], name, value)

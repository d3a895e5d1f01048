"""Faults that cannot be: one line each, status 2, nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.sweeps import command

# (overrides, how the line begins after "error: ", what it holds)
CASES = {
    "tap that the model does not have": (
        ["fault=activation_bit", "fault.tensor=blocks.*.experts"],
        "fault.tensor=blocks.*.experts: matches no activation of this model",
        "blocks.0.attention.query",
    ),
    "activation in place of a tensor": (
        ["fault=weight_bit", "fault.tensor=blocks.*.residual"],
        "fault.tensor=blocks.*.residual: matches no tensor of this model",
        "allowed: a glob over embedding, blocks.0.attention.query",
    ),
    "layer that the model does not have": (
        ["fault=weight_bit", "fault.layer=3"],
        "fault.layer=3: no tensor of it matches fault.tensor=blocks.*",
        "allowed: 0 to 0",
    ),
    "layer of a tensor outside of them": (
        ["fault=weight_bit", "fault.tensor=head", "fault.layer=0"],
        "fault.layer=0: no tensor of it matches fault.tensor=head",
        "allowed: null",
    ),
    "scores that fused attention does not keep": (
        ["fault=large_logits", "model.attention=fused"],
        "fault.tensor=blocks.*.attention.scores: attention is fused",
        "allowed: other activations, or model.attention=explicit",
    ),
    "element out of range": (
        ["fault=gradient_bit", "fault.tensor=head", "fault.element=512"],
        "fault.element=512: beyond fault.tensor=head, whose smallest match has 512 elements",
        "allowed: 0 to 511",
    ),
    "element and elements": (
        ["fault=weight_bit", "fault.tensor=head", "fault.element=5", "fault.elements=2"],
        "fault.elements=2: but fault.element=5 is one",
        "allowed: 1",
    ),
    "more elements than there are": (
        ["fault=nan_gradient", "fault.tensor=final_norm", "fault.elements=17"],
        "fault.elements=17: more than fault.tensor=final_norm has",
        "allowed: 1 to 16",
    ),
    "bit beyond the representation": (
        ["fault=weight_bit", "fault.format=bf16", "fault.bit=16"],
        "fault.bit=16: beyond fault.format=bf16",
        "allowed: 0 to 15",
    ),
    "bits that leave the representation": (
        ["fault=weight_bit", "fault.bit=31", "fault.bits=2"],
        "fault.bit=31: fault.bits=2 from there leave fault.format=fp32",
        "allowed: 0 to 30",
    ),
    "more bits than the field": (
        ["fault=bit_flip", "fault.field=sign", "fault.bits=2"],
        "fault.bits=2: more than fault.field=sign has",
        "allowed: 1 to 1",
    ),
    "start after the end": (["fault=bit_flip", "fault.start=6"], "fault.start=6: after the last step", "0 to 5"),
    "rank beyond the ranks": (
        ["fault=nan_gradient", "fault.rank=2", "train.ranks=2"],
        "fault.rank=2: beyond train.ranks=2",
        "allowed: 0 to 1",
    ),
    "ranks that do not divide the batch": (["train.ranks=3"], "train.ranks=3: does not divide", "a divisor"),
    "later than there are steps": (
        ["fault=stale_gradient", "fault.late=3"],
        "fault.late=3: before the first step",
        "allowed: 1 to fault.start=2",
    ),
    "nothing to add": (["fault=reduction"], "train.ranks=1: nothing to add", "2 or more"),
    "no rank left": (["fault=dropped_rank", "fault.rescale=true"], "fault.rescale=true: no rank is left", "false"),
    "pattern longer than the context": (
        ["fault=repetition", "fault.pattern=17"],
        "fault.pattern=17: longer than model.context=16",
        "allowed: 1 to 16",
    ),
    "after the warm-up": (["fault=warmup_skipped"], "fault.start=2: after the warm-up of 2 steps", "allowed: 0 to 1"),
    "samples beyond the population": (
        ["fault=bit_flip", "fault.tensor=final_norm", "fault.samples=513"],
        "fault.samples=513: the description allows 512 different faults",
        "allowed: 1 to 512",
    ),
    "samples of several elements": (
        ["fault=bit_flip", "fault.samples=3", "fault.elements=2"],
        "fault.elements=2: a campaign draws single elements",
        "allowed with fault.samples: 1",
    ),
    "last start after the end": (
        ["fault=bit_flip", "fault.samples=3", "fault.until=6"],
        "fault.until=6: outside of the run after the start",
        "allowed: fault.start=2 to 5",
    ),
    "range of starts without samples": (
        ["fault=bit_flip", "fault.until=4"],
        "fault.until=4: only in a campaign",
        "allowed with fault.samples=null: null",
    ),
    "strata of bits that are not": (
        ["fault=value", "fault.model=nan", "fault.samples=3", "fault.stratify=bit"],
        "fault.stratify=bit: fault.model=nan changes no bits",
        "allowed: none, tensor, layer, step",
    ),
    "record that is not there": (
        ["fault=replay", "fault.record=nowhere.json"],
        "fault.record=nowhere.json: no such file",
        "allowed: a file that holds a record, or FOLDER:TRIAL",
    ),
    "results that are not there": (
        ["fault=replay", "fault.record=nowhere:0123"],
        "fault.record=nowhere:0123: does not exist",
        "allowed",
    ),
    "no record": (["fault=replay"], "fault.record=: no such file", "allowed: a file that holds a record"),
}


@pytest.mark.parametrize(("overrides", "start", "rest"), CASES.values(), ids=CASES)
def test_one_line(empty: Path, overrides: list[str], start: str, rest: str) -> None:
    given = overrides if any(text.startswith("fault.start") for text in overrides) else [*overrides, "fault.start=2"]
    if not any(text.startswith("fault=") for text in overrides):
        given = overrides
    (line,) = command.refused(empty, *command.tiny(*given))
    assert line.startswith(f"error: {start}")
    assert rest in line


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The record, as JSON, of a fault that a tiny sweep has trained."""
    from injectors.replay import record_of

    folder = tmp_path_factory.mktemp("recorded")
    assert command.call(*command.tiny("fault=weight_bit", "fault.start=2", f"out={folder}")).status == 0
    (store,) = list(folder.glob("store.zarr/*/zarr.json"))
    attributes = json.loads(store.read_text())["attributes"]
    row = next(i for i, trial in enumerate(attributes["trials"]) if trial["fault"]["kind"] != "none")
    fingerprint = attributes["corpus"]["fingerprint"]
    return json.dumps(record_of(attributes["trials"][row], attributes["faults"][row], fingerprint))


@pytest.mark.parametrize(
    ("elsewhere", "line"),
    [
        (["data.length=3000"], "fault.record: from another corpus (fingerprint "),
        (["model.width=32"], "model.width=32: but fault.record is from a trial with 16; allowed: 16"),
        (["train.batch=4"], "train.batch=4: but fault.record is from a trial with 2; allowed: 2"),
    ],
)
def test_record_of_something_else(empty: Path, recorded: str, elsewhere: list[str], line: str) -> None:
    (empty / "record.json").write_text(recorded)
    (found,) = command.refused(empty, *command.tiny("fault=replay", "fault.record=record.json", *elsewhere))
    assert found.startswith(f"error: {line}") and "allowed" in found


def test_file_that_is_no_record(empty: Path) -> None:
    (empty / "record.json").write_text('{"fault": 3}')
    (found,) = command.refused(empty, *command.tiny("fault=replay", "fault.record=record.json"))
    assert "no record (it lacks seed, corpus, shape, events)" in found and "allowed" in found

"""Campaigns over a model of the user's, and the user's runs as results folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis import fault_events, open_sweep, outcomes
from analysis.__main__ import main
from harness import ConfigError, attach
from tests.user_loop.loops import LOOPS, STEPS, Loop, attached, plain, same, train
from tests.user_loop.test_attach import counted, traces

SAMPLES = 12
FLIPS = {"name": "bit_flip", "start": 10, "until": 13}


def campaign(loop: Loop, out: Path, **options: Any) -> Any:
    def body(run: Any) -> None:
        for batch in run.steps(loop.loader()):
            run.observe(loop.body(batch))

    options = {"fault": FLIPS, "samples": SAMPLES, "steps": STEPS, **options}
    return attach.campaign(body, loop.model, loop.optimizer, loop.extra, out=out, **options)


@pytest.fixture(scope="module")
def flips(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Loop, Any]:
    out = tmp_path_factory.mktemp("campaign") / "flips"
    loop = plain()
    return out, loop, campaign(loop, out)


def test_a_campaign_is_an_ordinary_store(flips: Any) -> None:
    out, loop, told = flips
    losses = train(plain())
    assert (told.faults, told.stored) == (SAMPLES, 0) and same(loop.state(), plain().state()), "left as it was"
    assert traces(loop) == []
    sweep, events = open_sweep(out), fault_events(out)
    faulty = sweep.sel(trial=sweep["fault"] != "none")
    assert dict(sweep.sizes)["trial"] == SAMPLES + 1 == len(events) + 1
    golden = sweep.sel(trial=np.unique(faulty["golden"].values).item())
    assert np.array_equal(golden["loss"].values, np.float32(losses))
    address = events[["tensor", "index", "bit", "step"]].astype(str).agg("|".join, axis=1)
    assert address.nunique() == SAMPLES and set(events["step"]) == {10, 11, 12, 13}
    for trial, begin in zip(faulty["trial"].values, faulty["fault_start"].values, strict=True):
        shared = sweep["loss"].sel(trial=trial).values[: int(begin)]
        assert np.array_equal(shared, golden["loss"].values[: int(begin)])


def test_a_fork_is_a_whole_run(flips: Any) -> None:
    """Struck alone in a run from its first step, a fault of the campaign does the same, bit for bit."""
    out, _, _ = flips
    sweep, events = open_sweep(out), fault_events(out)
    for number in (0, 5, SAMPLES - 1):
        event = events.iloc[number].to_dict()
        loop = plain()
        shape = dict(loop.model.named_parameters())[event["tensor"]].shape
        place = {"element": int(np.ravel_multi_index(event["index"], shape)), "tensor": event["tensor"]}
        fault = {"name": "bit_flip", "start": int(event["step"]), "bit": int(event["bit"]), **place}
        _, run = attached(loop, fault=fault)
        (alone,) = run.events
        assert (alone.before, alone.after) == (repr(event["before"]), repr(event["after"]))
        assert run.signals["loss"].tobytes() == sweep["loss"].sel(trial=event["trial"]).values.tobytes()


def test_what_is_its_twin_again_is_trained_no_further(tmp_path: Path) -> None:
    """Bits of numbers that a ReLU throws away are masked in the step in which they flip."""
    fault = {"name": "activation_bit", "tensor": "1", "start": 20, "field": "mantissa", "bit": None}
    told = campaign(LOOPS["convolutions"](), tmp_path, fault=fault, samples=20)
    sweep = outcomes(open_sweep(tmp_path))
    masked = sweep["masked_step"].values == 20
    assert 3 < masked.sum() < 17 and set(sweep["fault_outcome"].values[masked]) == {"masked"}
    golden = sweep["loss"].values[sweep["fault"].values == "none"][0]
    assert all(np.array_equal(loss, golden) for loss in sweep["loss"].values[masked])
    trained = np.where(sweep["masked_step"].notnull(), sweep["masked_step"] - 19, STEPS - 20)
    assert told.steps == 2 * STEPS + 21 + trained[sweep["fault"].values != "none"].sum()


def test_a_campaign_goes_on_where_it_was_left(tmp_path: Path) -> None:
    done = []

    def stop(count: int, total: int) -> None:
        done.append((count, total))
        if count == 5:
            raise KeyboardInterrupt

    loop = plain()
    with pytest.raises(KeyboardInterrupt):
        campaign(loop, tmp_path / "out", report=stop)
    assert done == [(n, SAMPLES) for n in range(1, 6)] and traces(loop) == []
    again = campaign(plain(), tmp_path / "out")
    assert (again.faults, again.stored) == (SAMPLES - 5, 5)
    whole = campaign(plain(), tmp_path / "whole")
    assert (whole.faults, whole.stored) == (SAMPLES, 0) and whole.steps > again.steps
    one, other = (open_sweep(tmp_path / name).sortby("trial") for name in ("out", "whole"))
    assert np.array_equal(one["trial"].values, other["trial"].values)
    assert one["loss"].values.tobytes() == other["loss"].values.tobytes()
    more = campaign(plain(), tmp_path / "out", samples=SAMPLES + 2)
    assert (more.faults, more.stored) == (2, SAMPLES), "a larger sample has the smaller one in it"


@pytest.mark.parametrize("name", LOOPS)
def test_campaigns_at_every_kind_of_site(name: str, tmp_path: Path) -> None:
    faults = [
        {"name": "activation_bit", "start": 20},
        {"name": "moment_bit", "site": "moment_1", "start": 20},
        {"name": "gradient_bit", "start": 20},
    ]
    told = campaign(LOOPS[name](), tmp_path / "out", fault=faults, samples=3)
    sweep = outcomes(open_sweep(tmp_path / "out"))
    assert told.faults == 9 and set(fault_events(tmp_path / "out")["site"]) == {
        "activation",
        "moment_1",
        "reduced_gradient",
    }
    assert set(sweep["fault_outcome"].values) <= {"", "masked", "recovered", "lingering", "divergent", "non-finite"}


def test_a_playbook_answers_in_a_campaign(tmp_path: Path) -> None:
    fault = {"name": "weight_bit", "start": 20, "until": 23}
    campaign(plain(), tmp_path / "out", fault=fault, samples=6, recover="repair")
    sweep = outcomes(open_sweep(tmp_path / "out"))
    struck = sweep.sel(trial=(sweep["fault"] != "none").values)
    answered = struck["incidents"] > 0
    assert answered.any() and set(struck["fault_outcome"].values[answered]) == {"masked"}, "repaired bit for bit"
    _, run = attached(plain(), fault={"name": "weight_bit", "start": 20}, recover="repair")
    assert run.incidents, "as in a run of its own"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"samples": 0}, "samples=0: no number of faults; allowed: 1 or more"),
        ({"fault": "none"}, "fault=none: nothing to draw"),
        ({"fault": "rare_tokens"}, "fault=rare_tokens: there is nothing to draw; allowed: faults of values"),
        (
            {"fault": {"name": "weight_bit", "tensor": "norm.bias", "element": 3, "start": 5}, "samples": 3},
            "samples=3: the description allows 1 different faults; allowed: 1 to 1",
        ),
        ({"fault": {"name": "bit_flip", "start": 48, "until": 60}}, "fault.until=60: outside of the run"),
        ({"fault": {"name": "activation_bit", "start": 0}}, "fault.start=0: what it strikes is known after the first"),
    ],
)
def test_what_no_campaign_can_be_is_refused(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    loop = plain()
    with pytest.raises(ConfigError, match=reason):
        campaign(loop, tmp_path / "out", **options)
    assert traces(loop) == []


def test_a_loop_that_does_not_repeat_itself_has_no_campaign(tmp_path: Path) -> None:
    loop = plain()
    loop.body = counted(plain())
    loop = plain()
    loop.body = counted(Loop(loop.model, loop.optimizer, loop.extra, loop.loader, loop.body))
    with pytest.raises(
        ConfigError, match="campaign: the loop does not repeat itself: .* in step 0 in the learning rate"
    ):
        campaign(loop, tmp_path / "out")


def test_a_body_that_returns_early_is_told_so(tmp_path: Path) -> None:
    loop = plain()

    def body(run: Any) -> None:
        for batch in run.steps(loop.loader()):
            run.observe(loop.body(batch))
            if run.step == 3:
                return

    with pytest.raises(ConfigError, match="campaign: the body returned before its loop was over"):
        attach.campaign(body, loop.model, loop.optimizer, loop.extra, fault=FLIPS, samples=2, out=tmp_path / "out")


# --- a run as a results folder -----------------------------------------------------------------------------------


def test_a_run_and_its_twin_are_a_results_folder(tmp_path: Path) -> None:
    fault = {"name": "weight_bit", "start": 20}
    loop = plain()
    _, run = attached(loop, fault=fault, recover="repair", twin=True, out=tmp_path)
    sweep = outcomes(open_sweep(tmp_path))
    assert list(sweep["fault"].values) == ["none", "weight_bit"]
    assert sweep["fault_outcome"].values[1] == "masked" and sweep["incidents"].values[1] == len(run.incidents) == 1
    for name, values in run.signals.items():
        assert sweep[name].values[1].tobytes() == values.tobytes(), name
        assert sweep[name].values[0].tobytes() == run.twin_signals[name].tobytes(), name
    (event,) = fault_events(tmp_path).to_dict("records")
    assert (event["tensor"], event["bit"], event["step"]) == (run.events[0].tensor, 30, 20)


@pytest.mark.parametrize("command", ["report --postmortems 1", "campaign", "incidents", "detectors", "provenance"])
def test_the_commands_of_analysis_read_it(command: str, flips: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out, _, _ = flips
    name, *options = command.split()
    assert main([name, str(out), *options]) == 0, capsys.readouterr().err
    if name == "campaign":
        assert (out / "figures" / "vulnerability_map.png").read_bytes().startswith(b"\x89PNG")
    if name == "report":
        assert "<h1>attach: " in (out / "report.html").read_text()


def test_a_post_mortem_of_ones_own_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attached(plain(), fault={"name": "weight_bit", "start": 20}, recover="repair", twin=True, out=tmp_path)
    (trial,) = open_sweep(tmp_path)["trial"].values[1:]
    assert main(["postmortem", str(tmp_path), str(trial)]) == 0, capsys.readouterr().err
    text = (tmp_path / "postmortems" / f"{trial}.md").read_text()
    assert "re\\_execute" in text and "Mixer of" in text
    assert "The batches were not seen: only the loader of the user's own loop has them." in text
    assert main(["incidents", str(tmp_path)]) == 0


def test_a_page_on_ones_own_run_tells_nothing_of_batches_that_it_did_not_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attached(plain(), fault={"name": "rare_tokens", "start": 20}, twin=True, out=tmp_path)
    (trial,) = open_sweep(tmp_path)["trial"].values[1:]
    assert main(["postmortem", str(tmp_path), str(trial)]) == 0, capsys.readouterr().err
    assert "corrupted gradient." not in capsys.readouterr().out
    text = (tmp_path / "postmortems" / f"{trial}.md").read_text()
    assert "The batches were not seen: only" in text and "allowed" not in text and " nan " not in text


def test_a_run_that_breaks_off_is_unfinished(tmp_path: Path) -> None:
    loop = plain()
    with (
        pytest.raises(ZeroDivisionError),
        attach(loop.model, loop.optimizer, loop.extra, out=tmp_path) as run,
    ):
        for batch in run.steps(loop.loader()):
            run.observe(loop.body(batch))
            _ = 1 / (30 - run.step)
    sweep = open_sweep(tmp_path)
    assert list(sweep["outcome"].values) == ["unfinished"] and int(sweep["loss"].notnull().sum()) == 30


def test_one_folder_takes_several_runs_and_nothing_else(tmp_path: Path) -> None:
    for seed in (1, 2):
        attached(plain(), fault={"name": "weight_bit", "start": 9}, seed=seed, twin=True, out=tmp_path / "a")
    sweep = open_sweep(tmp_path / "a")
    assert sweep.sizes["trial"] == 4 and sweep["complete"].values.all()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").touch()
    with pytest.raises(ConfigError, match="out=.*b: "):
        attached(plain(), out=tmp_path / "b")


def test_a_shorter_run_and_a_late_twin_take_the_place_of_what_was_begun(tmp_path: Path) -> None:
    loop = plain()
    with attach(loop.model, loop.optimizer, loop.extra, fault={"name": "weight_bit", "start": 9}, out=tmp_path) as run:
        for batch in run.steps(loop.loader()):
            run.observe(loop.body(batch))
            if run.step == 11:
                break
        for batch in run.twin():
            run.observe(loop.body(batch))
    sweep = open_sweep(tmp_path)
    assert dict(sweep.sizes)["trial"] == 2 and set(sweep["steps"].values) == {12.0}
    assert sweep["loss"].values[1].tobytes() == run.signals["loss"].tobytes()

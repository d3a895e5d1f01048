"""`attach`: nothing where it is disarmed, the right strike where it is armed, and no trace afterwards."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness import ConfigError, attach
from tests.user_loop.loops import LOOPS, STEPS, Loop, attached, plain, same, scaled, seeded, train

STRUCK = 20


def traces(loop: Loop) -> list[str]:
    """Hooks and wrappers of ours that stand on the user's objects."""
    found = []
    for name, module in loop.model.named_modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            found += [f"{name} {kind}"] * len(getattr(module, kind))
    for name, weight in loop.model.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            found += [f"{name} {kind}"] * len(getattr(weight, kind) or ())
    for owner in (*loop.optimizers, *loop.extra):
        methods = {key: value for key, value in vars(owner).items() if key in ("step", "unscale_")}
        found += [f"{type(owner).__name__}.{key}" for key, value in methods.items() if "user_loop" in repr(value)]
        found += [f"{key}: {value}" for key, value in methods.items() if type(value).__name__ == "method"]
    return found


def passes_a_step(loop: Loop) -> int:
    return 2 if loop.kept else 1


# --- disarmed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"detect": None}, {}, {"recover": "rerun", "detect": None}, {"twin": True}])
@pytest.mark.parametrize("name", LOOPS)
def test_disarmed_it_changes_no_bit(name: str, options: dict[str, Any]) -> None:
    untouched = LOOPS[name]()
    losses = train(untouched)
    loop = LOOPS[name]()
    stood = [vars(optimizer).get("step") for optimizer in loop.optimizers]
    seen, run = attached(loop, steps=STEPS, **options)
    assert seen[: len(losses)] == losses
    assert same(loop.state(), untouched.state())
    assert traces(loop) == [] and [vars(optimizer).get("step") for optimizer in loop.optimizers] == stood
    assert not run.events and not run.incidents
    if "twin" in options:
        assert len(seen) == 2 * len(losses) and not run.deviation.any() and run.differing is None


def test_an_error_in_the_block_leaves_no_trace() -> None:
    loop = plain()
    with (
        pytest.raises(ZeroDivisionError),
        attach(loop.model, loop.optimizer, loop.extra, fault={"name": "activation_bit", "start": 2}) as run,
    ):
        for batch in run.steps(loop.loader()):
            loss = loop.body(batch)
            if run.step == 2:
                assert traces(loop)
                _ = 1 / 0
            run.observe(loss)
    assert traces(loop) == []
    with pytest.raises(ConfigError, match="the run was detached; allowed: inside of its `with` block"):
        next(run.steps(loop.loader()))


def test_it_says_in_a_line_what_came_of_it() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(model, optimizer, fault="weight_bit", steps=4) as run:
        assert repr(run) == "<AttachedRun: nothing trained yet>"
        for batch in run.steps([torch.ones(2, 4)] * 4):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            run.observe(loss)
    said = repr(run)
    assert said.startswith("<AttachedRun: 4 steps, 1 strike from step 2 on; "), said
    assert said.endswith(f"; {run.outcome}>")


def test_a_scheduler_that_is_made_in_the_block_goes_on_after_it() -> None:
    loop = plain()
    optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-2)
    with attach(loop.model, optimizer, steps=3) as run:
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        for batch in run.steps(loop.loader()):
            (loss := loop.model(batch[0]).square().mean()).backward()
            optimizer.step()
            scheduler.step()
            run.observe(loss)
    before = loop.model.norm.weight.detach().clone()
    loop.model.norm.weight.grad = torch.ones(16)
    optimizer.step()
    assert not torch.equal(before, loop.model.norm.weight) and len(run.signals["loss"]) == 3


# --- armed -------------------------------------------------------------------------------------------------------


def seen_by_the_loop(site: str, tensor: str) -> Tensor:
    """What an untouched run of `plain` has there at the struck step."""
    loop, found = plain(), {}
    named = dict(loop.model.named_parameters())
    hooks = []
    for step, batch in enumerate(loop.loader()):
        if step == STRUCK:
            if site == "weight":
                return named[tensor].detach().clone()
            if site.startswith("moment"):
                kept = loop.optimizer.state[named[tensor]]
                return kept["exp_avg" if site == "moment_1" else "exp_avg_sq"].clone()
            if site == "learning_rate":
                return torch.tensor(loop.optimizer.param_groups[0]["lr"], dtype=torch.float64)
            if site == "reduced_gradient":

                def take(weight: Tensor) -> None:
                    found["x"] = weight.grad.clone()

                hooks.append(named[tensor].register_post_accumulate_grad_hook(take))
            if site.startswith("activation"):
                module = dict(loop.model.named_modules())[tensor]

                def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
                    if site == "activation":
                        found["x"] = output.detach().clone()
                    else:
                        output.register_hook(lambda gradient: found.update(x=gradient.clone()))

                hooks.append(module.register_forward_hook(watch))
        before = named.get(tensor, torch.zeros(())).detach().clone()
        loop.body(batch)
        if step == STRUCK:
            if site == "update":
                return named[tensor].detach() - before
            if site == "clipped_gradient":
                assert named[tensor].grad is not None
                return named[tensor].grad.clone()
            return found["x"]
    raise AssertionError("the run was too short")


@pytest.mark.parametrize(
    "site",
    [
        "weight",
        "reduced_gradient",
        "clipped_gradient",
        "moment_1",
        "moment_2",
        "update",
        "learning_rate",
        "activation",
        "activation_gradient",
    ],
)
def test_a_strike_finds_what_the_loop_has_there(site: str) -> None:
    tensor = {"learning_rate": "*", "activation": "layers.0", "activation_gradient": "norm"}.get(
        site, "layers.1.weight"
    )
    fault = {"name": "bit_flip", "site": site, "tensor": tensor, "start": STRUCK, "bit": 21}
    _, run = attached(plain(), fault=fault, detect=None)
    (event,) = run.events
    expected = seen_by_the_loop(site, tensor)
    value = expected[event.index] if event.index else expected
    assert (event.site, event.step, event.changed) == (site, STRUCK, True)
    assert float(event.before) == pytest.approx(value.item(), abs=0 if site != "update" else 1e-9)
    word, number = ("<Q", "<d") if site == "learning_rate" else ("<I", "<f")  # a rate is a number of Python
    flipped = struct.unpack(word, struct.pack(number, float(event.before)))[0] ^ 1 << 21
    assert float(event.after) == struct.unpack(number, struct.pack(word, flipped))[0]


def test_the_weight_that_was_struck_is_what_the_model_goes_on_with() -> None:
    loop, seen = plain(), {}
    with attach(loop.model, loop.optimizer, loop.extra, fault={"name": "weight_bit", "start": STRUCK}) as run:
        for batch in run.steps(loop.loader()):
            if run.step == STRUCK:
                seen = {name: weight.detach().clone() for name, weight in loop.model.named_parameters()}
            run.observe(loop.body(batch))
    (event,) = run.events
    assert event.bit == 30 and repr(seen[event.tensor][event.index].item()) == event.after


FAULTS: list[dict[str, Any]] = [
    {"name": "weight_bit", "bit": 27},
    {"name": "gradient_bit", "bit": 27},
    {"name": "bit_flip", "site": "gradient", "bit": 27},
    {"name": "moment_bit", "site": "moment_1", "bit": 27},
    {"name": "update_bit", "bit": 27},
    {"name": "activation_bit", "bit": -4},  # of the exponent, in fp32 or in fp16
    {"name": "fp8_gradients"},
    {"name": "learning_rate_jump"},
    {"name": "duplicated_batch"},
    {"name": "missed_update", "shards": 2},
    {"name": "stale_gradient"},
]


@cache
def untouched_state(name: str) -> Any:
    """The state in which a loop ends without us."""
    loop = LOOPS[name]()
    train(loop)
    return loop.state()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: "-".join(map(str, fault.values())))
@pytest.mark.parametrize("name", LOOPS)
def test_the_twin_is_the_run_up_to_the_strike(name: str, fault: dict[str, Any]) -> None:
    loop = LOOPS[name]()
    _, run = attached(loop, fault={"start": STRUCK, **fault}, steps=STEPS, twin=True)
    deviation = run.deviation
    assert len(deviation) == STEPS and not deviation[:STRUCK].any()
    assert run.events[0].step == STRUCK and run.events[0].changed
    assert np.isnan(deviation[STRUCK:]).any() or deviation[STRUCK:].any()
    assert traces(loop) == [] and not same(loop.state(), untouched_state(name))


TOKEN_FAULTS = ["rare_tokens", "random_tokens", "repetition"]


@pytest.mark.parametrize("name", TOKEN_FAULTS)
def test_texts_are_poisoned_with_their_targets(name: str) -> None:
    loop, seen = plain(), []
    with attach(loop.model, loop.optimizer, loop.extra, fault={"name": name, "start": STRUCK, "duration": 2}) as run:
        for ids, targets in run.steps(loop.loader()):
            seen.append((ids, targets))
            run.observe(loop.body((ids, targets)))
    untouched = list(iter_of(plain()))
    differing = [
        i for i, (now, then) in enumerate(zip(seen, untouched, strict=True)) if not torch.equal(now[0], then[0])
    ]
    assert differing == [STRUCK, STRUCK + 1] == [event.step for event in run.events]
    assert all(torch.equal(ids[:, 1:], targets[:, :-1]) for ids, targets in seen)


def iter_of(loop: Loop) -> Iterator[Any]:
    for batch in loop.loader():
        loop.body(batch)
        yield batch


def test_pictures_are_handed_out_twice_with_their_labels() -> None:
    loop, seen = LOOPS["convolutions"](), []
    with attach(loop.model, loop.optimizer, fault={"name": "duplicated_batch", "start": 5, "duration": 1}) as run:
        for batch in run.steps(loop.loader()):
            seen.append([x.clone() for x in batch])
            run.observe(loop.body(batch))
    assert all(torch.equal(now, then) for now, then in zip(seen[5], seen[4], strict=True))
    assert not torch.equal(seen[6][0], seen[5][0])


def test_a_loss_scale_is_struck_where_there_is_one() -> None:
    _, run = attached(scaled(), steps=STEPS, fault={"name": "loss_scale_jump", "start": 5})
    (event,) = run.events
    assert float(event.after) == 2.0**20 * float(event.before)
    scale = run.signals["loss_scale"]
    assert scale[5] > scale[4] and scale[6] < scale[5]  # it overflows, and backs off
    with pytest.raises(
        ConfigError,
        match="fault.site=loss_scale: no loss scaler is known; allowed: another site, or a GradScaler in attach",
    ):
        attached(plain(), fault={"name": "loss_scale_jump", "start": 5})


def test_several_faults_strike_one_run() -> None:
    faults = ["weight_bit", {"name": "nan_gradient", "start": 30}]
    _, run = attached(plain(), fault=[{"name": "weight_bit", "start": 10, "bit": 3}, faults[1]], detect=None)
    assert {event.step for event in run.events} == {10, 30} and run.outcome == "non-finite"


def test_a_preset_that_fits_our_model_alone_strikes_any_tensor() -> None:
    _, run = attached(plain(), fault={"name": "fp16_overflow", "start": 10}, detect=None)
    assert len({event.tensor for event in run.events}) > 3, "all activations stand in for those of our feed-forward"
    with pytest.raises(ConfigError, match=r"fault.tensor=blocks.\*: matches no tensor of this model; allowed: a glob"):
        attached(plain(), fault={"name": "weight_bit", "start": 10, "tensor": "blocks.*"})


# --- the twin ----------------------------------------------------------------------------------------------------


def test_a_twin_is_trained_after_the_run_if_it_is_asked_for_then() -> None:
    at_once, later = plain(), plain()
    seeded()
    _, run = attached(at_once := plain(), fault={"name": "weight_bit", "start": STRUCK, "bit": 26}, twin=True)
    later = plain()
    with attach(
        later.model, later.optimizer, later.extra, fault={"name": "weight_bit", "start": STRUCK, "bit": 26}
    ) as other:
        for batch in other.steps(later.loader()):
            other.observe(later.body(batch))
        assert not other.is_twin
        for batch in other.twin():
            assert other.is_twin
            other.observe(later.body(batch))
    assert np.array_equal(run.deviation, other.deviation) and same(at_once.state(), later.state())


def test_batches_of_an_iterator_are_kept_for_the_twin() -> None:
    loop = plain()
    with attach(
        loop.model, loop.optimizer, loop.extra, fault={"name": "weight_bit", "start": 5}, steps=12, twin=True
    ) as run:
        for batch in run.steps(iter(loop.loader())):
            run.observe(loop.body(batch))
    assert not run.deviation[:5].any() and run.deviation[5:].any() and len(run.deviation) == 12


def counted(loop: Loop) -> Callable[[Any], Tensor]:
    """A loop that counts its passes by itself, and takes its rate from that."""
    count = [0]

    def body(batch: Any) -> Tensor:
        count[0] += 1
        loop.optimizer.param_groups[0]["lr"] = 1e-3 * count[0]
        return loop.body(batch)

    return body


def noisy(loop: Loop) -> Callable[[Any], Tensor]:
    """A loop that draws from a generator of its own."""
    draw = torch.Generator().manual_seed(1)

    def body(batch: Any) -> Tensor:
        with torch.no_grad():
            loop.model.layers[1].bias += 1e-3 * torch.randn(16, generator=draw)
        return loop.body(batch)

    return body


@pytest.mark.parametrize(
    ("change", "named", "allowed"),
    [
        (counted, "the learning rate of parameter group 0", r"run\.carry\(NAME=value\) for a counter"),
        (noisy, "embedding.weight", "use_deterministic_algorithms"),
    ],
)
def test_a_loop_that_does_not_repeat_itself_is_told_so(change: Any, named: str, allowed: str) -> None:
    loop = plain()
    body, passes = change(loop), 0
    with (
        pytest.warns(UserWarning, match=f"differs in step 0 in {named}; allowed: .*{allowed}") as warned,
        attach(loop.model, loop.optimizer, loop.extra, fault={"name": "weight_bit", "start": 9}, twin=True) as run,
    ):
        for batch in run.steps(loop.loader()):
            passes += 1
            run.observe(body(batch))
    assert passes == STEPS + 1, "the twin ends with the first step that differs"
    assert named in str(run.differing) and len(run.events) == 1
    assert {warning.filename for warning in warned} == {__file__}, "it points at the user's line"
    with pytest.raises(ConfigError, match="deviation: there is no golden twin"):
        _ = run.deviation


def test_random_streams_of_ones_own_are_extras() -> None:
    loop, draw = plain(), torch.Generator().manual_seed(1)
    own = np.random.default_rng(2)
    with attach(
        loop.model, loop.optimizer, [*loop.extra, draw, own], fault={"name": "weight_bit", "start": 9}, twin=True
    ) as run:
        for batch in run.steps(loop.loader()):
            with torch.no_grad():
                loop.model.layers[1].bias += 1e-3 * torch.randn(16, generator=draw) * own.random()
            run.observe(loop.body(batch))
    assert run.differing is None and not run.deviation[:9].any() and run.deviation[9:].any()


def test_a_loader_that_gives_other_batches_is_told_so() -> None:
    loop = plain()
    batches = list(loop.loader())

    class Loader:
        def __len__(self) -> int:
            return 20

        def __iter__(self) -> Iterator[Any]:
            batches.reverse()
            return iter(batches[:20])

    with (
        pytest.warns(UserWarning, match="twin: there is none, because the batch of step 0 is another one"),
        attach(loop.model, loop.optimizer, loop.extra, twin=True) as run,
    ):
        for batch in run.steps(Loader()):
            run.observe(loop.body(batch))
    assert traces(loop) == [] and len(run.signals["loss"]) == 20
    with pytest.raises(ConfigError, match="deviation: there is no golden twin"):
        _ = run.deviation


def test_a_run_of_one_step_has_a_twin() -> None:
    fault = {"name": "weight_bit", "start": 0, "bit": 29, "tensor": "norm.weight"}
    _, run = attached(plain(), fault=fault, steps=1, twin=True)
    assert len(run.deviation) == 1 and run.deviation.all() and run.differing is None


# --- loops of other shapes ---------------------------------------------------------------------------------------


def test_epochs_are_one_run() -> None:
    loop = plain()
    with attach(
        loop.model, loop.optimizer, loop.extra, fault={"name": "weight_bit", "start": 25}, steps=40, twin=True
    ) as run:
        for _ in range(4):
            short = [batch for batch, _ in zip(loop.loader(), range(10), strict=False)]
            for batch in run.steps(short):
                run.observe(loop.body(batch))
    assert len(run.signals["loss"]) == 40 and run.events[0].step == 25
    assert not run.deviation[:25].any() and run.deviation[25:].any()


def test_a_loop_that_is_left_early_has_the_steps_that_were_taken() -> None:
    loop = plain()
    with (
        pytest.warns(UserWarning, match="the loop ended after 8 of 50 steps, so its twin was not trained"),
        attach(loop.model, loop.optimizer, loop.extra, twin=True) as run,
    ):
        for batch in run.steps(loop.loader()):
            run.observe(loop.body(batch))
            if not run.is_twin and run.step == 7:
                break
    assert len(run.signals["loss"]) == 8 and traces(loop) == []


def test_an_optimizer_that_calls_a_closure_is_stepped_as_ever() -> None:
    ends = []
    for is_attached in (False, True):
        loop = plain()
        optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)

        def step(batch: Any, loop: Loop = loop, optimizer: Any = optimizer) -> Tensor:
            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loop.model(batch[0]).square().mean()
                loss.backward()
                return loss

            return optimizer.step(closure)

        if is_attached:
            with attach(loop.model, optimizer) as run:
                for batch in run.steps(loop.loader()):
                    run.observe(step(batch))
        else:
            for batch in loop.loader():
                step(batch)
        ends.append(loop.state())
    assert same(*ends)


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fault": "weight_bitt"}, r"fault=weight_bitt: unknown; did you mean weight_bit\? allowed: activation_bit, "),
        (
            {"fault": {"name": "weight_bit", "bitt": 3}},
            r"fault.bitt=3: unknown key; did you mean bit\? allowed: kind, name",
        ),
        ({"fault": {"name": "weight_bit", "bit": 40}}, "fault.bit=40: beyond fault.format=fp32; allowed: 0 to 31"),
        ({"fault": {"name": "weight_bit", "tensor": "oops*"}}, r"fault.tensor=oops\*: matches no tensor of this model"),
        ({"fault": {"name": "activation_bit", "tensor": "oops"}}, "fault.tensor=oops: matches no module of this model"),
        ({"fault": {"name": "weight_bit", "start": 50}}, "fault.start=50: after the run of 50 steps; allowed: 0 to 49"),
        ({"fault": {"name": "activation_bit", "start": 0}}, "fault.start=0: the activations .* allowed: 1 or more"),
        ({"fault": {"name": "moment_bit", "start": 0}}, "fault.start=0: the arrays of an optimizer are known after"),
        ({"fault": {"name": "bit_flip", "samples": 3}}, "fault.samples=3: many faults are for attach.campaign"),
        ({"fault": "schedule_offset"}, "fault.kind=schedule_offset: needs rate, .* allowed: attach.facts={'rate'"),
        ({"fault": "long_document"}, "fault.kind=long_document: needs tokens, which nobody knows of this run"),
        ({"fault": 3}, r"fault=3: wrong type \(int\); allowed: a name, a mapping"),
        ({"fault": "nowhere.yaml"}, "fault=nowhere.yaml: cannot be read"),
        ({"detect": "combine"}, r"detect=combine: no detector; did you mean combined\? allowed: default, none, "),
        ({"detect": "kurtosis"}, "detect=kurtosis: watches signals of our GPT, .* allowed: .*combined"),
        (
            {"detect": {"combined": {"limitt": 2}}},
            r"detect.combined.limitt=2: unknown key; did you mean limit\? allowed: ",
        ),
        ({"recover": "laddr"}, r"recover=laddr: no playbook; did you mean ladder\? allowed: anticipate, ladder, "),
        ({"recover": "ladder"}, "recover.skip_batches.count=200: the run has 50 steps; allowed: 1 to 49"),
        ({"recover": {"ladder": [{"action": "swap_data"}]}}, "action swap_data: acts on the recipe or the data of our"),
        ({"recover": {"ladder": [{"action": "undo"}]}}, "only the oracle knows what to undo"),
        ({"steps": 0}, "steps=0: no number of steps; allowed: 1 to"),
        ({"extra": [3]}, r"extra\[0\]=int: keeps no state; allowed: objects with state_dict"),
        ({"facts": {"rates": 1}}, r"facts.rates=1: unknown; did you mean rate\? allowed: rate, warmup, peak, tok"),
        ({"seed": -1}, "seed=-1: out of range"),
        (
            {"recovery": "ladder"},
            r"attach\(recovery=\): unknown option; did you mean recover\? allowed: model, optimizer, ",
        ),
    ],
)
def test_what_cannot_be_is_one_clear_error(options: dict[str, Any], reason: str) -> None:
    loop = plain()
    before = loop.state()
    with pytest.raises(ConfigError, match=reason):
        attached(Loop(loop.model, loop.optimizer, options.pop("extra", []), loop.loader, loop.body), **options)
    assert traces(loop) == [] and (same(before, loop.state()) or options["fault"]["start"] == 0)


def test_objects_that_do_not_fit_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="optimizer=LBFGS: evaluates the model inside of a step"):
        attach(model, torch.optim.LBFGS(model.parameters())).__enter__()
    with pytest.raises(ConfigError, match="AdamW trains no parameter of the model"):
        attach(model, torch.optim.AdamW(nn.Linear(2, 2).parameters())).__enter__()
    with pytest.raises(ConfigError, match="optimizer=int: no optimizer; allowed: an optimizer as torch.optim"):
        attach(model, 3).__enter__()
    with pytest.raises(ConfigError, match="model=int: no model; allowed: a torch.nn.Module"):
        attach(3, None)  # type: ignore[arg-type]


def test_a_loss_that_is_not_told_and_a_loader_without_a_length_are_refused() -> None:
    loop = plain()
    with (
        pytest.raises(ConfigError, match="run.observe: was not called in step 0; allowed: once a pass"),
        attach(loop.model, loop.optimizer, loop.extra) as run,
    ):
        for batch in run.steps(loop.loader()):
            loop.body(batch)
    with (
        pytest.raises(ConfigError, match="a loader of type generator does not say how long it is; allowed: .*steps=N"),
        attach(loop.model, loop.optimizer, loop.extra) as run,
    ):
        next(run.steps(batch for batch in loop.loader()))

"""Models whose tensors are no float32: bits, moments, norms and outcomes in their own number formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from analysis import fault_events, open_sweep, outcomes
from analysis.__main__ import main
from harness import ConfigError, attach
from harness.user_loop.named_tensors import NamedTensors
from harness.user_loop.norms import joined, joined_each
from tests.number_formats import BITS, TORCH
from tests.user_loop.loops import Loop, attached, seeded

STEPS, START = 12, 4


class Moments(torch.optim.Optimizer):
    """SGD that keeps its moment in a type of its own, as optimizers with narrow or wide state do."""

    def __init__(self, parameters: Any, dtype: torch.dtype, lr: float = 1e-2):
        super().__init__(parameters, {"lr": lr})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                kept = state.get("exp_avg", torch.zeros_like(weight, dtype=self.dtype))
                moment = 0.5 * kept.double() + weight.grad.double()
                state["exp_avg"] = moment.to(self.dtype)
                state["exp_avg_sq"] = moment.square().to(self.dtype)
                weight -= (group["lr"] * moment).to(weight.dtype)


def perceptron(
    dtype: torch.dtype, optimizer: Any = None, last: torch.dtype | None = None, autocast: torch.dtype | None = None
) -> Loop:
    """Two linear layers with a norm between them, which may be held in another type, as may the last one."""
    seeded()
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    if last is not None:
        model[2].to(last)
    made = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9) if optimizer is None else optimizer(model)
    batches = [(torch.randn(8, 4).to(dtype), torch.randn(8, 1).to(dtype)) for _ in range(STEPS)]

    def body(batch: Any) -> Tensor:
        x, y = batch
        made.zero_grad()
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            hidden = model[1](model[0](x))
            loss = (model[2](hidden if last is None else hidden.to(last)).float() - y.float()).square().mean()
        loss.backward()
        made.step()
        return loss

    return Loop(model, made, [], lambda: batches, body)


def flips(loop: Loop, out: Path, samples: int = 48, **fields: Any) -> Any:
    def body(run: Any) -> None:
        for batch in run.steps(loop.loader()):
            run.observe(loop.body(batch))

    fault = {"name": "bit_flip", "site": "weight", "tensor": "*", "start": START, **fields}
    attach.campaign(body, loop.model, loop.optimizer, fault=fault, samples=samples, out=out)
    return fault_events(out)


def flipped(event: Any) -> int:
    return int(event["bits_before"], 16) ^ int(event["bits_after"], 16)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp64"])
def test_every_flip_of_a_campaign_is_one_bit_of_the_models_format(name: str, tmp_path: Path) -> None:
    events = flips(perceptron(TORCH[name]), tmp_path)
    assert events["changed"].all() and set(events["format"]) == {name}
    assert events["bit"].max() > BITS[name] - 4 and events["bit"].between(0, BITS[name] - 1).all()
    for _, event in events.iterrows():
        assert flipped(event) == 1 << int(event["bit"]) and len(event["bits_before"]) == BITS[name] // 4
    sweep = outcomes(open_sweep(tmp_path))
    assert set(sweep["struck_format"].values) == {"", name} == set(sweep["fault_format"].values)
    assert "idle" not in sweep["fault_outcome"].values


@pytest.mark.parametrize("site", ["activation", "activation_gradient", "reduced_gradient", "moment_1", "update"])
def test_other_sites_have_the_format_too(site: str, tmp_path: Path) -> None:
    events = flips(perceptron(torch.bfloat16), tmp_path, samples=16, site=site)
    assert set(events["format"]) == {"bf16"} and (events["bits_before"].str.len() == 4).all()
    assert all(flipped(event) == 1 << int(event["bit"]) for _, event in events.iterrows())


def test_activations_under_autocast_are_of_its_format(tmp_path: Path) -> None:
    """Weights are fp32, and what the linear layers give is bf16."""
    events = flips(perceptron(torch.float32, autocast=torch.bfloat16), tmp_path, samples=16, site="activation")
    assert set(events["format"]) == {"bf16"}
    _, run = attached(
        perceptron(torch.float32, autocast=torch.float16),
        fault={"name": "activation_bit", "start": START, "tensor": "0"},
    )
    (event,) = run.events
    assert (event.format, event.bit) == ("fp16", 14), "the highest bit of the exponent, as bit 30 is of fp32"


def test_a_mixed_model_draws_elements_alike_and_of_each_its_own_bits(tmp_path: Path) -> None:
    loop = perceptron(torch.bfloat16, last=torch.float64)  # 40 elements in bf16, 9 in fp64
    events = flips(loop, tmp_path, samples=150)
    of_last = events["tensor"].str.startswith("2.")
    assert set(events["format"][of_last]) == {"fp64"} and set(events["format"][~of_last]) == {"bf16"}
    assert 0.1 < of_last.mean() < 0.27, "9 of 49 elements, not 576 of 1216 bits"
    assert events["bit"][~of_last].max() == 15 and events["bit"][of_last].max() > 55 and events["changed"].all()
    sweep = open_sweep(tmp_path)
    assert set(sweep["fault_format"].values) == {"", "bf16", "fp64"}


@pytest.mark.parametrize(
    ("weights", "state"), [("bf16", "fp64"), ("fp32", "fp8_e5m2"), ("fp32", "fp8_e4m3"), ("bf16", "fp32")]
)
def test_moments_have_the_format_of_the_optimizer(weights: str, state: str) -> None:
    loop = perceptron(TORCH[weights], lambda model: Moments(model.parameters(), TORCH[state]))
    fault = {"name": "bit_flip", "site": "moment_1", "tensor": "0.weight", "element": 3, "bit": 2, "start": START}
    _, run = attached(loop, fault=fault, twin=True)
    (event,) = run.events
    assert event.format == state and event.changed and flipped(event.to_dict()) == 4
    assert np.isfinite(run.signals["second_moment_norm"]).all()
    beyond = "out of range" if state == "fp64" else f"beyond fault.format={state}; allowed: 0 to"
    with pytest.raises(ConfigError, match=f"fault.bit={BITS[state]}: {beyond}"):
        again = perceptron(TORCH[weights], lambda model: Moments(model.parameters(), TORCH[state]))
        attached(again, fault={**fault, "bit": BITS[state]})


def test_a_stuck_bit_of_a_bf16_weight_stays() -> None:
    loop = perceptron(torch.bfloat16)
    fault = {"name": "stuck_bit", "tensor": "0.weight", "start": START}
    _, run = attached(loop, fault=fault, detect=None)
    assert {event.bit for event in run.events} == {13} and len(run.events) == STEPS - START
    words = {int(event.bits_after or "", 16) >> 13 & 1 for event in run.events}
    assert words == {0} and run.events[0].format == "bf16"


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp64"])
def test_a_last_bit_is_the_last_of_the_model(name: str) -> None:
    _, run = attached(perceptron(TORCH[name]), fault={"name": "last_bit", "start": START})
    (event,) = run.events
    assert event.changed and event.format == name and abs(int(event.bits_before, 16) - int(event.bits_after, 16)) == 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bit": ({"bit": 31}, "fault.bit=31: beyond fault.format=bf16; allowed: 0 to 15"),
    "wider": (
        {"format": "fp32"},
        "fault.format=fp32: 0.weight is held in bf16, which has other bits; allowed: null, bf16",
    ),
    "unknown": ({"format": "fp4"}, "fault.format=fp4: out of range; allowed: fp64, fp32, bf16, .* or null"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_bf16_model_does_not_have_is_refused_before_the_first_step(case: str) -> None:
    fields, reason = REFUSED[case]
    loop = perceptron(torch.bfloat16)
    with pytest.raises(ConfigError, match=reason):
        attached(loop, fault={"name": "bit_flip", "tensor": "*", "start": START, **fields})
    assert not loop.optimizer.state, "no step was made"


def test_integers_among_the_weights_are_no_place_for_a_fault() -> None:
    loop = perceptron(torch.float32)
    loop.model.register_parameter("codes", nn.Parameter(torch.arange(4), requires_grad=False))
    loop.optimizer.add_param_group({"params": [loop.model.codes]})
    with pytest.raises(
        ConfigError, match="fault.tensor=codes: matches no tensor of this model; allowed: a glob over 0.w"
    ):
        attached(loop, fault={"name": "bit_flip", "tensor": "codes", "start": START})
    places = NamedTensors(loop.model, [loop.optimizer])
    assert list(places.shapes) == list(places.formats["weight"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_a_narrower_format_is_emulated_in_a_wider_model() -> None:
    fault = {"name": "weight_bit", "tensor": "0.weight", "start": START, "format": "bf16", "bit": 14}
    _, run = attached(perceptron(torch.float64), fault=fault)
    (event,) = run.events
    inside = torch.tensor(float(event.before)).bfloat16()
    wanted = (inside.view(torch.int16) ^ (1 << 14)).view(torch.bfloat16)
    assert float(event.after) == float(wanted) and event.format == "bf16" and len(event.bits_before or "") == 16


def test_a_record_of_a_bf16_model_is_done_again(tmp_path: Path) -> None:
    fault = {"name": "bit_flip", "tensor": "*", "start": START, "seed": 5}
    attached(perceptron(torch.bfloat16, last=torch.float32), fault=fault, twin=True, out=tmp_path / "a")
    sweep = open_sweep(tmp_path / "a")
    (trial,) = sweep["trial"].values[sweep["fault"].values != "none"]
    again = {"name": "replay", "record": f"{tmp_path / 'a'}:{trial}"}
    _, run = attached(perceptron(torch.bfloat16, last=torch.float32), fault=again)
    (event,), (row,) = run.events, fault_events(tmp_path / "a").to_dict("records")
    assert (event.tensor, event.bit, event.format) == (row["tensor"], row["bit"], row["format"])
    assert run.signals["loss"].tobytes() == sweep["loss"].sel(trial=trial).values.tobytes()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_norms_of_half_precision_are_not_rounded_to_it(name: str) -> None:
    loop = perceptron(TORCH[name])
    _, run = attached(loop)
    exact = torch.stack([weight.double().norm() for weight in loop.model.parameters()]).norm().item()
    assert run.signals["param_norm"][-1] == pytest.approx(exact, rel=1e-6)


# --- complex numbers ---------------------------------------------------------------------------------------------


class Phases(nn.Module):
    """Signals that are turned and scaled by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.read = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.read((x * self.turn).abs())


def turning() -> Loop:
    seeded()
    model = Phases()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = [torch.randn(5, 6, dtype=torch.complex64) for _ in range(STEPS)]

    def body(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(batch) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Loop(model, optimizer, [], lambda: batches, body)


@pytest.mark.parametrize("site", ["weight", "reduced_gradient", "moment_1", "moment_2", "update"])
def test_an_imaginary_part_is_struck(site: str) -> None:
    fault = {"name": "bit_flip", "site": site, "tensor": "turn", "element": 7, "bit": 29, "start": START}
    _, run = attached(turning(), fault=fault, twin=True)
    (event,) = run.events
    assert event.index == (3, 1) and event.changed and flipped(event.to_dict()) == 1 << 29
    assert np.abs(run.deviation[START + 1 :]).max() > 0


def test_norms_see_imaginary_parts() -> None:
    loop = turning()
    before: list[Tensor] = []
    with attach(loop.model, loop.optimizer) as run:
        for batch in run.steps(loop.loader()):
            before = [weight.detach().clone() for weight in loop.model.parameters()]
            run.observe(loop.body(batch))
    found = {name: values[-1] for name, values in run.signals.items()}

    def norm(tensors: list[Tensor]) -> float:
        parts = [torch.view_as_real(x) if x.is_complex() else x for x in tensors]
        return torch.cat([part.double().reshape(-1) for part in parts]).norm().item()

    weights = [weight.detach() for weight in loop.model.parameters()]
    count = 2 * 6 + 6 + 1
    assert found["param_norm"] == pytest.approx(norm(weights), rel=1e-5)
    assert found["grad_norm"] == pytest.approx(norm([w.grad for w in loop.model.parameters()]), rel=1e-5)
    moved = [now - then for now, then in zip(weights, before, strict=True)]
    assert found["update_rms"] == pytest.approx(norm(moved) / count**0.5, rel=1e-4)
    kept = [loop.optimizer.state[weight]["exp_avg_sq"] for weight in loop.model.parameters()]
    assert found["second_moment_norm"] == pytest.approx(norm(kept), rel=1e-5)


def test_a_number_that_is_lost_in_an_imaginary_part_is_seen() -> None:
    """A playbook goes back before it; weights of complex numbers are put back bit for bit."""
    fault = {"name": "value", "model": "nan", "site": "moment_1", "tensor": "turn", "element": 5, "start": START}
    _, run = attached(turning(), fault=fault, detect="finite")
    assert run.outcome == "non-finite" and not np.isfinite(run.signals["param_norm"][START])
    _, run = attached(turning(), fault=fault, detect="finite", recover="repair", twin=True)
    assert run.incidents and np.abs(run.deviation).max() == 0 and np.isfinite(run.signals["param_norm"]).all()


# --- faults that did nothing -------------------------------------------------------------------------------------


def test_a_strike_that_wrote_what_was_there_is_in_no_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights below 2 have a 0 at the top of their exponent, so a bit stuck at 0 there changes nothing."""
    events = flips(perceptron(torch.bfloat16), tmp_path, samples=12, model="stuck_at_0", bit=14)
    events = flips(perceptron(torch.bfloat16), tmp_path, samples=12, model="stuck_at_0", bit=6)
    changed = int(events["changed"].sum())
    assert 0 < changed < 12
    sweep = outcomes(open_sweep(tmp_path))
    faulty = sweep.isel(trial=np.flatnonzero(sweep["fault"].values != "none"))
    assert (faulty["fault_outcome"].values[faulty["changes"].values == 0] == "idle").all()
    assert "idle" not in faulty["fault_outcome"].values[faulty["changes"].values > 0]
    assert main(["campaign", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if line.strip().startswith("all sites")).split()
    assert (row[2], row[-1]) == (str(changed), str(24 - changed)), said
    assert f"Note: {24 - changed} faults idle: never fired, or wrote what was there, and not counted." in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_norm_of_a_large_tensor_is_as_exact_as_that_of_a_small_one(dtype: torch.dtype) -> None:
    """Where all squares are added up in one float32, that of eight million equal numbers is off by some 1e-3."""
    x = torch.full((2**23 + 5,), 1e-3, dtype=dtype)
    exact = (len(x) * float(x[0]) ** 2) ** 0.5
    assert joined([x[::2], x], torch.device("cpu")) == pytest.approx(exact * 1.5**0.5, rel=3e-6)


def test_norms_of_several_groups_are_those_of_each() -> None:
    """Bit for bit, where squares overflow or vanish, of mixed types, and of no tensor at all."""
    draw = torch.Generator().manual_seed(3)
    sizes = [(7, 5), (1000,), (64, 257), (3,)]
    plain = [torch.randn(size, generator=draw) for size in sizes]
    groups = [plain, [], [x * 1e25 for x in plain[:2]], [x.double() for x in plain[1:]], [torch.zeros(4)]]
    device = torch.device("cpu")
    for some in (groups, [plain], [[]], [plain, [plain[0].bfloat16()]], [plain, [plain[0].to_sparse()]]):
        found, each = joined_each(some, device), [joined(group, device) for group in some]
        assert [type(x) for x in found] == [float] * len(some)
        assert found == each
        exact = [sum(float((x.to_dense().double() ** 2).sum()) for x in group) ** 0.5 for group in some]
        assert found == pytest.approx(exact, rel=1e-6)

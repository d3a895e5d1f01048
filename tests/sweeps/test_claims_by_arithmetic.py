"""Claims: their files, what decides those of arithmetic, and each number against another way to it."""

from __future__ import annotations

import dataclasses
import inspect
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from analysis.arithmetic import costs, formats, optimizers, spreading
from harness.config import ConfigError
from sweeps.claims.checks import ARITHMETIC, CHECKS, CONFIRMED, REFUTED
from sweeps.claims.registered import chosen, claims
from sweeps.commands import console
from sweeps.commands.tables import with_tables

PAGE = Path(__file__).parents[2] / "docs" / "findings" / "numbers.md"
WRONG = {  # as they stand
    *("softmax_overflow_bf16", "fp8_neighbours", "rms_norm_of_zero", "gradient_of_a_large_loss"),
    *("second_moment_is_stale", "clipping_bounds_updates", "literal_mup", "default_weight_decay"),
    *("norm_of_second_moment", "logging_every_ten", "checkpoint_cadence", "cost_of_a_spike", "cost_of_an_incident"),
}


# --- the registry ------------------------------------------------------------------------------------------------


def test_every_claim_has_a_source_and_its_check_a_verdict() -> None:
    known = {name: claim for name, claim in claims().items() if claim.check}
    assert {claim.check for claim in known.values()} == CHECKS.keys()
    verdicts = {name: CHECKS[claim.check]().verdict for name, claim in known.items()}
    assert {name for name, verdict in verdicts.items() if verdict == REFUTED} == WRONG
    assert {name for name, verdict in verdicts.items() if verdict == ARITHMETIC} == {"gain_over_layers"}
    assert len(known) >= 25 and all(claim.source and claim.tags for claim in known.values())


def test_the_page_is_up_to_date() -> None:
    assert with_tables(PAGE.read_text()) == PAGE.read_text(), "make tables"
    assert all(f"| {claim.claim} |" in PAGE.read_text() for claim in claims().values() if claim.check)


def test_the_registration_is_of_all_that_is_claimed() -> None:
    claim = claims()["fp16_range"]
    others = [
        dataclasses.replace(claim, **change)
        for change in ({"claim": "other"}, {"source": "other"}, {"check": "other"}, {"tags": ("other",)})
    ]
    assert len({claim.registration, *(other.registration for other in others)}) == 5


GOOD = "claim: one\nsource: two\ntags: [formats]\ncheck: fp16_range\n"


def own(folder: Path, text: str, name: str = "mine") -> Path:
    (folder / "claim").mkdir()
    (folder / "claim" / f"{name}.yaml").write_text(text)
    return folder


def test_a_claim_of_ones_own_is_one_file(tmp_path: Path, capsys) -> None:
    folder = own(tmp_path, GOOD)
    assert claims(folder)["mine"].claim == "one"
    assert console.run(["claims", "--config-dir", str(folder), "mine"]) == 0
    said = capsys.readouterr().out
    assert "confirmed: the largest is 65504" in said and "source       two" in said


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("claim: one\ncheck: fp16_range\n", "source: is missing; allowed: claim, source, tags, check, all of them"),
        (GOOD + "threshold: 3\n", "threshold: unknown key; allowed: claim, source, tags, check"),
        (GOOD.replace("fp16_range", "fp16_rang"), "check=fp16_rang: unknown check; did you mean fp16_range?"),
        (GOOD.replace("[formats]", "formats"), "tags='formats': not a list of words"),
        (GOOD.replace("[formats]", "[1]"), "tags=[1]: not words"),
        (GOOD.replace("one", "1"), "claim=1: not text"),
        ("- 1\n", "a list, not a mapping"),
    ],
)
def test_a_bad_claim_is_one_line(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        claims(own(tmp_path, text))
    assert any(reason in line and "mine.yaml" in line for line in error.value.reasons), error.value.reasons


def test_a_name_is_that_of_one_claim(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is a claim of that name already"):
        claims(own(tmp_path, GOOD, "fp16_range"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope"], "claim=nope: unknown claim; allowed: "),
        (["fp16_rang"], "did you mean fp16_range?"),
        (
            ["--tag", "x"],
            "--tag x: no claim has it; allowed: architecture, clipping, costs, ",
        ),
        (["--config-dir", "/nowhere"], "no such folder"),
    ],
)
def test_wrong_words_are_one_line(capsys, words: list[str], said: str) -> None:
    assert console.run(["claims", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_list_has_them_all(capsys) -> None:
    assert console.run(["claims"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in claims())
    assert console.run(["claims", "--tag", "costs"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:] if line[:1].strip()] == [
        claim.name for claim in chosen([], "costs")
    ]


# --- each number by another way ----------------------------------------------------------------------------------


def test_limits_are_those_of_ieee() -> None:
    assert formats.softmax_limit("fp32") == pytest.approx(math.log((2 - 2**-23) * 2.0**127))
    assert formats.softmax_limit("bf16") == pytest.approx(math.log((2 - 2**-7) * 2.0**127))
    assert formats.softmax_limit("fp16") == pytest.approx(math.log((2 - 2**-10) * 2.0**15))
    for format_, type_ in (("fp16", np.float16), ("fp32", np.float32)):
        limit = formats.softmax_limit(format_)
        with np.errstate(over="ignore"):
            assert np.isfinite(np.exp(type_(limit - 0.01))) and np.isinf(np.exp(type_(limit + 0.01)))
        assert formats.is_exp_finite(limit - 0.01, format_) and not formats.is_exp_finite(limit + 0.01, format_)
    assert formats.is_exp_finite(11.1, "bf16") and not formats.is_exp_finite(11.1, "fp16")
    with pytest.raises(ConfigError, match="format=int8: unknown; allowed: fp32"):
        formats.softmax_limit("int8")


def eight_bits(mantissa: int, bias: int) -> list[float]:
    """All positive finite numbers of a format of 8 bits, by its definition."""
    found = []
    for code in range(128):
        exponent, rest = code >> mantissa, code & ((1 << mantissa) - 1)
        is_last = exponent == (1 << (7 - mantissa)) - 1
        if is_last and (mantissa == 2 or rest == (1 << mantissa) - 1):
            continue  # e5m2 has infinities and NaN there, e4m3 one NaN
        size = rest / 2**mantissa
        found.append((1 + size) * 2.0 ** (exponent - bias) if exponent else size * 2.0 ** (1 - bias))
    return found


@pytest.mark.parametrize(("format_", "mantissa", "bias"), [("fp8_e4m3", 3, 7), ("fp8_e5m2", 2, 15)])
def test_neighbours_are_those_of_the_definition(format_: str, mantissa: int, bias: int) -> None:
    numbers = np.array(eight_bits(mantissa, bias))
    for value in (0.037, 1.0, 3.3, 0.0019):
        expected = numbers[numbers <= value].max(), numbers[numbers >= value].min()
        assert formats.neighbours(value, format_) == expected
    assert formats.rounding_error(format_) == 2.0 ** -(mantissa + 1)
    with pytest.raises(ConfigError, match="not of 8 bits"):
        formats.neighbours(1.0, "fp16")


def test_sums_lose_what_does_not_fit() -> None:
    mean, worst = formats.running_sum_error("bf16")
    assert 2**-8 < mean < 0.02 and mean < worst < 0.06
    assert formats.running_sum_error("fp32")[0] < 2**-20
    assert [formats.ones_summed("bf16", count) for count in (256, 257, 512)] == [256, 256, 256]
    assert formats.ones_summed("fp32", 512) == 512


def test_norms_softmax_and_gains() -> None:
    output, gain = formats.rms_norm_at_zero(1e-6)
    assert output == 0 and gain == pytest.approx(1000, rel=1e-4) and math.isnan(formats.rms_norm_at_zero(0.0)[0])
    logits = torch.randn(3, 7)
    torch.testing.assert_close(formats.softmax(logits), torch.softmax(logits, -1))
    torch.testing.assert_close(formats.softmax(logits, subtracts=False), torch.softmax(logits, -1))
    assert formats.gain_to_overflow(80, "fp32") ** 80 == pytest.approx(torch.finfo(torch.float32).max, rel=1e-6)
    assert formats.gain_to_overflow(80, "fp16") == pytest.approx(1.1487, abs=1e-4)


@pytest.mark.parametrize("weight", [1e-4, 0.02, -0.5, 0.999, 1.0, 1.5, -1.75, 3.0])
def test_bits_by_struct(weight: float) -> None:
    (word,) = struct.unpack("<I", struct.pack("<f", weight))
    values = [struct.unpack("<f", struct.pack("<I", word ^ (1 << bit)))[0] for bit in range(32)]
    assert formats.ending_bits(weight) == [bit for bit, value in enumerate(values) if not math.isfinite(value)]
    assert formats.largest_after_flip(weight) == max(abs(value) for value in values if math.isfinite(value))


@pytest.mark.parametrize("beta2", [0.95, 0.99, 0.999])
def test_an_outlier_under_torchs_adam(beta2: float) -> None:
    """The closed form is what torch does once its moments have settled; gradients of size 1 have no mean."""
    weights = torch.zeros(2, requires_grad=True, dtype=torch.float64)
    optimizer = torch.optim.AdamW([weights], lr=1.0, betas=(0.9, beta2), eps=0.0, weight_decay=0.0)
    moved = []
    settled = 20_000
    for step in range(settled + 3):
        size = 100.0 if step == settled else 1.0
        # Two weights with opposite signs of the usual gradient: what the two share is the outlier's doing.
        sign = 1.0 if step % 2 else -1.0
        before = weights.detach().clone()
        weights.grad = torch.tensor([100.0, 100.0] if step == settled else [sign, -sign], dtype=torch.float64) * (
            1.0 if step == settled else size
        )
        optimizer.step()
        if step >= settled:
            moved.append(float((before - weights.detach()).mean()))
    assert moved == pytest.approx(optimizers.steps_after_outlier(100, beta2, 3), rel=2e-3)
    assert all(step <= optimizers.largest_update(beta2) for step in moved)


def test_the_memory_of_an_outlier_by_simulation() -> None:
    for beta2 in (0.95, 0.999):
        second, steps = 1.0, 0
        second = beta2 * second + (1 - beta2) * 100**2
        assert second == pytest.approx(optimizers.second_moment_after(100, beta2))
        while 1 / math.sqrt(second) < 0.5:
            second, steps = beta2 * second + (1 - beta2), steps + 1
        assert abs(steps - optimizers.steps_below(0.5, 100, beta2)) <= 1
    assert optimizers.steps_below(0.5, 1.5, 0.999) == 0
    assert optimizers.time_constant(0.95) == pytest.approx(20)


def test_gradients_of_losses_lie_within_their_bounds() -> None:
    for probability in (0.5, 1e-2, 1e-8):
        for classes in (2, 256, 50_257):
            norm, low, high = optimizers.logit_gradient(probability, classes)
            assert low <= norm <= high * (1 + 1e-9)
    assert optimizers.logit_gradient(1e-8, 2)[0] == pytest.approx(math.sqrt(2))


def test_scaled_gradients_move_sgd_alone() -> None:
    one, hundred = optimizers.update_of_scaled("sgd", (1.0, 100.0))
    assert hundred == pytest.approx(100 * one)
    one, hundred = optimizers.update_of_scaled("adamw", (1.0, 100.0))
    assert hundred == pytest.approx(one, rel=1e-4)
    narrow, wide = (optimizers.literal_mup_activation(width, layers=2) for width in (64, 256))
    assert narrow / wide == pytest.approx(4, rel=0.1), "1/sqrt(width) a layer"
    decay = inspect.signature(torch.optim.AdamW.__init__).parameters["weight_decay"].default
    assert optimizers.default_weight_decay() == decay


def test_what_a_nan_reaches() -> None:
    loss, plain = spreading.nan_shares(is_clipped=False)
    spared = {name for name, share in plain.items() if share < 1}
    assert math.isnan(loss) and spared == {"embedding.weight", "values.weight"} and min(plain.values()) > 0
    assert set(spreading.nan_shares(is_clipped=True)[1].values()) == {1.0}
    clean, found = spreading.gradients(torch.zeros(1, 4, dtype=torch.int64))
    assert math.isfinite(clean) and all(x.isfinite().all() for x in found.values())
    assert [spreading.reduced(ranks, 1.0) for ranks in (1, 2, 8)] == [1, 0.5, 0.125]
    assert spreading.is_checkpointing_exact()
    assert spreading.accumulation_error((5, 5, 5)) < 1e-15 < 0.1 < spreading.accumulation_error((8, 2, 1))


def test_costs() -> None:
    assert [costs.seen_share(lead, 10) for lead in (1, 3, 30)] == [0.1, 0.3, 1.0]
    draws = np.random.default_rng(0).uniform(0, 1000, 100_000)
    assert costs.lost_steps(1000, 7) == pytest.approx(draws.mean() + 7, rel=0.01)
    assert costs.step_seconds(405e9, 16e6, 16_384, 400e12) == pytest.approx(5.93, abs=0.01)
    assert costs.money(3600, 2.0, 4, 1.5) == 12
    verdicts = {CHECKS[name]().verdict for name in ("time_constants", "cost_of_a_spike")}
    assert verdicts == {CONFIRMED, REFUTED}

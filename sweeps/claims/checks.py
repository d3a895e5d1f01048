"""Claims that arithmetic decides: each check computes the numbers with `analysis.arithmetic`, and says what follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from analysis.arithmetic import costs, formats, optimizers, spreading

CONFIRMED, REFUTED, ARITHMETIC = "confirmed", "refuted", "arithmetic"


@dataclass(frozen=True)
class Answer:
    """A verdict, the sentence behind it, and the numbers in it by name."""

    verdict: str
    words: str
    numbers: Mapping[str, float] = field(default_factory=dict)


Check = Callable[[], Answer]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Have a claim's `check` find this function by its name."""
    CHECKS[function.__name__] = function
    return function


def _answer(holds: bool, words: str, **numbers: float) -> Answer:
    return Answer(CONFIRMED if holds else REFUTED, words, numbers)


# --- formats -----------------------------------------------------------------------------------------------------


@check
def softmax_overflow_fp32() -> Answer:
    """Exp in fp32."""
    limit = formats.softmax_limit("fp32")
    holds = formats.is_exp_finite(88.72, "fp32") and not formats.is_exp_finite(88.73, "fp32")
    words = f"exp overflows in fp32 above {limit:.2f}, if the largest logit is not subtracted"
    return _answer(holds, words, limit=limit)


@check
def softmax_overflow_bf16() -> Answer:
    """Exp in bf16 and fp16."""
    bf16, fp16 = formats.softmax_limit("bf16"), formats.softmax_limit("fp16")
    holds = not formats.is_exp_finite(12.0, "bf16")
    words = f"that is fp16 ({fp16:.2f}); bf16 has the range of fp32 and overflows above {bf16:.2f}"
    return _answer(holds, words, bf16=bf16, fp16=fp16)


@check
def softmax_shifted() -> Answer:
    """Softmax of large logits, with and without the largest subtracted."""
    logits = torch.tensor([1e5, 1e5 - 1.0, 0.0])
    shifted, plain = formats.softmax(logits), formats.softmax(logits, subtracts=False)
    holds = bool(shifted.isfinite().all()) and bool(plain.isnan().any())
    words = f"logits of 1e5 give {float(shifted[0]):.3f} with the largest subtracted, and NaN without"
    return _answer(holds, words, largest=float(shifted[0]))


@check
def fp8_neighbours() -> Answer:
    """The 8-bit numbers around 0.037."""
    pairs = {name: formats.neighbours(0.037, name) for name in ("fp8_e4m3", "fp8_e5m2")}
    holds = (0.03125, 0.0625) in pairs.values()
    errors = {name: formats.rounding_error(name) for name in pairs}
    told = "; ".join(f"{low:.8g} and {high:.8g} in {name[4:]}" for name, (low, high) in pairs.items())
    largest = " and ".join(f"{error:.2%}" for error in errors.values())
    return _answer(holds, f"0.037 lies between {told}; rounding errs by at most {largest}", **errors)


@check
def sum_in_bf16() -> Answer:
    """A running sum of 128 values."""
    bf16, worst = formats.running_sum_error("bf16")
    fp32, _ = formats.running_sum_error("fp32")
    ones = formats.ones_summed("bf16", 512)
    words = (
        f"a sum of 128 values is off by {bf16:.2%} on average in bf16 (at most {worst:.1%} of 200 such sums), by "
        f"{fp32:.0e} in fp32; 512 ones come to {ones:g} in bf16"
    )
    return _answer(bf16 > 2**-8 and fp32 < 2**-20, words, bf16=bf16, fp32=fp32, ones=ones)


@check
def rms_norm_of_zero() -> Answer:
    """RMSNorm of zeros, with and without epsilon."""
    (without, _), (output, gain) = formats.rms_norm_at_zero(0.0), formats.rms_norm_at_zero(1e-6)
    words = f"only without epsilon; with 1e-6 the output is {output:g}, and gradients grow {gain:,.0f}-fold"
    return _answer(math.isnan(output), words, without=without, output=output, gain=gain)


@check
def gain_over_layers() -> Answer:
    """The gain of a layer at which 80 of them overflow."""
    gains = {name: formats.gain_to_overflow(80, name) for name in ("fp32", "fp16")}
    words = (
        f"each of 80 layers has to multiply the gradient by {gains['fp32']:.2f} in fp32 and bf16, by "
        f"{gains['fp16']:.3f} in fp16; whether a model does so is to be measured"
    )
    return Answer(ARITHMETIC, words, gains)


@check
def fp16_range() -> Answer:
    """The largest number of fp16, and what comes of overflow."""
    largest = torch.finfo(torch.float16).max
    over = torch.tensor(largest, dtype=torch.float16) * 2
    holds = largest == 65504 and bool(over.isinf()) and bool((over - over).isnan())
    least = torch.finfo(torch.float16).smallest_normal
    words = f"the largest is {largest:g}; twice that is infinite, and that less itself NaN; digits go below {least:.0e}"
    return _answer(holds, words, largest=largest, least=least)


@check
def bit_to_nan() -> Answer:
    """Every bit of weights of several sizes."""
    small = {bit for weight in (1e-4, 0.02, 0.5, 0.99) for bit in formats.ending_bits(weight)}
    one = formats.ending_bits(1.5)
    largest = formats.largest_after_flip(0.02)
    words = f"one of size 1 to 2, by bit {one[0]}; below 1 no single flip does, but 0.02 can become {largest:.1e}"
    return _answer(one == [30] and not small, words, bit=one[0], largest=largest)


# --- within a step -----------------------------------------------------------------------------------------------


@check
def nan_spreads() -> Answer:
    """One NaN in one head, with and without clipping."""
    loss, plain = spreading.nan_shares(is_clipped=False)
    _, clipped = spreading.nan_shares(is_clipped=True)
    spared = [name for name, share in plain.items() if share < 1]
    rank = spreading.reduced(8, math.nan)
    holds = math.isnan(loss) and math.isnan(rank) and set(clipped.values()) == {1.0}
    words = "loss and every gradient are NaN after one step, on every rank after the all-reduce"
    exceptions = f"; without clipping by global norm parts of {', '.join(spared)} are spared" if spared else ""
    return _answer(holds, words + exceptions, spared=len(spared))


@check
def rank_spreads() -> Answer:
    """The mean over ranks of one that is wrong."""
    noise = {ranks: spreading.reduced(ranks, 1.0) for ranks in (2, 8)}
    holds = math.isnan(spreading.reduced(8, math.nan)) and noise[8] == 1 / 8
    words = "NaN reaches every replica whole; noise reaches all of them too, divided by the number of ranks"
    return _answer(holds, words, share_of_8=noise[8])


@check
def accumulation_is_exact() -> Answer:
    """Micro-batches of equal and of unequal length."""
    equal, unequal = spreading.accumulation_error((64, 64, 64, 64)), spreading.accumulation_error((128, 64, 32, 16))
    words = (
        f"up to rounding where micro-batches have equally many tokens; with 128, 64, 32 and 16 the mean "
        f"of means is off by {unequal:.0%}"
    )
    return _answer(equal < 1e-12, words, equal=equal, unequal=unequal)


@check
def checkpointing_is_exact() -> Answer:
    """Gradients with activation checkpointing."""
    return _answer(spreading.is_checkpointing_exact(), "gradients are those without it, bit for bit")


# --- optimizers --------------------------------------------------------------------------------------------------


@check
def gradient_of_a_large_loss() -> Answer:
    """Cross-entropy's gradient at probabilities of 1e-2 and 1e-8."""
    (likely, *_), (unlikely, low, high) = optimizers.logit_gradient(1e-2), optimizers.logit_gradient(1e-8)
    words = (
        f"a loss of {-math.log(1e-8):.1f} is right; the gradient at the logits is {unlikely:.3f} against {likely:.3f} "
        f"at a loss of {-math.log(1e-2):.1f}: it never exceeds sqrt 2 a token, however large the loss"
    )
    return _answer(unlikely > 3 * likely, words, likely=likely, unlikely=unlikely, low=low, high=high)


@check
def outlier_is_a_large_step() -> Answer:
    """Adam's updates after one gradient that is 100 times as large."""
    first = {beta2: optimizers.steps_after_outlier(100, beta2, 2) for beta2 in (0.999, 0.95)}
    slow, fast = first[0.999], first[0.95]
    bound = optimizers.largest_update(0.999)
    words = (
        f"the step is {slow[0]:.2f} lr and the next {slow[1]:.2f} at beta2 = 0.999 (never above {bound:.2f}), "
        f"{fast[0]:.2f} and {fast[1]:.2f} at 0.95"
    )
    return _answer(slow[1] > 2, words, slow=slow[0], slow_next=slow[1], fast=fast[0], fast_next=fast[1])


@check
def second_moment_is_stale() -> Answer:
    """How much the second moment has seen of the outlier."""
    grown = optimizers.second_moment_after(100, 0.999)
    words = f"the second moment has grown {grown:.0f}-fold at the outlier itself; the next steps are large by momentum"
    return _answer(grown < 2, words, grown=grown)


@check
def time_constants() -> Answer:
    """How long averages remember."""
    slow, fast = optimizers.time_constant(0.999), optimizers.time_constant(0.95)
    long, short = optimizers.steps_below(0.5, 100, 0.999), optimizers.steps_below(0.5, 100, 0.95)
    words = (
        f"time constants of {slow:.0f} and {fast:.0f} steps; but one gradient 100 times too large keeps updates below "
        f"half of their size for {long:,} and {short} steps"
    )
    holds = abs(slow - 1000) < 1e-6 and abs(fast - 20) < 1e-6
    return _answer(holds, words, slow=long, fast=short)


@check
def clipping_bounds_updates() -> Answer:
    """How far Adam and SGD move where every gradient is scaled."""
    adam, sgd = (optimizers.update_of_scaled(name, (1.0, 100.0)) for name in ("adamw", "sgd"))
    bound = optimizers.largest_update(0.95)
    ratios = adam[1] / adam[0], sgd[1] / sgd[0]
    words = (
        f"under SGD it does; with gradients 100 times as large Adam moves {ratios[0]:.3f} times as far, and its own "
        f"moments bound a step ({bound:.2f} lr for one outlier at beta2 = 0.95)"
    )
    return _answer(ratios[0] > 2, words, adam=ratios[0], sgd=ratios[1], bound=bound)


@check
def literal_mup() -> Answer:
    """Activations of the recipe as it is written, at two widths."""
    narrow, wide = (optimizers.literal_mup_activation(width) for width in (64, 256))
    words = (
        f"on top of a variance of 1/fan-in it shrinks activations: after 4 layers to {narrow:.1e} at width 64 and "
        f"{wide:.1e} at width 256"
    )
    return _answer(abs(math.log(wide / narrow)) < 0.5, words, narrow=narrow, wide=wide)


@check
def default_weight_decay() -> Answer:
    """That of torch."""
    found = optimizers.default_weight_decay()
    words = f"torch.optim.AdamW has {found:g}, and the paper sets none; 0.1 is the custom of GPT-3 and Llama"
    return _answer(found == 0.1, words, default=found)


@check
def norm_of_second_moment() -> Answer:
    """How the second moment rises at an outlier, at two decays."""
    slow, fast = (optimizers.second_moment_after(100, beta2) for beta2 in (0.999, 0.95))
    words = (
        f"one gradient 100 times as large raises it {slow:.0f}-fold at beta2 = 0.999 and {fast:.0f}-fold at 0.95: "
        "more at a low beta2"
    )
    return _answer(slow > fast, words, slow=slow, fast=fast)


# --- costs -------------------------------------------------------------------------------------------------------


@check
def logging_every_ten() -> Answer:
    """How often a sign that leads by 1 to 3 steps is logged."""
    shares = [costs.seen_share(lead, 10) for lead in (1, 3)]
    words = f"a sign that leads by 1 to 3 steps is logged before {shares[0]:.0%} to {shares[1]:.0%} of spikes"
    return _answer(shares[0] > 0.9, words, least=shares[0], most=shares[1])


@check
def checkpoint_cadence() -> Answer:
    """The loss of work at two cadences."""
    ratio = costs.lost_steps(100_000) / costs.lost_steps(1_000)
    words = f"100,000 steps lose {ratio:g} times what 1,000 do, and 5 h are 10 times 30 min; half an interval is lost"
    return _answer(ratio == 10, words, ratio=ratio)


@check
def cost_of_a_spike() -> Answer:
    """500 steps of Llama 3 405B at list prices."""
    seconds = costs.step_seconds(405e9, 16e6, 16_384, 400e12)
    low, high = (costs.money(500, seconds, 16_384, price) for price in (2.0, 4.0))
    implied = 130_000 / costs.money(500, seconds, 16_384, 1.0)
    words = (
        f"a step takes {seconds:.1f} s on 16,384 GPUs at 400 TFLOP/s, so 500 steps cost ${low:,.0f} to ${high:,.0f} "
        f"at $2 to $4 an hour of a GPU; $130,000 would take ${implied:.1f}"
    )
    return _answer(high >= 130_000, words, low=low, high=high, implied=implied)


@check
def cost_of_an_incident() -> Answer:
    """550 steps at a price for an hour."""
    told, right = 550 * 1.10 / 3600, costs.money(550, 0.5, 1, 1.10)
    words = f"550 x $1.10 / 3600 = ${told:.2f} takes a step for a second; at half a second it is ${right:.3f}"
    holds = all(math.isclose(told, costs.money(550, seconds, 1, 1.10)) for seconds in (0.5, 1.0, 6.0))
    return _answer(holds, words, told=told, right=right)

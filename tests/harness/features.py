"""Settings of everything that a trial may have, for the promises that hold whatever is on (test_conformance.py)."""

from __future__ import annotations

from typing import Any

from harness.detectors.table import DETECTORS
from harness.optim.optimizers import OPTIMIZERS
from harness.readings.table import READINGS
from tests.harness.experts import OF_OTHERS
from tests.harness.variants import VARIANTS

# Fields as `engine.different` takes them: a tuple holds a value for each trial, in turn.
Fields = dict[str, Any]

GROWTHS: dict[str, Fields] = {
    "truncated": {"sequence_start": 2, "sequence_steps": 5},
    "reshaped": {"sequence_start": 2, "sequence_steps": 5, "sequence_mode": "reshape"},
    "batches": {"batch": 4, "batch_start": 1, "batch_steps": 5},
    "batches on ranks": {"batch": 6, "ranks": 2, "batch_start": 2, "batch_steps": 5},
    "both": {"batch": 4, "batch_start": 1, "batch_steps": 3, "sequence_start": 3, "sequence_steps": 5},
    "both, reshaped": {
        "batch": 4,
        "ranks": 2,
        "batch_start": 1,
        "batch_steps": 4,
        "sequence_start": 1,
        "sequence_steps": 6,
        "sequence_mode": "reshape",
    },
}
THRESHOLDS = {"rarity": 3.9, "repetition": 0.1, "entropy": 1.7}
"""In the tests' corpus, Zipf's law over 64 tokens, each drops some sequences of 8 tokens and keeps most."""
SCREENS: dict[str, Fields] = {
    "all three": {"batch": 6, **{name: (limit, limit * 1.01, limit * 1.02) for name, limit in THRESHOLDS.items()}},
    "ranks": {"batch": 6, "ranks": 3, "rarity": (3.7, 3.75, 3.8)},
    "sequences grow": {"batch": 4, "rarity": (3.7, 3.75, 3.8), "sequence_start": 2, "sequence_steps": 5},
    "pieces": {
        "batch": 4,
        "entropy": (1.8, 1.75, 1.7),
        "sequence_start": 2,
        "sequence_steps": 5,
        "sequence_mode": "reshape",
    },
    "batches grow": {"batch": 4, "repetition": (0.05, 0.1), "batch_start": 1, "batch_steps": 5},
}
LOGITS: dict[str, Fields] = {
    "temperature": {"attention_temperature": (0.4, 0.6, 0.8)},
    "temperature, fused": {"attention_temperature": (0.4, 0.6, 0.8), "attention": "fused"},
    "cap": {"attention_cap": (0.5, 1.5, 2.5)},
    "clipped softmax": {"soft_clip_high": (1.0, 1.03, 1.06), "soft_clip_low": (0.0, -0.02, -0.04)},
    "softmax in bf16": {"softmax": "products", "precision": "bf16"},
    "all in fp16": {
        "attention_temperature": (0.4, 0.6, 0.8),
        "attention_cap": (0.5, 1.5, 2.5),
        "soft_clip_high": 1.03,
        "soft_clip_low": (0.0, -0.02, -0.04),
        "softmax": "products",
        "precision": "fp16",
    },
}
LOSSES: dict[str, Fields] = {
    "z-loss": {"z_loss": (0.0, 0.01, 0.02)},
    "output cap": {"output_cap": (1.0, 2.0, 3.0)},
    "z-loss and cap in bf16": {"z_loss": (0.0, 0.01, 0.02), "output_cap": (1.0, 2.0, 3.0), "precision": "bf16"},
    "z-loss and cap, muP": {
        "z_loss": (0.0, 0.01, 0.02),
        "output_cap": (1.0, 2.0, 3.0),
        "parametrization": "mup",
        "base_width": 8,
    },
}
ZCLIP = tuple({"threshold": 0.1 + 0.05 * r, "warmup": 1 + r, "alpha": 0.9 - 0.1 * r} for r in range(3))
ADAGC = tuple({"threshold": 1.02 + 0.1 * r, "warmup": r, "beta": 0.98 - 0.1 * r} for r in range(3))
CLIPS: dict[str, Fields] = {  # all of which act in these runs, and leave their warm-up before anything strikes
    "clip_value": {"clip": None, "clip_value": (0.003, 0.006, 0.009)},
    "clip_tensor": {"clip": None, "clip_tensor": (0.03, 0.06, 0.09)},
    "rank_clip": {"clip": None, "rank_clip": tuple({"limit": x} for x in (0.03, 0.06, 0.09)), "ranks": 2, "batch": 4},
    "zclip": {"clip": None, "zclip": ZCLIP},
    "adagc": {"clip": None, "adagc": ADAGC},
    "clip": {"clip": (0.1, None, 0.3)},
    "all": {"clip_value": (0.1, 0.2), "clip_tensor": (0.3, 0.6), "zclip": ZCLIP, "adagc": ADAGC, "clip": 0.5},
    "qk_clip": {"qk_clip": (0.3, 0.6, 0.9)},
    "qk_clip, fused": {"qk_clip": (0.3, 0.6, 0.9), "attention": "fused"},
}
SCALES: dict[str, Fields] = {  # in fp16 the first one overflows at once
    f"loss scale in {precision}": {
        "precision": precision,
        "loss_scaling": ("dynamic", "dynamic", "static", "static", "none"),
        "loss_scale": (2.0**26, 1024.0, 3.0, 65536.0, 1.0),
        "loss_scale_growth": (2, 3),
    }
    for precision in ("fp32", "fp16")
}
PRECISIONS: dict[str, Fields] = {
    "bf16": {"precision": "bf16"},
    "fp16, norms and softmax too": {"precision": "fp16", "norms": "products", "softmax": "products"},
    "bf16, fused": {"precision": "bf16", "attention": "fused"},
    "fp16, dropout": {"precision": "fp16", "dropout": (0.1, 0.2)},
    "fp16, learned, swiglu, qk_norm": {
        "precision": "fp16",
        "positions": "learned",
        "activation": "swiglu",
        "qk_norm": True,
    },
    "tf32": {"precision": "tf32"},
    "tf32, qk_norm, swiglu, ranks": {
        "precision": "tf32",
        "qk_norm": True,
        "activation": "swiglu",
        "batch": 4,
        "ranks": 2,
    },
    "fp8": {"precision": "fp8"},
    "fp8, smooth SwiGLU": {"precision": "fp8", "activation": "swiglu", "smooth_swiglu": True},
    "fp8, swiglu, qk_norm, ranks": {
        "precision": "fp8",
        "activation": "swiglu",
        "qk_norm": True,
        "batch": 4,
        "ranks": 2,
        "loss_scaling": "dynamic",
    },
}
OPTIONS: dict[str, Fields] = {  # of optimizers; short intervals, so that resets happen
    "spam": {"spam": {"interval": 4, "warmup": 2, "grace": 2}},
    "stable_spam": {"stable_spam": {"interval": 4}},
    "adafactor": {"adafactor": {"relative_step": True}},
    "lars": {"lars": {"trust": 1.0}},
    "soap": {"soap": {"every": 2}},
}
OTHERS: dict[str, Fields] = {
    "plain": {},
    "muP": {"parametrization": "mup", "base_width": 8},
    "ranks": {"batch": 4, "ranks": 2},
    "micro-batches": {"batch": 4, "micro_batches": 2},
    "clipped updates": {"clip_update": (0.1, 0.5, 1.0)},
    "decay by the schedule": {"decay_follows": "schedule"},
    "experts": {"block": {"channel_mixer": "moe"}, "moe": {"bias_rate": 0.01, "router_z": 1e-3}},
    "experts by older weights": {"block": {"channel_mixer": "moe"}, "moe": {"lag": 2, "jitter": 0.1}},
    "experts by frozen weights": {"block": {"channel_mixer": "moe"}, "moe": {"routing": "frozen", "frozen_from": 1}},
    "experts, dense first": {"block": {"channel_mixer": "moe"}, "moe": {"dense_first": 1, "bias_rate": 0.01}},
    "experts, probed": {"block": {"channel_mixer": "moe"}, "signals": {"routing_probe": 2}},
    "experts, ranks": {
        "block": {"channel_mixer": "moe"},
        "moe": {"shared": 1, "capacity": 0.9},
        "activation": "swiglu",
        "batch": 4,
        "ranks": 2,
    },
}


def named(kind: str, settings: dict[str, Fields], **common: Any) -> dict[str, Fields]:
    return {f"{kind}: {name}": {**common, **fields} for name, fields in settings.items()}


LOADED = {"vocabulary": 64, "context": 8}  # what growth and thresholds are made for
READ: Fields = {"signals": dict.fromkeys(READINGS, 1)}  # all that can be, at every step
NOW_AND_THEN: Fields = {"signals": {name: 2 + number % 2 for number, name in enumerate(READINGS)}}
READS: dict[str, Fields] = {
    "all": READ,
    "now and then, ranks": {**NOW_AND_THEN, "batch": 6, "ranks": 3},
    "micro-batches, fused": {**READ, "batch": 4, "micro_batches": 2, "attention": "fused"},
    "fp16": {**NOW_AND_THEN, "precision": "fp16", "qk_norm": True},
    "none": {"signals": dict.fromkeys(READINGS, 0)},
}
WATCHED: Fields = {  # by every detector that has what it watches, with windows that are filled in these runs
    **READ,
    "batch": 6,
    "ranks": 3,
    "detect": {"name": "+".join(sorted(set(DETECTORS) - OF_OTHERS))},
    "detect.kurtosis": {"window": 4, "persist": 1, "sigma": 1.0},
    "detect.gain_peers": {"window": 4, "alpha": 1.0},
    "detect.entropy_collapse": {"window": 4, "fall": 1.001},
    "detect.qk_rank": {"window": 4, "fall": 1.01},
    "detect.moment_bound": {"limit": 0.01},
    "detect.skip_step": {"window": 4, "sigma": 1.0},
    "detect.spike_score": {"window": 4, "least": 3, "sigma": 1.0},
    "detect.spiky_loss": {"samples": 2, "factor": 1.0},
    "detect.running_mean": {"window": 3, "rise": 0.01},
    "detect.median_mad": {"window": 4, "sigma": 1.0, "persist": 2},
    "detect.cusum": {"window": 5, "least": 3, "limit": 2.0},
    "detect.update_norm": {"window": 4, "sigma": 1.0},
    "detect.attention_growth": {"window": 4, "growth": 1.1},
}
REWARDED: Fields = {"objective": {"name": "policy"}, "batch": 4, "policy.count": {"token": 3}}
POLICY = {"reward": "count", "group": 2}
POLICIES: dict[str, Fields] = {
    "plain": {"policy": tuple({**POLICY, "beta": beta, "clip_high": high} for beta, high in ((0.1, 0.2), (0.0, None)))},
    "a sampler apart": {
        "policy": {
            **{**POLICY, "sampler_noise": 0.5, "sampler_lag": 1, "sampler_temperature": 1.1, "end": 5, "entropy": 0.01},
            **{"correction": "token_truncate", "mean": "sequences", "kl_in": "reward", "kl": "k1", "beta": 0.1},
            **{"beta_schedule": "adaptive", "sharpness": 2.0},
        },
    },
    "a learned reward": {
        "policy": tuple({"reward": "quality", "group": 2, "beta": 0.1, "proxy": labels} for labels in (3, 9))
    },
    "experts replayed": {
        "policy": {**POLICY, "routing_replay": True, "sampler_noise": 0.1},
        "block": {"channel_mixer": "moe"},
    },
    "a critic": {
        "policy": {
            **{**POLICY, "critic": True, "baseline": "none", "scale": "batch", "kl_in": "reward", "kl": "k1"},
            **{"beta": 0.1, "end": 5, "mix_in": 0.5, "entropy_target": 4.0},
        },
    },
}

FEATURES: dict[str, Fields] = {
    **OTHERS,
    "detectors": WATCHED,
    **named("readings", READS),
    **named("model", VARIANTS),
    **named("logits", LOGITS),
    **named("loss", LOSSES),
    **named("clips", CLIPS),
    **SCALES,
    **named("precision", PRECISIONS),
    **named("screen", SCREENS, **LOADED),
    **named("growth", GROWTHS, **LOADED),
    **named("optimizer", {name: {"name": name} | OPTIONS.get(name, {}) for name in OPTIMIZERS}),
    **named("policy", POLICIES, **REWARDED),
}

SWIGLU = {"activation": "swiglu", "expansion": 4}
NEUTRAL: dict[str, tuple[Fields, Fields]] = {  # settings of no strength, and what they change no bit of
    "a clamp that nothing reaches": ({**SWIGLU, "swiglu_clamp": 1e30}, SWIGLU),
    "no block of Mix-LN is post-LN": ({"placement": "mix", "mix": 0.0}, {"placement": "pre"}),
    "every block of Mix-LN is post-LN": ({"placement": "mix", "mix": 1.0}, {"placement": "post"}),
    "post-LN has no norm in front": ({"placement": "post", "attention_norm": False}, {"placement": "post"}),
    "no share is dropped": ({"dropout": 0.0, "attention": "explicit"}, {"attention": "explicit"}),
    "one micro-batch": ({"micro_batches": 1}, {}),
    "QK-Clip that nothing reaches": ({"qk_clip": 1e30}, {}),
    "QK-Clip that nothing reaches, fused": ({"qk_clip": 1e30, "attention": "fused"}, {"attention": "fused"}),
    **{
        f"{name} that nothing reaches": ({"clip": None, name: limit}, {"clip": None})
        for name, limit in {
            "clip": 1e30,
            "clip_value": 1e30,
            "clip_tensor": 1e30,
            "rank_clip": {"limit": 1e30},
            "zclip": {"threshold": 1e30, "warmup": 1},
            "adagc": {"threshold": 1e30, "warmup_clip": 1e30},
        }.items()
    },
    **{
        f"a {name} that nothing exceeds{', ' if fields else ''}{', '.join(fields)}": ({**fields, **limit}, fields)
        for fields in ({}, {"ranks": 2, "batch": 4}, {"z_loss": 0.1}, {"attention": "fused"})
        for name, limit in {
            "rarity": {"rarity": 100.0},
            "repetition": {"repetition": 1.0},
            "entropy": {"entropy": 1e-9},
            "screen": {"rarity": 100.0, "repetition": 1.0, "entropy": 1e-9},
        }.items()
    },
    **{
        f"{name} in {precision}": ({"precision": precision, **kernel, **fields}, {"precision": precision, **kernel})
        for precision in ("fp32", "bf16")
        for name, kernel, fields in (
            ("a temperature of one", {}, {"attention_temperature": 1.0}),
            ("a temperature of one, fused,", {"attention": "fused"}, {"attention_temperature": 1.0}),
            ("a softmax between its ends", {}, {"soft_clip_high": 1.0, "soft_clip_low": 0.0}),
        )
    },
    **{
        f"{part} as exact as products in {precision}": (
            {"precision": precision, part: "products"},
            {"precision": precision},
        )
        for precision in ("fp32", "fp64")
        for part in ("softmax", "norms")
    },
}

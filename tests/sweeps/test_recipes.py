"""Published recipes: whole starting points, each against an implementation of its model by others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.config import ConfigError, Data, Model, Optim, Schedule, Train, Trial
from harness.loop.loop import train
from harness.model.branches.feedforward import feedforward_size
from harness.model.gpt2 import check_gpt2, gpt2_of, gpt2_tensors
from harness.training.pack import Pack
from harness.training.sites import FaultSchedule
from sweeps.commands.catalogue import entries
from sweeps.compose.grid import Composer
from sweeps.compose.places import is_general
from sweeps.running.job import corpus_of
from tests.sweeps.command import call, loader, only, results, trials

STEPS = 20
SMALL = ("model.width=32", "model.depth=2", "model.head_dim=8", "model.context=16", "train.batch=4", "data.source=zipf")
SMALL += ("data.vocabulary=61", "data.length=20000", "train.validate_tokens=64", "train.validate_between=64")
SMALL += (f"train.steps={STEPS}", "schedule.warmup=5", "optim.lr=1e-2", "train.precision=fp64", "seed=0,1,2")
RECIPES = [entry.name for entry in entries("recipe")]
GENERAL = [name for name in RECIPES if is_general("recipe", name, None)]


def packed(*overrides: str) -> Pack:
    """A fresh pack of these trials."""
    made = trials(*SMALL, *overrides)
    return Pack(
        made, corpus_of(dataclasses.replace(made[0].data, seed=None), made[0].model.context), torch.device("cpu")
    )


def trained(pack: Pack) -> dict[str, Tensor]:
    """Every step's signals, [R, n]."""
    blocks: list[Any] = []
    train(pack, FaultSchedule([None] * len(pack)), STEPS, lambda first, signals: blocks.append(signals))
    return {name: torch.from_numpy(blocks[0][name]) for name in ("loss", "grad_norm")}


def learned(pack: Pack, row: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of the first batch, and its gradients by name."""
    pack.begin(0)
    loss = pack.learn(pack.objective.batch(0))[row]
    return loss, {name: values.clone() for name, values in pack.tensors(pack.gradients, row).items()}


def their_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


# --- GPT-2 ---------------------------------------------------------------------------------------------------------

GPT2S = {
    "as published": [],
    "without biases, untied": ["model.biases=false", "model.tied_head=false"],
    "gelu": ["model.activation=gelu", "model.feedforward=37"],
    "fused attention": ["model.attention=fused"],
    "decay of matrices alone": ["optim.decay_embedding=false", "optim.weight_decay=1.0"],
}


@pytest.mark.parametrize("overrides", GPT2S.values(), ids=GPT2S)
def test_gpt2_is_that_of_transformers(overrides: list[str]) -> None:
    """Logits, loss, gradients and twenty steps of AdamW, as nanoGPT groups its parameters, in float64."""
    pack, fresh = (packed("recipe=gpt2", *overrides) for _ in range(2))
    signals = trained(pack)
    for row, trial in enumerate(fresh.planned):
        own = {name: values.clone() for name, values in fresh.tensors(fresh.weights, row).items()}
        theirs = gpt2_of(trial, own)
        batch = fresh.objective.batch(0)
        with torch.no_grad():
            logits = fresh.model(batch[:, :, :-1])[row].view(*batch.shape[1:2], -1, 61)
            torch.testing.assert_close(logits, theirs(batch[row, :, :-1]).logits, rtol=0, atol=1e-12)
        loss, gradients = learned(fresh, row)
        theirs.zero_grad()
        their_loss(theirs, batch[row]).backward()
        named = gpt2_tensors(trial.model, gradients)
        for name, parameter in theirs.named_parameters():
            if trial.model.biases or not name.endswith("bias"):
                torch.testing.assert_close(named[name], parameter.grad, rtol=0, atol=1e-12, msg=name)
        losses, norms = their_training(theirs, trial, lambda step, row=row: fresh.objective.batch(step)[row])
        torch.testing.assert_close(signals["loss"][row].double(), losses, rtol=0, atol=1e-6)  # stored as float32
        torch.testing.assert_close(signals["grad_norm"][row].double(), norms, rtol=1e-6, atol=0)
        ended = dict(pack.tensors(pack.weights, row))
        for name, values in gpt2_tensors(trial.model, ended).items():
            expected = theirs.state_dict()[name]
            if trial.model.biases or not name.endswith("bias"):
                torch.testing.assert_close(values, expected, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def their_training(model: nn.Module, trial: Trial, batch: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
    """AdamW with decay of all that has two dims (nanoGPT), clipping, and the schedule written once more."""
    optim, model = trial.optim, model.train()
    parameters = [(n, p) for n, p in model.named_parameters() if trial.model.biases or not n.endswith("bias")]
    spared = ("wte", "wpe") if not optim.decay_embedding else ()
    decayed = [p for n, p in parameters if p.dim() == 2 and not any(s in n for s in spared)]
    rest = [p for n, p in parameters if not any(p is d for d in decayed)]
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps)
    losses, norms = [], []
    for step in range(STEPS):
        done = (step + 1 - 5) / (STEPS - 5)
        share = (step + 1) / 5 if step < 5 else 0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * done))
        for group in adamw.param_groups:
            group["lr"] = optim.lr * share
        loss = their_loss(model, batch(step))
        model.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_([p for _, p in parameters], optim.clip))
        adamw.step()
        losses.append(loss.detach())
    return torch.stack(losses), torch.stack(norms).detach()


REFUSED = {
    "positions": "rotary",
    "placement": "post",
    "norm": "rms",
    "activation": "swiglu",
    "qk_norm": True,
    "output_cap": 30.0,
    "embedding_scale": "sqrt_width",
    "attention_norm": False,
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_no_gpt2_is_refused_by_key(field: str) -> None:
    model = only(*SMALL[:-1], "recipe=gpt2").model
    check_gpt2(model)
    with pytest.raises(ConfigError, match=rf"model\.{field}="):
        check_gpt2(dataclasses.replace(model, **{field: REFUSED[field]}))


def test_mup_is_no_gpt2_but_at_its_base_width() -> None:
    model = only(*SMALL[:-1], "recipe=gpt2").model
    check_gpt2(dataclasses.replace(model, parametrization="mup", base_width=32))
    with pytest.raises(ConfigError, match=r"model\.parametrization=mup"):
        check_gpt2(dataclasses.replace(model, parametrization="mup", base_width=16))


# --- Llama, OLMo 2 and mixtures of experts ----------------------------------------------------------------------------


def turned(values: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from neighbouring pairs, as Llama's own code turns them, to halves, as transformers does."""
    heads = values.unflatten(0, (-1, head_dim // 2, 2))
    return heads.transpose(1, 2).flatten(0, 2)


def llama_tensors(model: Model, own: dict[str, Tensor], norms: dict[str, str]) -> dict[str, Tensor]:
    found = {"model.embed_tokens.weight": own["embedding"], "lm_head.weight": own["head"]}
    found["model.norm.weight"] = own["final_norm"]
    matrices = {
        "self_attn.q_proj": "attention.query",
        "self_attn.k_proj": "attention.key",
        "self_attn.v_proj": "attention.value",
        "self_attn.o_proj": "attention.projection",
    }
    dense = {"mlp.gate_proj": "feedforward.gate", "mlp.up_proj": "feedforward.up", "mlp.down_proj": "feedforward.down"}
    is_mixed = "blocks.0.moe.router" in own
    matrices |= {"mlp.gate": "moe.router"} if is_mixed else dense
    for i in range(model.depth):
        if is_mixed:
            experts = range(len(own[f"blocks.{i}.moe.router"]))
            parts = {part: [own[f"blocks.{i}.moe.{part}.{e}"] for e in experts] for part in ("gate", "up", "down")}
            inner = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
            found[f"model.layers.{i}.mlp.experts.gate_up_proj"] = torch.stack(inner)
            found[f"model.layers.{i}.mlp.experts.down_proj"] = torch.stack(parts["down"])
            if model.attention_sink:
                found |= gpt_oss_tensors(own, i, found)
        for theirs, ours in (matrices | norms).items():
            values = own[f"blocks.{i}.{ours}"]
            is_turned = ours.rpartition(".")[2] in ("query", "key", "query_norm", "key_norm")
            found[f"model.layers.{i}.{theirs}.weight"] = turned(values, model.head_dim) if is_turned else values
            if (bias := own.get(f"blocks.{i}.{ours}_bias")) is not None:
                found[f"model.layers.{i}.{theirs}.bias"] = turned(bias, model.head_dim) if is_turned else bias
    if model.attention_sink:
        found = {name.replace("mlp.gate.", "mlp.router."): values for name, values in found.items()}
    return found


def gpt_oss_tensors(own: dict[str, Tensor], block: int, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts' matrices are [in, out] there, gates and linear parts in turn; with their biases, and sinks."""
    experts, layer = f"model.layers.{block}.mlp.experts", f"blocks.{block}.moe"
    count = len(own[f"{layer}.router"])
    biases = {part: [own[f"{layer}.{part}.{e}_bias"] for e in range(count)] for part in ("gate", "up", "down")}
    halves = found[f"{experts}.gate_up_proj"].unflatten(1, (2, -1))
    return {
        f"{experts}.gate_up_proj": halves.transpose(1, 2).flatten(1, 2).mT.contiguous(),
        f"{experts}.gate_up_proj_bias": torch.stack(
            [torch.stack(biases["gate"]), torch.stack(biases["up"])], -1
        ).flatten(1),
        f"{experts}.down_proj": found[f"{experts}.down_proj"].mT.contiguous(),
        f"{experts}.down_proj_bias": torch.stack(biases["down"]),
        f"model.layers.{block}.self_attn.sinks": own[f"blocks.{block}.attention.sink"],
    }


def theirs_of(trial: Trial) -> tuple[nn.Module, dict[str, str]]:
    """The model of transformers, and the names of its norms."""
    import transformers

    model = trial.model
    sizes: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": model.width,
        "intermediate_size": feedforward_size(model),
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.width // model.head_dim,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    if trial.recipe == "llama":
        norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "feedforward_norm"}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).double(), norms
    if trial.recipe == "mixtral":
        norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "moe_norm"}
        sizes |= {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": feedforward_size(model) // 2}
        config = transformers.MixtralConfig(**sizes, num_key_value_heads=model.width // model.head_dim)
        config._experts_implementation = "eager"
        return transformers.MixtralForCausalLM(config).double(), norms
    if trial.recipe == "gpt_oss":
        norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "moe_norm"}
        sizes |= {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": feedforward_size(model) // 4}
        sizes |= {"num_key_value_heads": model.width // model.head_dim, "head_dim": model.head_dim}
        config = transformers.GptOssConfig(**sizes, layer_types=["full_attention"] * model.depth)
        config._experts_implementation = "eager"
        return transformers.GptOssForCausalLM(config).double(), norms
    norms = {"self_attn.q_norm": "attention.query_norm", "self_attn.k_norm": "attention.key_norm"}
    if trial.recipe == "olmoe":
        norms |= {"input_layernorm": "attention_norm", "post_attention_layernorm": "moe_norm"}
        sizes |= {"num_experts": 64, "num_experts_per_tok": 8, "intermediate_size": feedforward_size(model) // 8}
        config = transformers.OlmoeConfig(**sizes)
        config._experts_implementation = "eager"
        return transformers.OlmoeForCausalLM(config).double(), norms
    norms |= {
        "post_attention_layernorm": "attention_output_norm",
        "post_feedforward_layernorm": "feedforward_output_norm",
    }
    return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**sizes)).double(), norms


@pytest.mark.parametrize("recipe", ["gpt_oss", "llama", "mixtral", "olmo2", "olmoe"])
def test_other_recipes_are_those_of_transformers(recipe: str) -> None:
    """Logits and gradients in float64, once gains are not ones."""
    pack = packed(
        f"recipe={recipe}",
        "train.z_loss=0",
        *(["moe.balance=0", "moe.router_z=0"] if recipe in ("gpt_oss", "mixtral", "olmoe") else []),
    )
    assert pack.planned[0].recipe == recipe
    gains = torch.rand(pack.weights.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5
    pack.weights.copy_(torch.where(pack.weights == 1, gains, pack.weights))
    for row, trial in enumerate(pack.planned):
        theirs, norms = theirs_of(trial)
        theirs.load_state_dict(llama_tensors(trial.model, dict(pack.tensors(pack.weights, row)), norms))
        batch = pack.objective.batch(0)
        with torch.no_grad():
            logits = pack.model(batch[:, :, :-1])[row].view(*batch.shape[1:2], -1, 61)
            # Their rotary embedding is in float32, whatever the model is in.
            torch.testing.assert_close(logits, theirs(batch[row, :, :-1]).logits, rtol=0, atol=2e-6)
        _, gradients = learned(pack, row)
        their_loss(theirs, batch[row]).backward()
        named = llama_tensors(trial.model, gradients, norms)
        for name, parameter in theirs.named_parameters():
            torch.testing.assert_close(
                named[name], parameter.grad, rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


# --- as starting points --------------------------------------------------------------------------------------------


def test_the_default_is_the_plain_recipe() -> None:
    (trial,) = trials()
    assert trial == Trial() and trial.recipe == "plain"


def test_wortsman_is_the_default_with_its_two_remedies() -> None:
    published, remedied = only("recipe=wortsman"), only("mitigation=qk_norm+z_loss")
    names = {"recipe": "plain", "mitigation": "none", "extras": ()}
    assert dataclasses.replace(published, **names) == dataclasses.replace(remedied, **names)
    assert published.id != remedied.id
    assert (published.optim, published.schedule) == (Optim(), Schedule())


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_says_everything_itself(recipe: str) -> None:
    """It leaves sizes, text and seeds alone, and another default would not change it."""
    own = only(f"recipe={recipe}")
    sizes = ("width", "depth", "head_dim", "context", "feedforward", "seed")
    for name in sizes:
        assert getattr(own.model, name) == getattr(Model(), name)
    assert own.data == Data() and dataclasses.replace(own.train, z_loss=0.0) == Train()
    if recipe != "plain":
        said = Composer(loader(), "grid")._mitigations.difference("recipe", recipe)
        changed = {
            f"{part}.{name}"
            for part, default in {"model": Model(), "optim": Optim(), "schedule": Schedule(), "train": Train()}.items()
            for name, value in vars(getattr(own, part)).items()
            if value != getattr(default, name)
        }
        assert changed <= said.keys()


def test_a_study_changes_a_recipe_and_a_mitigation_changes_both() -> None:
    made = trials("recipe=gpt2", "optim.lr=1e-2", "seed=0", "fault=none", study="quickstart")
    assert {trial.recipe for trial in made} == {"gpt2"} and {trial.model.context for trial in made} == {64}
    plain, remedied = (only("recipe=gpt2", f"mitigation={name}") for name in ("none", "qk_norm"))
    assert dataclasses.replace(remedied, mitigation="none", model=plain.model) == plain
    assert remedied.model == dataclasses.replace(plain.model, qk_norm=True)


def test_recipes_are_an_axis_of_a_sweep(tmp_path: Path) -> None:
    sizes = [
        "model.width=16",
        "model.depth=1",
        "model.head_dim=8",
        "model.context=16",
        "train.steps=4",
        "train.batch=2",
    ]
    line = [*sizes, "mitigation=none,qk_norm", "train.validate_tokens=64", f"out={tmp_path}"]
    done = call(*line, "recipe=glob(*)", "plan=true")
    assert f"recipe ({len(GENERAL)}): {', '.join(GENERAL)}" in done.out and done.status == 0
    assert call(*line, "recipe=gpt2,wortsman").status == 0
    found = results(tmp_path)
    assert sorted(set(found.recipe.values)) == ["gpt2", "wortsman"] and found.sizes["trial"] == 4
    own = found.where((found.recipe == "wortsman") & (found.mitigation == "qk_norm"), drop=True)
    assert own.acted.values.tolist() == [0]  # it has that already


BAD = {
    "recipe=gtp2": "unknown recipe; did you mean gpt2? ",
    "recipe=": "unknown recipe",
    "recipe=gpt2,gtp2": "recipe=gtp2: unknown recipe",
    "recipe=gpt2+llama": "unknown recipe",
    "recipe=interval(1,2)": "names have no interval",
}


@pytest.mark.parametrize("override", BAD)
def test_a_bad_name_is_one_line(override: str) -> None:
    done = call(override, "plan=true")
    assert done.status == 2 and BAD[override] in done.err and done.err.count("\n") == 1


FILES = {
    "steps": ("out: elsewhere\n", "out=elsewhere: unknown key"),
    "defaults": ("defaults: [gpt2]\n", "a recipe stands alone"),
    "typo": ("model:\n  qk_nrom: true\n", "did you mean model.qk_norm"),
    "value": ("optim:\n  beta2: 2.0\n", "optim.beta2=2.0"),
    "code": ("model:\n  _target_: os.system\n", "would be imported and called"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_of_ones_own_is_one_line(tmp_path: Path, name: str) -> None:
    text, words = FILES[name]
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "own.yaml").write_text(f"# @package _global_\n{text}")
    done = call(f"--config-dir={tmp_path}", "recipe=own", "plan=true")
    assert done.status == 2 and words in done.err and "recipe=own" in done.err and done.err.count("\n") == 1


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "own.yaml").write_text("# @package _global_\n# Mine.\nmodel:\n  qk_norm: true\n")
    trial = only("recipe=own", folder=tmp_path)
    assert trial.model.qk_norm and trial.recipe == "own"
    (entry,) = [entry for entry in entries("recipe", tmp_path) if entry.name == "own"]
    assert entry.text == "Mine."

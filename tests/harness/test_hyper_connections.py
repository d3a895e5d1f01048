"""Residual streams side by side: against transformers' DeepSeek-V4, their start, and what they make of sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness.config import ConfigError, Trial, sections
from harness.model.hyper_connections import collapsed, collapsed_at_the_end, doubly_stochastic, mixed, mixing_of
from harness.testing import engine
from harness.testing.settings import roughen
from harness.training.activation_counts import idle_parts
from harness.training.config_checks import check_trial
from tests.harness.test_moe_published import in_float64
from tests.harness.variants import with_fields

STREAMS, WIDTH = 4, 16
ROWS, TOKENS = 2, 12


def trials(**fields: Any) -> list[Trial]:
    plain = [engine.trial(seed=seed, precision="fp64", width=WIDTH, depth=2) for seed in range(ROWS)]
    return with_fields(plain, {"residual_streams": STREAMS, **fields})


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def theirs(pack: Any, row: int, name: str) -> Any:
    """The module of transformers with the row's weights; its matrix is ours on its side."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    config = DeepseekV4Config(
        hidden_size=WIDTH, hc_mult=STREAMS, rms_norm_eps=pack.planned[row].model.norm_epsilon, num_hidden_layers=1
    )
    weights = pack.tensors(pack.weights, row)
    if name == "head_mixer":
        module = v4.DeepseekV4HyperHead(config).double()
        given = {"hc_fn": weights[name], "hc_scale": weights[f"{name}_gate"], "hc_base": weights[f"{name}_offset"]}
    else:
        module = v4.DeepseekV4HyperConnection(config).double()
        order = torch.arange((2 + STREAMS) * STREAMS)
        order[2 * STREAMS :] = order[2 * STREAMS :].view(STREAMS, STREAMS).T.flatten()
        mixer, offset = weights[f"{name}_mixer"][order], weights[f"{name}_mixer_offset"][order]
        given = {"fn": mixer, "scale": weights[f"{name}_mixer_gate"], "base": offset}
    module.load_state_dict(given)
    return module


def test_mixing_equals_that_of_transformers() -> None:
    """DeepseekV4HyperConnection, and DeepseekV4HyperHead at the end, forwards and backwards."""
    pytest.importorskip("transformers")
    pack = engine.pack_of(trials(stream_gate=0.7))
    roughen(pack)
    x, branch = drawn(ROWS, TOKENS, STREAMS, WIDTH).requires_grad_(), drawn(ROWS, TOKENS, WIDTH, seed=1)
    tools = pack.model.tools()
    mixing = mixing_of(tools, "blocks.1.attention", 1, 0, x)
    read, after = collapsed(x, mixing.pre), mixed(x, branch, mixing.post, mixing.residual)
    end = collapsed_at_the_end(tools, x)
    weighed = drawn(ROWS, TOKENS, STREAMS, WIDTH, seed=2)
    ((after * weighed).sum() + (read * weighed[:, :, 0]).sum() + (end * weighed[:, :, 1]).sum()).backward()
    for row in range(ROWS):
        own = x.detach()[row : row + 1].requires_grad_()
        with in_float64():
            post, comb, collapsed_ = theirs(pack, row, "blocks.1.attention")(own)
            end_ = theirs(pack, row, "head_mixer")(own)
        after_ = post[..., None] * branch[row : row + 1, :, None] + comb.mT @ own
        for mine, his in ((read, collapsed_), (after, after_), (end, end_), (mixing.residual, comb.mT)):
            torch.testing.assert_close(mine[row].detach(), his[0].detach(), rtol=1e-10, atol=1e-10)
        weigh = weighed[row : row + 1]
        ((after_ * weigh).sum() + (collapsed_ * weigh[:, :, 0]).sum() + (end_ * weigh[:, :, 1]).sum()).backward()
        torch.testing.assert_close(x.grad[row], own.grad[0], rtol=1e-9, atol=1e-9)


def test_rows_and_columns_add_up_to_one() -> None:
    """Rows to epsilon; columns, which were scaled before them, as far as 20 rounds come: 5% where z is large."""
    z = drawn(2, 50, 4, 4)
    for size, error in ((1, 2e-6), (5, 0.1)):
        matrix = doubly_stochastic(z * size)
        assert (matrix >= 0).all()
        assert (matrix.sum(-1) - 1).abs().max() < 2e-6
        assert (matrix.sum(-2) - 1).abs().max() < error
    assert doubly_stochastic(z * 1e6).isfinite().all()
    assert torch.autograd.gradcheck(doubly_stochastic, drawn(1, 2, 3, 3, seed=3).requires_grad_())


@pytest.mark.parametrize("mixing", ["free", "manifold"])
@pytest.mark.parametrize("placement", ["pre", "sandwich"])
def test_streams_start_as_the_plain_model(mixing: str, placement: str) -> None:
    """With a gate of zero all streams are the plain one, or twice as large, which the norms do not see."""
    fields = {"norm": "rms", "placement": placement, "norm_epsilon": 1e-30}
    many = engine.pack_of(trials(stream_mixing=mixing, stream_gate=0.0, **fields))
    one = engine.pack_of(trials(residual_streams=1, **fields))
    tokens = torch.randint(
        0,
        len(many.tensors(many.weights, 0)["embedding"]),
        (ROWS, 2, many.planned[0].model.context),
        generator=torch.Generator().manual_seed(0),
    )
    with torch.no_grad():
        torch.testing.assert_close(many.model(tokens), one.model(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mixing", ["free", "manifold"])
def test_the_gain_of_streams_is_that_of_the_product_of_their_mixings(mixing: str) -> None:
    """Matrices as taps show them, and their product by torch."""
    seen: dict[str, Tensor] = {}

    def prepare(pack: Any) -> None:
        roughen(pack)
        for tap in (name for name in pack.model.taps.names if ".mixing." in name):
            pack.model.taps.attach(tap, lambda name, x: seen.setdefault(name, x.detach().clone()))

    run = engine.run(read_each_step(trials(stream_mixing=mixing, stream_gate=1.0)), prepare=prepare)
    assert list(seen) == [f"blocks.{block}.mixing.{place}" for block in range(2) for place in range(2)]
    product = torch.eye(STREAMS, dtype=torch.float64)
    for x in seen.values():
        product = x.unflatten(-1, (STREAMS, STREAMS)) @ product
    found = {name: torch.from_numpy(run.signals[f"stream_gain_{name}"][:, 0]) for name in ("forward", "backward")}
    torch.testing.assert_close(found["forward"], product.abs().sum(-1).amax(-1).mean(-1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["backward"], product.abs().sum(-2).amax(-1).mean(-1), rtol=1e-6, atol=1e-6)
    if mixing == "manifold":
        assert (found["forward"] - 1).abs().max() < 1e-4
    else:
        assert found["forward"].min() > 1.1


def test_free_streams_start_with_a_gain_of_one() -> None:
    run = engine.run(read_each_step(trials(stream_mixing="free", stream_gate=1.0)))
    for name in ("stream_gain_forward", "stream_gain_backward"):
        assert (run.signals[name][:, 0] == 1).all() and (run.signals[name][:, -1] != 1).all()


def read_each_step(given: list[Trial]) -> list[Trial]:
    signals = sections()["signals"](stream_gain=1)
    others = [{name: one.section(name) for name in sections()} for one in given]
    return [Trial.of({**own, "signals": signals}, seed=one.seed) for own, one in zip(others, given, strict=True)]


REFUSED = {
    "post-LN": ({"placement": "post"}, "model.placement=post works on one stream; allowed: 1, or model.placement=pre"),
    "muP": ({"parametrization": "mup", "base_width": 8}, "is not known for what mixes streams; allowed: 1, or"),
    "Fixup": ({"init": "fixup", "placement": "none"}, "model.init=fixup is made for one stream; allowed: 1, or"),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_what_streams_cannot_be_beside_is_one_clear_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"model.residual_streams={STREAMS}: .*{message}"):
        check_trial(trials(**fields)[0])


def test_what_nothing_reads_is_said() -> None:
    idle = idle_parts(trials(residual_streams=1, stream_gate=0.5, stream_mixing="free", dyt_alpha=0.2, mix=0.5)[0])
    assert idle == {
        "model.stream_mixing": "model.stream_mixing=free: nothing is mixed, with model.residual_streams=1",
        "model.stream_gate": "model.stream_gate=0.5: nothing is mixed, with model.residual_streams=1",
        "model.dyt_alpha": "model.dyt_alpha=0.2: has no part in model.norm=layer",
        "model.mix": "model.mix=0.5: has no part in model.placement=pre",
    }

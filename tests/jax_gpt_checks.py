"""The JAX peer of the benchmarks trains the same GPT as the plain PyTorch peer."""

from __future__ import annotations

import jax
import numpy as np
import torch
import torch.nn.functional as F

from tests.jax_gpt import stacked_weights, training
from tests.plain_gpt import PlainGPT

VOCABULARY, CONTEXT, HEAD_DIM = 32, 12, 8


def models(count: int) -> list[PlainGPT]:
    made = []
    for seed in range(count):
        torch.manual_seed(seed)
        made.append(PlainGPT(VOCABULARY, 16, 2, HEAD_DIM, CONTEXT))
    return made


def plain_losses(model: PlainGPT, batches: torch.Tensor, clip: float) -> tuple[list[float], list[float]]:
    """Of each step the loss, and the gradient norm before clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for tokens in batches:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms


def test_both_peers_train_alike() -> None:
    """Two models at once by vmap, each on batches of its own: their losses are those of the plain loop."""
    count, steps, clip = 2, 8, 0.7
    draw = torch.Generator().manual_seed(1)
    batches = torch.randint(VOCABULARY, (steps, count, 4, CONTEXT + 1), generator=draw)
    weights = stacked_weights(models(count))
    begin, update = training(HEAD_DIM, lr=1e-2, clip=clip)
    state, step = jax.vmap(begin)(weights), jax.jit(jax.vmap(update))
    found = []
    for tokens in batches:
        weights, state, loss = step(weights, state, tokens.numpy().astype(np.int32))
        found.append(np.asarray(loss))
    plain = [plain_losses(model, batches[:, number], clip) for number, model in enumerate(models(count))]
    losses, norms = (np.array(values) for values in zip(*plain, strict=True))
    np.testing.assert_allclose(np.stack(found, 1), losses, rtol=2e-4)
    assert np.ptp(losses, 1).min() > 0.1  # they learn
    assert norms.min() < clip < norms.max()  # some steps are clipped, some are not

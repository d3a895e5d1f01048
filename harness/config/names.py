"""Names by which training, sweeps and their analysis know the same thing."""

from __future__ import annotations

from enum import StrEnum

OWN = "own"  # the section of a run of one's own, whose model and data are not ours
NEXT_BEST = 1  # a token is sent to this beyond the last expert: the best it was not sent to; to 0: nowhere
LAST_BIT = "last_bit"  # the fault whose trials measure the clean envelope
MAX_STABLE_RATE, WORST_FAULT, PARETO = SEARCHES = ("max_stable_lr", "worst_fault", "pareto")  # kinds of searches


class Site(StrEnum):
    """Where faults can strike: points of the training step, in its order. A visit shows the tensors that stand here."""

    LEARNING_RATE = "learning_rate"  # {"learning_rate": []}
    BATCH = "batch"  # {"batch": [B, T + 1] token ids}, as loaded: before sequences are dropped, and batches cut
    WEIGHT = "weight"  # each tensor of the model, before it is read
    BUFFER = "buffer"  # what a model keeps and no gradient trains, before it is read: biases that balance experts
    SAMPLER_WEIGHT = "sampler_weight"  # each tensor of the sampler's copy of the model, before a rollout (a policy)
    REWARD = "reward"  # {"reward": [B]} of the completions of a rollout, before the penalty and the group's mean
    ADVANTAGE = "advantage"  # {"advantage": [B]} of the completions of a rollout; with a critic, [B, T] of their tokens
    ACTIVATION = "activation"  # {tap: one activation}, when it is computed; of one rank's part of the batch
    ROUTING = "routing"  # {tap: [N, K] numbers of experts}, as tokens are sent to them; of one rank's part
    LOSS_SCALE = "loss_scale"  # {"loss_scale": []}, before the backward pass
    ACTIVATION_GRADIENT = "activation_gradient"  # {tap: the loss's gradient there}, when it is computed
    GRADIENT = "gradient"  # each tensor's gradient on one data-parallel rank, before the mean over ranks
    REDUCED_GRADIENT = "reduced_gradient"  # each tensor's gradient, after the mean and before clipping
    CLIPPED_GRADIENT = "clipped_gradient"  # each tensor's gradient, after clipping
    MOMENT_1 = "moment_1"  # Adam's first moment of each tensor, before the optimizer step
    MOMENT_2 = "moment_2"  # Adam's second moment of each tensor, before the optimizer step
    BEFORE_UPDATE = "before_update"  # weights by name, moments as `moment_1:name`; to look at, not to change
    UPDATE = "update"  # the same right after the optimizer step

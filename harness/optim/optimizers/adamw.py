"""Adam's equations for its relatives; and AdamW, each trial with its own hyperparameters, over flat [R, P] state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from harness.config import Optim, Trial
from harness.kernels import operators
from harness.kernels.blocks import cut
from harness.kernels.use import are_used
from harness.optim.optimizers.base import BETAS, CPU_PIECE, Numbers, Optimizer, Piece, Step, each, options


class Adam(Optimizer):
    """What the relatives of Adam share (Kingma & Ba 2015, arXiv 1412.6980, algorithm 1)."""

    slots: ClassVar[tuple[str, ...]] = ("moment_1", "moment_2")
    hyperparameters: ClassVar[Mapping[str, Callable[[Trial], float]]] = {
        **BETAS,
        **options("optim", "eps"),
        "beta2_exponent": lambda trial: trial.optim.beta2_exponent or 0.0,
    }

    @classmethod
    def idle(cls, trial: Trial) -> Iterator[tuple[str, str]]:
        optim = trial.optim
        if optim.beta2_exponent is not None and optim.beta2 != Optim().beta2:
            why = f"with optim.beta2_exponent={optim.beta2_exponent} the decay follows from the step"
            yield "optim.beta2", f"optim.beta2={optim.beta2}: {why}; it takes optim.beta2_exponent=null"

    def numbers(self, h: Numbers) -> Numbers:
        """What the first moment (`scale1`) and the root of the second (`scale2`) are multiplied by.

        They make up for moments that started at zero `count` steps ago. With `optim.beta2_exponent` the decay of the
        second moment rises as 1 - count^-c, from 0 on, so nothing has to be made up for (Shazeer & Stern 2018, arXiv
        1804.04235, section 7.1; PaLM, Chowdhery et al. 2022, arXiv 2204.02311, section 5).
        """
        count, scale1 = h["count"], 1 / falls_short(h["beta1"], h["count"])
        if self.has_rising_beta2:
            rest = each(torch.pow, count, -h["beta2_exponent"])
            return {"beta2": 1 - rest, "rest2": rest, "scale1": scale1, "scale2": torch.ones_like(rest)}
        return {"scale1": scale1, "scale2": 1 / falls_short(h["beta2"], count).sqrt()}

    @property
    def has_rising_beta2(self) -> bool:
        """Whether the decay of the second moment is that of `optim.beta2_exponent`."""
        return self.trials[0].optim.beta2_exponent is not None

    def second_share(self) -> Tensor:
        """What share of a mean the second moment has, which started at zero, [R, 1], float64."""
        if self.has_rising_beta2:
            return torch.ones_like(self.hyperparameter("beta2"))
        return falls_short(self.hyperparameter("beta2"), self.updates.double()[:, None])

    def update(self, piece: Piece, h: Numbers) -> Tensor:
        return self.direction(piece, h, *self.moments(piece, h, piece.gradients))

    def moments(self, piece: Piece, h: Numbers, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Take gradients [r, n] into both moments. Returns the first as it is, and the corrected root of the second."""
        first = piece.slots["moment_1"].mul_(h["beta1"]).add_(gradients * h["rest1"])
        second = piece.slots["moment_2"].mul_(h["beta2"]).add_((gradients * gradients).mul_(h["rest2"]))
        return first, second.sqrt().mul_(h["scale2"])

    def direction(self, piece: Piece, h: Numbers, first: Tensor, root: Tensor) -> Tensor:
        """Adam's step from what `moments` returned, of which `root` is used up."""
        return (first / root.add_(h["eps"] * piece.segment.epsilon)).mul_(h["scale1"])


def falls_short(beta: Tensor, count: Tensor) -> Tensor:
    """1 - beta^count, [R, 1]: what share of the mean a moving average has that took in `count` values from zero on."""
    return 1 - each(torch.pow, beta, count)


class AdamW(Adam):
    """Loshchilov & Hutter 2019 (arXiv 1711.05101), algorithm 2.

    On a CPU torch's own fused kernel, a call for each trial, so that a trial's bits cannot depend on its neighbours.
    Elsewhere one Triton program for all trials, by the same arithmetic (harness/kernels/programs.py). Where the update
    is clipped, beta2 rises, or Triton is missing, the same equations one by one, for all trials at once.
    """

    columns = CPU_PIECE

    def bind(self, trials: Sequence[Trial]) -> None:
        super().bind(trials)
        self._has_program = self._limit is None and not self.has_rising_beta2 and are_used(self.weights.device)
        if self._has_program:
            self._bind_program()
        elif self._is_fused:
            self._taken = {key: rates[:, 0].tolist() for key, rates in self._decays.items()}

    @property
    def _is_fused(self) -> bool:
        return self._limit is None and not self.has_rising_beta2 and self._on_cpu

    # --- as one program ------------------------------------------------------------------------------------------

    def _bind_program(self) -> None:
        """Keep on the device what the program is told of columns; those with the same multipliers are a group."""
        spans = [span for span in self.layout.spans if span.learning_rate != 0]
        alike = [(span.learning_rate, span.decay, span.epsilon) for span in spans]
        groups = list(dict.fromkeys(alike))
        device, edges = self.weights.device, [(span.start, span.stop) for span in spans]
        self._blocks = cut(edges, self.layout.size, device, [groups.index(multipliers) for multipliers in alike])
        self._decay_RxG = torch.cat([self._decays[rate, decay] for rate, decay, _ in groups], dim=1)
        multipliers = [(rate, epsilon) for rate, _, epsilon in groups]
        self._multipliers_Gx2 = torch.tensor(multipliers, dtype=torch.float64, device=device)

    def _advance(self, learning_rate: Tensor, active: Tensor, measure: bool) -> Tensor | None:
        if not self._has_program:
            return super()._advance(learning_rate, active, measure)
        beta1, beta2, epsilon = (self._exact[name] for name in ("beta1", "beta2", "eps"))
        count = self.updates.double()[:, None]
        squares = operators.adamw(
            (self.weights, self.gradients, self.slot("moment_1"), self.slot("moment_2")),
            active,
            learning_rate,
            (falls_short(beta1, count), falls_short(beta2, count)),
            (beta1, beta2),
            epsilon,
            self._decay_RxG,
            self._multipliers_Gx2,
            self._blocks,
            measure,
        )
        return None if squares is None else squares.T

    # --- as torch's fused kernel ---------------------------------------------------------------------------------

    def _step(self, learning_rate: Tensor, active: Tensor) -> Step:
        if not self._is_fused:
            return super()._step(learning_rate, active)
        self._rates = {s.learning_rate: (learning_rate * s.learning_rate).unbind() for s in self.layout.segments}
        self._counts, self._skip = self.updates.unbind(), (~active).float().unbind()
        # Nothing for the equations one by one: `_move` reads what stands above.
        return Step({}, {}, None, None)

    def _move(self, piece: Piece, step: Step, measure: bool) -> Tensor | None:
        if not self._is_fused:
            return super()._move(piece, step, measure)
        segment, weights = piece.segment, piece.weights
        before = weights.clone() if measure else None
        arrays = (weights, piece.gradients, piece.slots["moment_1"], piece.slots["moment_2"])
        for row, w, g, m, v in zip(piece.rows, *arrays, strict=True):
            optim = self.trials[row].optim
            lists: tuple[list[Tensor], ...] = [w], [g], [m], [v], [], [self._counts[row]]  # as torch takes them
            torch._fused_adamw_(
                *lists,
                lr=self._rates[segment.learning_rate][row],
                beta1=optim.beta1,
                beta2=optim.beta2,
                weight_decay=self._taken[piece.multipliers][row],
                eps=optim.eps * segment.epsilon,
                amsgrad=False,
                maximize=False,
                grad_scale=None,
                found_inf=self._skip[row],
            )
        return None if before is None else self._measured(piece, weights, torch.sub(weights, before, out=before))

"""A pack: R trials of one structure, trained together; axis 0 of every tensor is the trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import torch
from torch import Tensor

from harness.basics.devices import sent
from harness.config import Trial
from harness.data.corpus import Corpus
from harness.guards import GUARDS, GuardSignal, Parts
from harness.model import sums
from harness.model.branches import branches_of
from harness.model.gpt import GPT
from harness.model.heads import heads_of
from harness.model.hypersphere import initial_weights
from harness.model.parameters import Layout, Views
from harness.model.precision import FORMATS, precision_of
from harness.model.scaling import tensor_table
from harness.model.sigma import SingularVectors
from harness.model.state import State
from harness.objectives.base import Steps
from harness.objectives.table import OBJECTIVES
from harness.optim.after_step import after_step
from harness.optim.clippers import CLIPPERS, first_to_repair
from harness.optim.clipping import global_norm
from harness.optim.loss_scale import LossScale
from harness.optim.optimizers import OPTIMIZERS, Norms
from harness.optim.schedules import learning_rates
from harness.training.activation_counts import Acts
from harness.training.distributed import ProcessCommunicator, RankGroup
from harness.training.interventions import Interventions
from harness.training.pack_sizes import rows_at_once, smallest_pack, windows_at_once
from harness.training.ranks import Communicator
from harness.training.row_steps import PackStep, RowSteps
from harness.training.slots import Slots
from harness.training.stale_routing import StaleRouting
from harness.training.twins import Twins

NOTHING = nullcontext()
WindowLosses = Callable[[Tensor, slice], Tensor]  # as `Pack.window_losses`


class Pack:
    """The whole state of R rows, each of them a trial in training.

    `planned` numbers the trials as they were given; `rows[i]` is the planned number of row i. Rows come when a fault
    begins (`fork`), and go when a trial is done (`keep`). `begins` holds for each trial the step from which it needs a
    row of its own, beside its golden twin; without it all have one from the start. Arrays [R, ...] have a place for
    each of the `slots`, which are the rows, and on an accelerator idle ones behind them. `at_once` is about how many
    rows pass through the model together; None: by the rule of `rows_at_once`.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        corpus: Corpus,
        device: torch.device,
        begins: Sequence[int | None] | None = None,
        at_once: int | None = None,
    ):
        if (count := len({trial.structure for trial in trials})) != 1:
            raise ValueError(f"a pack needs trials of one structure, got {count}")
        first = trials[0]
        self.planned, self.corpus, self.device = tuple(trials), corpus, device
        self.curriculum, self.steps = first.curriculum, first.steps
        self.twins = Twins(trials, [0] * len(trials) if begins is None else begins, smallest_pack(device))
        self.at_once = at_once or rows_at_once(first.model, first.train.sequences, device)
        self.slots = Slots(len(trials), self.at_once, device)
        self.slots.arrange(self.twins.beginning(0))
        self.twins.forked.update(self.rows)
        here = [trials[number] for number in self.slots.planned]
        self.dtype, _ = FORMATS[first.train.precision]
        optimizer, branches = OPTIMIZERS[first.optim.name], branches_of(first)
        known = optimizer.rule_of(first), first.optim.decay_embedding, branches, heads_of(first)
        self.layout = Layout(tuple(tensor_table(first.model, corpus.vocabulary, *known)))
        self.rows_state = State(self.slots.cut(len(trials))[-1].stop)
        self.beside: list[State] = []  # what else has the pack's rows, and comes and goes with them
        self._weights = self.rows_state.add("weights", initial_weights(self.layout, here, self.dtype, device))
        self._gradients = self.rows_state.add("gradients", torch.zeros_like(self.weights), scratch=True)
        self._active = self.rows_state.add("active", (torch.arange(len(here)) < len(self.rows)).to(device))
        vectors = SingularVectors(self.layout, self._weights, self.rows_state) if first.model.sigma_reparam else None
        precision = precision_of(first.train, device)
        self.model = GPT(first.model, self.layout, precision, first.train.checkpointing, vectors, branches)
        self.optimizer = optimizer(self.layout, self._weights, self._gradients, self.rows_state)
        self.loss_scale = LossScale(here, self.dtype, device, self.rows_state)
        self.stale_routing = StaleRouting.of(first, self.model, self._weights, self.rows_state)
        self.after_steps = after_step(here, self.model, self.layout, self._weights, self.rows_state)
        wanted = [cls for cls in CLIPPERS if any(cls.is_on(trial) for trial in trials)]
        made = [cls(self.layout, self.rows_state, len(here), device) for cls in wanted]
        self.clippers, self.rank_clippers = ([c for c in made if c.of_ranks is kind] for kind in (False, True))
        parts = Parts(self.layout, self.rows_state, self.loss_scale, len(here), device)
        self.alarms, self.interventions, self.acts = parts.alarms, Interventions(device), Acts(trials, device)
        self.guards = [cls(parts) for cls in GUARDS if any(cls.is_on(trial) for trial in trials)]
        self.objective = OBJECTIVES[first.objective.name](trials, corpus, self.dtype, device)
        self.objective.join(here, self.model, self._weights, self.rows_state)
        self.row_steps = RowSteps(len(self.rows), len(here), self.rows_state, self.curriculum, device)
        self.model.notice = self.acts.notice
        self._learning_rates = learning_rates(trials, self.dtype).to(device)
        self._tokens = torch.from_numpy(self.curriculum.tokens).double().to(device)
        self._windows_at_once = max(first.train.sequences, windows_at_once(first.model, corpus.vocabulary, device))
        self.ranks = Communicator(first.train.ranks, first.train.reduction, first.train.accumulation)
        self.bound = 0  # how often the parts were told of their rows
        self._bind()

    def spread_over(self, group: RankGroup) -> None:
        """Take one rank from now on, as the other processes of the group take the others."""
        self.ranks = ProcessCommunicator(self.ranks.order, self.ranks.format, group)

    def _bind(self) -> None:
        """Let every part work on the rows that are there now."""
        self.bound += 1
        trials = [self.interventions.acting(number, self.planned[number]) for number in self.slots.planned]
        self.model.bind(trials, self.parts, self.weights, self.gradients)
        if self.stale_routing:
            self.stale_routing.bind(trials, self.parts)
        parts: list[Any] = [*self.rank_clippers, *self.clippers, *self.after_steps, *self.guards]
        for part in [self.optimizer, self.loss_scale, *parts]:
            part.bind(trials)
        first = [first_to_repair(trial, self.clippers) for trial in trials]
        self._clipper_repairs, self._optimizer_may = (
            torch.tensor([who == name for who in first], device=self.device) for name in ("clipper", "optimizer")
        )
        self._repairs = "clipper" in first or ("optimizer" in first and self.optimizer.repairs_infinity)
        self.objective.bind(trials, self.slots.planned)
        self.acts.bind(self.slots)

    @property
    def rows(self) -> list[int]:
        """The planned number of the trial in each row."""
        return self.slots.rows

    @property
    def parts(self) -> list[slice]:
        """Slots that pass through the model together, of about the size that is fastest."""
        return self.slots.parts

    @property
    def weights(self) -> Tensor:
        """[R, P]."""
        return self._weights.used

    @property
    def gradients(self) -> Tensor:
        """[R, P]."""
        return self._gradients.used

    @property
    def active(self) -> Tensor:
        """Trials that are not frozen, [R]."""
        return self._active.used

    @active.setter
    def active(self, active_R: Tensor) -> None:
        self._active.used.copy_(active_R)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def guard_signals(self) -> Mapping[str, GuardSignal]:
        """What the guards show at every step, by name."""
        return {name: signal for guard in self.guards for name, signal in guard.signals.items()}

    def here(self, pack_step: PackStep) -> Tensor:
        """The rows that train in this pass, [R]: neither frozen, nor held, nor waiting, nor at their end."""
        here, free = self.active.clone(), self.row_steps.free()
        here = here if pack_step.trains is None else here & pack_step.trains
        return here if free is None else here & free

    def place_of(self, planned: int) -> int | None:
        """The row of a trial, frozen or not, or None if it has none."""
        return self.slots.row_of.get(planned)

    def row_of(self, planned: int) -> int | None:
        """Where the trial stands now, or None if it has no row, is frozen, or waits for an answer."""
        row = self.slots.row_of.get(planned)
        return row if row is not None and bool(self.active[row]) and not self.row_steps.is_held(row) else None

    def learning_rate(self, steps: Steps) -> Tensor:
        """The scheduled rate of each row, [R], less what a playbook has taken off; the caller's own copy."""
        rate = self._learning_rates[self._on_device(steps), self.slots.index]
        factors = self.interventions.rates(self.slots.planned, steps)
        return rate if factors is None else (rate * factors).to(rate.dtype)

    def tokens(self, steps: Steps) -> Tensor:
        """Tokens that each row has trained on after these steps, [R], float64."""
        return self._tokens[self._on_device(steps)].expand(self.slots.count)

    def _on_device(self, steps: Steps) -> Tensor | int:
        return steps if isinstance(steps, int) else sent(torch.tensor(steps), self.device)

    def batch(self, steps: Steps) -> Tensor:
        """What the data loader hands out to each row at these steps, [R, B, ...]."""
        return self.objective.batch(self.interventions.positions(self.slots.planned, steps))

    def routes(self, steps: Steps) -> tuple[Tensor | None, Tensor | None]:
        """Where experts may be those of older weights: the batch to look at, and in which rows they are, [R]."""
        if self.stale_routing is None:
            return None, None
        return self.stale_routing.fed(self.batch, steps, self.interventions.stale(self.slots.planned, steps))

    def unscale(self) -> None:
        """Gradients are those of the loss itself; that of the embedding is smaller where a playbook has said so."""
        self.loss_scale.unscale(self.gradients)
        for row, factor in self.interventions.embeddings(self.rows).items():
            self.tensors(self.gradients, row)["embedding"].mul_(factor)

    def refresh(self) -> None:
        """Let every part know what has become of the trials' settings."""
        self._bind()

    def forget_signals(self, row: int) -> None:
        """The detectors of a row begin anew."""
        where = self.slots.of_rows([row]).to(self.device)
        for guard in self.guards:
            guard.restart(where)

    def tensors(self, flat: Tensor, row: int) -> Mapping[str, Tensor]:
        """Views of one trial's tensors in a flat array, by name."""
        return Views(self.layout, {"": flat[row : row + 1]})

    def slot(self, name: str, row: int) -> Mapping[str, Tensor]:
        """Views of one trial's tensors in an array that the optimizer keeps, by name."""
        return self.tensors(self.optimizer.slot(name), row)

    def state(self, row: int) -> Mapping[str, Tensor]:
        """Views of one trial's weights by name, and of what its optimizer keeps, as `moment_1:name`."""
        flats = {"": self.weights} | {f"{name}:": self.optimizer.slot(name) for name in self.optimizer.slots}
        return Views(self.layout, {prefix: flat[row : row + 1] for prefix, flat in flats.items()})

    def what_trains(
        self, batch_RxBxx: Tensor, steps: Steps, size: int | None = None, here: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """A batch of the loader as it trains at these steps, [R, b, ...], at the sizes of step `size`.

        With it comes the weight of each sequence, [R, b]; None: all alike. `here` [R] train; None: all but frozen rows.
        """
        size = (steps if isinstance(steps, int) else min(steps)) if size is None else size
        here = self.active if here is None else here
        batch, weights = self.objective.what_trains(batch_RxBxx, steps, size, here)
        for part, acted in self.objective.acted.items():
            self.acts.count(part, acted & here)
        return batch, weights

    def begin(self, steps: Steps, here: Tensor | None = None) -> None:
        """Be ready for the forward passes of these steps, validation included, with the weights as they are now.

        `here` are the rows that train in this pass, [R]: in no other anything changes. None: all that are not frozen.
        """
        self.model.stand_at(steps)
        self.know_weights(self.active if here is None else here)

    def know_weights(self, here: Tensor) -> None:
        """The second half of `begin`, after the model was told the steps."""
        self.acts.noticed.clear()
        self.model.begin(here)

    def loss(self, batch_RxBxx: Tensor, weights_RxB: Tensor | None = None, rows: slice | None = None) -> Tensor:
        """Mean loss of each row of one of the `parts`, the first where none is named, [r]; it fills `gradients`."""
        return self.objective.loss(self.model, batch_RxBxx, weights_RxB, self.parts[0] if rows is None else rows)

    def learn(
        self,
        batch_RxBxT1: Tensor,
        weights_RxB: Tensor | None = None,
        struck: AbstractContextManager[None] = NOTHING,
        rank: int = 0,
    ) -> Tensor:
        """Fill `gradients` with those of the scaled loss, and return the mean loss of each row, unscaled, [R].

        Micro-batch by micro-batch, where there are several: their gradients are added in the precision of the state,
        and divided by their number. `struck` is entered for the first of them. The batch is that of the `rank`.
        """
        count, first = self.planned[0].train.micro_batches, rank * batch_RxBxT1.shape[1]
        self.model.first_sequence = first
        if count == 1:
            with struck:
                return self._learn(batch_RxBxT1, weights_RxB)
        weights = [None] * count if weights_RxB is None else weights_RxB.chunk(count, dim=1)
        losses, total = [], torch.zeros_like(self.gradients)
        for number, (batch, of_batch) in enumerate(zip(batch_RxBxT1.chunk(count, dim=1), weights, strict=True)):
            self.model.first_sequence = first + number * batch.shape[1]
            with struck if number == 0 else NOTHING:
                losses.append(self._learn(batch, of_batch))
            total += self.gradients
        self.gradients.copy_(total.div_(count))
        return sums.mean_of(losses)

    def _learn(self, batch_RxBxT1: Tensor, weights_RxB: Tensor | None) -> Tensor:
        losses = []
        for rows in self.parts:
            loss = self.loss(batch_RxBxT1[rows], None if weights_RxB is None else weights_RxB[rows], rows)
            self.model.with_own_losses(loss).backward(self.loss_scale.scale[rows])
            losses.append(loss.detach())
        self.loss_scale.unscale_part(self.gradients)
        return losses[0] if len(losses) == 1 else torch.cat(losses)

    def can_step(self, norm_R: Tensor) -> Tensor:
        """Whether gradients of that global norm leave finite weights, [R]: infinite ones do where they are repaired."""
        if not self._repairs:
            return norm_R < torch.inf  # which NaN is not
        repaired = self._clipper_repairs | (self._optimizer_may & self.optimizer.repairs())
        return torch.isfinite(norm_R) | (torch.isinf(norm_R) & repaired)

    def clip(self, norm_R: Tensor, stepping_R: Tensor) -> None:
        """Clip the gradients of the trials that step; `norm_R` is their global norm as they are."""
        for number, clipper in enumerate(self.clippers):
            is_changed = number > 0 and clipper.needs_norm
            norm = global_norm(self.gradients) if is_changed else norm_R
            self.acts.count(clipper.part, clipper.clip(self.gradients, norm, stepping_R))

    def step(self, rate_R: Tensor, stepping_R: Tensor, measure: bool) -> Norms | None:
        """One step of the trials that step, from gradients that are clipped, with all that is done to weights in it."""
        norms = self.optimizer.step(rate_R, stepping_R, measure)
        # The ranks, each of which has its own sequences, notice different things.
        noticed = {part: self.ranks.largest(acted.float()) > 0 for part, acted in self.acts.noticed.items()}
        for part, acted in (noticed | dict(self.optimizer.acted)).items():
            self.acts.count(part, acted & stepping_R)
        for after in self.after_steps:
            self.acts.count(after.part, after.act(stepping_R, self.ranks))
        return norms

    def window_losses(self, starts_N: Tensor, rows: slice) -> Tensor:
        """Loss of each of these windows of the held-out data under the rows of one of the `parts`, [r, N], float64."""
        return self.objective.window_losses(self.model, starts_N, rows)

    def validation_losses(self, tokens: int, losses_of: WindowLosses | None = None) -> Tensor:
        """Mean loss in each segment of the held-out data (`Objective.held_out`), [R, S], float64.

        The windows are the same for every trial and every time. They pass in pieces, for which `losses_of` is asked in
        place of `window_losses`; what it gives has to hold until it is asked again. NaN fills up the last piece.
        """
        starts, most = self.objective.held_out(tokens), self._windows_at_once
        pieces, losses_of = starts.flatten().split(most), losses_of or self.window_losses
        share = self.ranks.own_share(len(pieces))
        losses = torch.full((len(share), self.slots.count, most), torch.nan, dtype=torch.float64, device=self.device)
        with torch.no_grad(), self.model.taps.muted(), self.optimizer.judging():
            for rows, (place, number) in product(self.parts, enumerate(share)):
                losses[place, rows, : len(pieces[number])] = losses_of(pieces[number], rows)
        losses = self.ranks.joined(losses, len(pieces)).transpose(0, 1).flatten(1)
        return sums.mean(losses[:, : starts.numel()].unflatten(1, starts.shape))

    # --- rows that come and go ---------------------------------------------------------------------------------------

    def fork(self, pack_step: PackStep) -> dict[int, int]:
        """Give a row to each trial whose fault begins now: a copy of its twin's. Those trials, and their twins."""
        new: dict[int, int] = {}  # planned number -> its twin's row
        leaders: dict[int, int] = {}
        for step, rows in pack_step.groups.items():
            for planned in self.twins.beginning(step):
                leader = self.twins.leader[planned]
                if leader is not None and (row := self.row_of(leader)) is not None and row in rows:
                    new[planned], leaders[planned] = row, leader
                    self.acts.take(planned, leader, self.acts.state())
                    self.interventions.take(planned, leader)
        if new:
            self.twins.forked.update(new)
            self._arrange([*self.rows, *new], [*range(len(self)), *new.values()])
        return leaders

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, given in their order."""
        self._arrange([self.rows[row] for row in rows], rows)

    def _arrange(self, planned: Sequence[int], sources: Sequence[int]) -> None:
        """Rows are now these trials, each with the state of one of the rows as they were."""
        self.slots.arrange(planned)
        self.row_steps.arrange(sources)
        for state in (self.rows_state, *self.beside):
            state.arrange(self.slots.sources(sources))
        self.active[len(planned) :] = False
        self._bind()

    def whole_state(self) -> dict[str, Any]:
        """Everything that training changes, to `restore`; the arrays in it change with the next step.

        They are the state of the rows, [R, ...] by name, and counts of acts; `rows` says whose the rows are, what the
        `Twins` know, and what was dropped from batches.
        """
        twins, rows = self.twins, {"planned": self.rows, "dropped": self.objective.records}
        rows |= {"begins": twins.begins, "forked": sorted(twins.forked), "masked": list(twins.masked.items())}
        return {"pack": self.rows_state.of_rows(len(self)), "acts": self.acts.state(), "rows": rows}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to the state of this pack, or to that of another one of the same trials."""
        rows = state["rows"]
        self._arrange(rows["planned"], [0] * len(rows["planned"]))
        self.twins.begins, self.twins.forked = list(rows["begins"]), set(rows["forked"])
        self.twins.masked = dict(rows["masked"])
        self.objective.restore(rows["dropped"])
        self.acts.restore(state["acts"])
        for name, now in self.rows_state.of_rows(len(self)).items():
            now.copy_(state["pack"][name])
        self.row_steps.read()

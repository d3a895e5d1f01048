"""Training scripts in the forms in which they are written in public, each with and without the harness.

A script trains with `run`, which is that of `attach` or `Bare`, which is nothing: the same loop without the harness.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.user_loop.loops import seeded

STEPS = 16  # of the optimizer, in every script


class Bare:
    """What a script has in place of a run where nothing is attached."""

    def __init__(self, steps: int = STEPS):
        self._left, self.step = steps, -1

    def steps(self, loader: Iterable[Any] | int) -> Iterator[Any]:
        for batch in range(loader) if isinstance(loader, int) else loader:
            self.step += 1
            yield batch

    def epochs(self, count: int) -> Iterator[int]:
        return iter(range(count))

    def next(self) -> bool:
        self._left, self.step = self._left - 1, self.step + 1
        return self._left >= 0

    def carry(self, **values: Any) -> Any:
        given = tuple(values.values())
        return given[0] if len(given) == 1 else given

    def observe(self, loss: Any) -> None:
        pass


@dataclass
class Script:
    """A model with all that trains it, and the loop; `others` are models that the loop keeps beside it."""

    model: nn.Module
    optimizers: list[Any]
    extra: list[Any]
    go: Callable[[Any], None]
    steps: int | None = None  # to be said to `attach`
    others: list[nn.Module] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of gradients, as the loop's own clipping has found them

    def state(self) -> dict[str, Tensor]:
        """Weights, buffers, what the optimizers keep, and rates."""
        found = {}
        for number, model in enumerate([self.model, *self.others]):
            found |= {f"model {number} {name}": x.detach().clone() for name, x in model.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            found[f"{number} rates"] = torch.tensor(rates, dtype=torch.float64)
            for place, kept in enumerate(optimizer.state.values()):
                found |= {f"{number} {place} {k}": v.clone() for k, v in kept.items() if isinstance(v, Tensor)}
        return found


def net(dropout: float = 0.1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.Dropout(dropout), nn.Tanh(), nn.Linear(12, 3))


def data(count: int, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(7)
    rows = [torch.randn(size, 6, generator=draw) for _ in range(count)]
    return [(x, x[:, :3].tanh() + 0.1 * x[:, 3:]) for x in rows]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def plain() -> Script:
    seeded()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    norms: list[float] = []

    def go(run: Any) -> None:
        for batch in run.steps(data(STEPS)):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
            optimizer.step()
            schedule.step()
            run.observe(loss)

    return Script(model, [optimizer], [schedule], go, norms=norms)


def short_tail() -> Script:
    """Gradients of four passes are accumulated; the last step has two of them. The passes are counted by the loop."""
    seeded()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = data(4 * STEPS - 2)

    norms: list[float] = []

    def go(run: Any) -> None:
        number = 0
        for batch in run.steps(batches):
            number = run.carry(number=number)
            loss = loss_of(model, batch)
            (loss / 4).backward()
            run.observe(loss)
            number += 1
            if number % 4 == 0 or number == len(batches):
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
                optimizer.step()
                optimizer.zero_grad()

    return Script(model, [optimizer], [], go, steps=STEPS, norms=norms)


def short_windows() -> Script:
    """Two epochs of accumulation, each with a short window at its end, in the midst of the run."""
    seeded()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = data(4 * STEPS // 2 - 2)

    norms: list[float] = []

    def go(run: Any) -> None:
        for _ in run.epochs(2):
            number = 0
            for batch in run.steps(batches):
                number = run.carry(number=number)
                loss = loss_of(model, batch)
                (loss / 4).backward()
                run.observe(loss)
                number += 1
                if number % 4 == 0 or number == len(batches):
                    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
                    optimizer.step()
                    optimizer.zero_grad()

    return Script(model, [optimizer], [], go, steps=STEPS, norms=norms)


def scaled() -> Script:
    """Half precision with a GradScaler, whose scale is too large at first."""
    seeded()
    model = net(0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=5)

    norms: list[float] = []

    def go(run: Any) -> None:
        for batch in run.steps(data(STEPS)):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            run.observe(loss)
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            scaler.step(optimizer)
            scaler.update()

    return Script(model, [optimizer], [scaler], go, norms=norms)


def closure() -> Script:
    seeded()
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def go(run: Any) -> None:
        for batch in run.steps(data(STEPS)):

            def again(batch: Any = batch) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                run.observe(loss)
                return loss

            optimizer.step(again)

    return Script(model, [optimizer], [], go)


def two_optimizers() -> Script:
    """One backward pass, two optimizers."""
    seeded()
    model = net()
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    others = [weight for weight in model.parameters() if weight.dim() != 2]
    optimizers: list[Any] = [torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.Adam(others, lr=1e-2)]

    def go(run: Any) -> None:
        for batch in run.steps(data(STEPS)):
            model.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            run.observe(loss)
            for optimizer in optimizers:
                optimizer.step()

    return Script(model, optimizers, [], go)


def alternating() -> Script:
    """A critic that steps in each pass, and a generator that does in each third, each with a backward of its own."""
    seeded()
    model = nn.ModuleDict({"critic": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), "generator": net(0.0)})
    generator, critic = model["generator"], model["critic"]
    of_critic = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2)

    def go(run: Any) -> None:
        for number, (x, y) in run.steps(list(enumerate(data(STEPS)))):
            fake = torch.cat([generator(x), y], 1).detach()
            of_critic.zero_grad()
            loss = critic(fake).mean() - critic(torch.cat([y, y], 1)).mean()
            loss.backward()
            of_critic.step()
            run.observe(loss)
            if number % 3 == 2:
                of_generator.zero_grad()
                (-critic(torch.cat([generator(x), y], 1)).mean()).backward()
                of_generator.step()

    return Script(model, [of_critic, of_generator], [], go)


def frozen() -> Script:
    """A layer is frozen from the start on, and trained from step 5 on; another is frozen at step 10."""
    seeded()
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def go(run: Any) -> None:
        for batch in run.steps(data(STEPS)):
            if run.step == 5:
                model[0].requires_grad_(True)
            if run.step == 10:
                model[2].requires_grad_(False)
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            run.observe(loss)

    return Script(model, [optimizer], [], go)


def added_groups() -> Script:
    """Parameters are added to the optimizer in mid-run, and a buffer and a parameter are replaced."""
    seeded()
    model = net()
    model.register_buffer("shift", torch.zeros(3))
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=1e-2)

    def go(run: Any) -> None:
        for x, y in run.steps(data(STEPS)):
            if run.step == 6:
                optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 5e-3})
            if run.step == 11:
                model.shift = torch.full((3,), 0.01)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x) + model.shift, y)
            loss.backward()
            optimizer.step()
            run.observe(loss)

    return Script(model, [optimizer], [], go)


class Words(nn.Module):
    def __init__(self, sparse: bool):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 6, sparse=sparse), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).mean(1))


def sparse() -> Script:
    """Sparse gradients, whose optimizer updates the rows that a batch has."""
    seeded()
    model = Words(sparse=True)
    optimizers: list[Any] = [
        torch.optim.SparseAdam(model.table.parameters(), lr=1e-2),
        torch.optim.AdamW(model.head.parameters(), lr=1e-2),
    ]
    draw = torch.Generator().manual_seed(3)
    batches = [(torch.randint(20, (8, 5), generator=draw), torch.randn(8, 3, generator=draw)) for _ in range(STEPS)]

    def go(run: Any) -> None:
        for batch in run.steps(batches):
            model.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            run.observe(loss)
            for optimizer in optimizers:
                optimizer.step()

    return Script(model, optimizers, [], go)


def bf16() -> Script:
    seeded()
    model = net().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def go(run: Any) -> None:
        for x, y in run.steps(data(STEPS)):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x.bfloat16()).float(), y)
            loss.backward()
            optimizer.step()
            run.observe(loss)

    return Script(model, [optimizer], [], go)


def tied() -> Script:
    """One matrix is embedding and head."""
    seeded()

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(20, 6), nn.Linear(6, 20, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.table(ids)))

    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(3)
    batches = [torch.randint(20, (8, 6), generator=draw) for _ in range(STEPS)]

    def go(run: Any) -> None:
        for ids in run.steps(batches):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            run.observe(loss)

    return Script(model, [optimizer], [], go)


def average() -> Script:
    """An exponential moving average of the weights, which is given as an extra."""
    seeded()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

    def go(run: Any) -> None:
        for batch in run.steps(data(STEPS)):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            mean.update_parameters(model)
            run.observe(loss)

    return Script(model, [optimizer], [mean], go, others=[mean])


def epochs() -> Script:
    """Code between two epochs: a scheduler that steps there, and a loop's own best loss."""
    seeded()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader = torch.utils.data.DataLoader(data(STEPS // 4), batch_size=None, shuffle=True)

    def go(run: Any) -> None:
        for _ in run.epochs(4):
            model.train()
            for batch in run.steps(loader):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                optimizer.step()
                run.observe(loss)
            model.eval()
            with torch.no_grad():
                _ = loss_of(model, data(1)[0])
            schedule.step()

    return Script(model, [optimizer], [schedule], go)


def epochs_of_its_own() -> Script:
    """The same with a loop over epochs that the harness does not know of."""
    script = epochs()
    model, optimizer, schedule = script.model, script.optimizers[0], script.extra[0]
    loader = torch.utils.data.DataLoader(data(STEPS // 4), batch_size=None, shuffle=True)

    def go(run: Any) -> None:
        for _ in range(4):
            model.train()
            for batch in run.steps(loader):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                optimizer.step()
                run.observe(loss)
            schedule.step()

    script.go, script.steps = go, STEPS
    return script


def prefetched() -> Script:
    """The next batch is fetched while the gradients of this one are computed; `iter_num` sets the rate."""
    seeded()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x_all, y_all = (torch.cat(part) for part in zip(*data(STEPS), strict=True))

    def get_batch() -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(x_all), (8,))
        return x_all[rows], y_all[rows]

    norms: list[float] = []

    def go(run: Any) -> None:
        iter_num = 0
        X, Y = get_batch()
        while run.next():
            X, Y, iter_num = run.carry(X=X, Y=Y, iter_num=iter_num)
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * min(1.0, (iter_num + 1) / 4)
            for _ in range(2):
                loss = F.mse_loss(model(X), Y) / 2
                X, Y = get_batch()
                loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            run.observe(2 * loss)
            iter_num += 1

    return Script(model, [optimizer], [], go, steps=STEPS, norms=norms)


def hidden_state() -> Script:
    """A recurrent model whose hidden state goes on from one piece of the text to the next."""
    seeded()
    model = nn.ModuleDict({"lstm": nn.LSTM(6, 8, batch_first=True), "head": nn.Linear(8, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    norms: list[float] = []

    def go(run: Any) -> None:
        hidden = (torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))
        for x, y in run.steps(data(STEPS)):
            hidden = run.carry(hidden=hidden)
            hidden = tuple(part.detach() for part in hidden)
            model.zero_grad()
            out, hidden = model["lstm"](x.view(2, 4, 6), hidden)
            loss = F.mse_loss(model["head"](out).view(8, 3), y)
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.25).item())
            optimizer.step()
            run.observe(loss)

    return Script(model, [optimizer], [], go, norms=norms)


class Pole:
    """An environment: a state, which actions and noise of its own change."""

    def __init__(self) -> None:
        self.draw, self.at = np.random.default_rng(0), np.zeros(6)

    def act(self, action: int) -> tuple[np.ndarray, float]:
        self.at = 0.9 * self.at + 0.1 * self.draw.normal(size=6) + 0.05 * (action - 1)
        return self.at.copy(), -float(np.abs(self.at).sum())


def environment() -> Script:
    """REINFORCE: no loader; actions are drawn, and the environment goes on from where it was."""
    seeded()
    model = net(0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def go(run: Any) -> None:
        env, at = Pole(), np.zeros(6)
        for _ in run.steps(STEPS):
            env, at = run.carry(env=env, at=at)
            chances, rewards = [], []
            for _ in range(5):
                policy = torch.distributions.Categorical(logits=model(torch.tensor(at).float()[None]))
                action = policy.sample()
                chances.append(policy.log_prob(action))
                at, reward = env.act(int(action))
                rewards.append(reward)
            gains = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
            loss = -(torch.cat(chances) * (gains - gains.mean())).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.observe(loss)

    return Script(model, [optimizer], [], go)


def early_break() -> Script:
    """The loop stops three steps before its loader does."""
    script = plain()
    model, optimizer, schedule = script.model, script.optimizers[0], script.extra[0]

    def go(run: Any) -> None:
        for batch in run.steps(data(STEPS + 3)):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            schedule.step()
            run.observe(loss)
            if run.step == STEPS - 1:
                break

    script.go = go
    return script


def evaluated() -> Script:
    """The loop evaluates each four steps, with batch normalisation, another mode and draws of its own."""
    seeded()
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.2), nn.ReLU(), nn.Linear(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def go(run: Any) -> None:
        for batch in run.steps(data(STEPS)):
            if run.step % 4 == 0:
                model.eval()
                with torch.no_grad():
                    _ = model(torch.randn(5, 6))
                model.train()
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            run.observe(loss)

    return Script(model, [optimizer], [], go)


def saved_and_loaded() -> Script:
    """The model is saved whole at step 4; at step 12 weights and optimizer go back to that of the loop's own accord."""
    seeded()
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def go(run: Any) -> None:
        kept: dict[str, Any] = {}
        for batch in run.steps(data(STEPS)):
            kept = run.carry(kept=kept)
            if run.step == 4:
                file = io.BytesIO()
                torch.save({"model": model, "optimizer": optimizer.state_dict()}, file)
                kept = {"file": file.getvalue()}
            if run.step == 12:
                there = torch.load(io.BytesIO(kept["file"]), weights_only=False)
                model.load_state_dict(there["model"].state_dict())
                optimizer.load_state_dict(there["optimizer"])
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            run.observe(loss)

    return Script(model, [optimizer], [], go)


def compiled() -> Script:
    script = plain()
    optimizer, schedule = script.optimizers[0], script.extra[0]
    model = torch.compile(script.model, backend="aot_eager")

    norms: list[float] = []

    def go(run: Any) -> None:
        for batch in run.steps(data(STEPS)):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
            optimizer.step()
            schedule.step()
            run.observe(loss)

    return Script(model, [optimizer], [schedule], go, norms=norms)


def with_workers() -> Script:
    """A DataLoader that shuffles and has worker processes."""
    script = plain()
    model, optimizer, schedule = script.model, script.optimizers[0], script.extra[0]
    rows = [row for x, y in data(STEPS) for row in zip(x, y, strict=True)]

    def go(run: Any) -> None:
        loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True, num_workers=2)
        for batch in run.steps(loader):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            schedule.step()
            run.observe(loss)

    script.go = go
    return script


def accelerated() -> Script:
    """A script of Accelerate, which accumulates two passes a step."""
    from accelerate import Accelerator

    seeded()
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model, optimizer = net(), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    batches = data(2 * STEPS)

    norms: list[float] = []

    def go(run: Any) -> None:
        for batch in run.steps(batches):
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                run.observe(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.3).item())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()

    return Script(model, [optimizer], [schedule], go, steps=STEPS, norms=norms)


SCRIPTS = {
    make.__name__: make
    for make in (
        plain,
        short_tail,
        short_windows,
        scaled,
        closure,
        two_optimizers,
        alternating,
        frozen,
        added_groups,
        sparse,
        bf16,
        tied,
        average,
        epochs,
        epochs_of_its_own,
        prefetched,
        hidden_state,
        environment,
        early_break,
        evaluated,
        saved_and_loaded,
        compiled,
        with_workers,
        accelerated,
    )
}

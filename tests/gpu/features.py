"""A check of everything that a trial may have: each setting's bits go by the trial alone, not by its pack."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.config import Trial
from harness.training.pack import Pack
from tests.gpu.bench import Bench, NotMeasured, count_unlike
from tests.gpu.engine import Trained, pack_of, train_pack

SHAPE = {"width": 32, "head_dim": 16, "context": 32, "vocabulary": 128, "steps": 4, "validate_every": 2, "warmup": 1}
FEW, MANY = 3, 20


def check_18(bench: Bench) -> None:
    """Three trials by themselves, and the same three among twenty, with each optimizer, clipper, norm, signal, ..."""
    try:
        from harness.testing.engine import different
        from harness.testing.settings import roughen
        from tests.harness.features import FEATURES
    except ImportError as error:
        raise NotMeasured(f"needs {error.name}") from None
    total, shape = 0, {} if bench.is_dry else SHAPE
    for number, name in enumerate(list(FEATURES)[:: bench.pick(1, 25)]):
        bench.check_time(2)
        trials = different(MANY, **{"warmup": 1, **shape, **FEATURES[name]})
        few, many = (_trained(bench, trials[:count], roughen) for count in (FEW, MANY))
        total += count_unlike(bench, name, ((few.left_by(row), many.left_by(row)) for row in range(FEW)))
        bench.tell("settings", number + 1)
    bench.tell("values", total)


def _trained(bench: Bench, trials: Sequence[Trial], roughen: Callable[[Pack], None]) -> Trained:
    pack = pack_of(trials, bench.device)
    roughen(pack)
    return train_pack(pack, dict.fromkeys(range(len(trials))), block=trials[0].steps)

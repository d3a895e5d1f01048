"""What the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest
import xarray as xr
from matplotlib.figure import Figure

from analysis import open_sweep
from analysis.figures.drawing import Drawing
from analysis.figures.registry import Needs, figures
from analysis.measures.outcomes import outcomes_and_notes
from analysis.reports.report import with_losses
from tests.analysis.given import judged
from tests.analysis.judging import Campaign
from tests.analysis.mitigated import Study
from tests.analysis.synthetic import SIZES, Made, write_campaign, write_realistic_sweep


@pytest.fixture(scope="session")
def realistic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sweep of all that the figures show."""
    out = tmp_path_factory.mktemp("realistic")
    write_realistic_sweep(out)
    return out


@pytest.fixture(scope="session")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, xr.Dataset]:
    """Campaigns with outcomes, by name."""

    def with_outcomes(size: str) -> xr.Dataset:
        out = tmp_path_factory.mktemp("campaign")
        write_campaign(out, **SIZES[size])
        return outcomes_and_notes(with_losses(open_sweep(out)))[0]

    return Made(with_outcomes)


@pytest.fixture(scope="session")
def drawn(sweeps: dict[str, xr.Dataset]) -> dict[str, dict[str, Drawing]]:
    """The figures of each of the `sweeps`, by its name and theirs."""
    return Made(lambda size: Made(lambda name: figures(Needs.OUTCOMES)[name](judged(sweeps[size]))))


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    return Campaign(tmp_path)


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return Study(tmp_path)


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are drawn, and their files are empty."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, target, **options: None)

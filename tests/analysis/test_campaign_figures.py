"""The figures of a campaign: readable whatever its size, and that they hold the numbers of the table."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import xarray as xr
from matplotlib.collections import QuadMesh
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis import open_sweep, outcomes, rates
from analysis.campaign_figures import CAMPAIGN_FIGURES, COLOURS, MOST_LINES, MOST_ROWS, fault_table
from analysis.drawing import Drawing
from analysis.outcomes import OUTCOMES
from analysis.recovery_figure import recovery_table
from analysis.statistics import median_interval, studied

FIVE_SITES = ("weight", "reduced_gradient", "clipped_gradient", "moment_1", "moment_2")
SIZES = {
    "three sites": {},
    "one site, one bit, no envelope": {
        "faults": 6,
        "sites": ["weight"],
        "layers": 1,
        "bits": [30],
        "beta2s": [0.95],
        "clips": [None],
        "twins": 0,
    },
    "five sites, twelve layers": {"faults": 500, "sites": FIVE_SITES, "layers": 12, "beta2s": [0.9, 0.99, 0.999]},
    "few faults": {"faults": 20, "bits": [18, 27]},
}


def judged(out: Path) -> xr.Dataset:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outcomes(open_sweep(out))


@pytest.fixture(scope="module")
def sweeps(synthetic, tmp_path_factory: pytest.TempPathFactory) -> dict[str, xr.Dataset]:
    found = {}
    for name, options in SIZES.items():
        out = tmp_path_factory.mktemp("campaign")
        synthetic.write_campaign(out, **options)
        found[name] = judged(out)
    return found


@pytest.fixture(scope="module")
def drawn(sweeps) -> dict[str, dict[str, Drawing]]:
    return {size: {name: draw(ds) for name, draw in CAMPAIGN_FIGURES.items()} for size, ds in sweeps.items()}


def of(drawn, name: str, size: str = "three sites") -> Figure:
    return drawn[size][name].figure


def words(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


# --- every figure ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CAMPAIGN_FIGURES)
def test_readable_at_every_size(drawn, synthetic, name: str, size: str) -> None:
    drawing = drawn[size][name]
    if drawing.figure is None:
        assert (name, size) == ("recovery_against_beta2", "one site, one bit, no envelope")
        assert drawing.caption == (
            "No figure: the judged faults that changed something have 1 value of beta2, not two."
        )
        return
    assert synthetic.check_texts(drawing.figure) > 10
    assert words(drawing.figure) and drawing.figure.get_suptitle() and drawing.caption.endswith(".")
    assert any(panel.get_xlabel() for panel in drawing.figure.axes)
    assert any(panel.get_ylabel() for panel in drawing.figure.axes)


@pytest.mark.parametrize("name", CAMPAIGN_FIGURES)
def test_global_settings_stay(sweeps, name: str) -> None:
    before = dict(matplotlib.rcParams)
    CAMPAIGN_FIGURES[name](sweeps["few faults"])
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("name", CAMPAIGN_FIGURES)
def test_without_judged_faults_there_is_none_and_a_reason(tmp_path: Path, synthetic, name: str) -> None:
    faulty = synthetic.make_trial(fault=synthetic.WeightBit(start=20))
    synthetic.write_pack(tmp_path, [faulty.golden, faulty], steps_done=10, finish=False)
    drawing = CAMPAIGN_FIGURES[name](judged(tmp_path))
    assert drawing.figure is None and drawing.caption.startswith("No figure: ")


# --- the map -----------------------------------------------------------------------------------------------------


def test_the_map_has_the_shares_of_the_table(sweeps, drawn) -> None:
    ds, figure = sweeps["three sites"], of(drawn, "vulnerability_map")
    panel = figure.axes[0]
    (mesh,) = [artist for artist in panel.collections if isinstance(artist, QuadMesh)]
    shown = mesh.get_array().reshape(-1, 32)
    rows = [label.get_text() for label in panel.get_yticklabels()]
    assert rows == sorted(rows) and len(rows) == 24 == len(shown)
    table = rates(ds, by=["struck_site", "struck_tensor", "struck_bit"])
    table = table[(table["outcome"] == "masked") & table["struck_bit"].notna()]
    found = {
        (row, bit): 1 - shown[i, bit]
        for i, row in enumerate(rows)
        for bit in range(32)
        if not np.ma.is_masked(shown[i, bit])
    }
    expected = {(f"{r.struck_site}: {r.struck_tensor}", int(r.struck_bit)): r.share for r in table.itertuples()}
    assert found == pytest.approx(expected)
    sums = [text.get_text() for text in panel.texts if text.get_text().startswith("n = ")]
    assert sum(int(text[4:]) for text in sums) == table["trials"].sum()


def test_the_map_marks_fields_and_what_is_empty(drawn) -> None:
    panel = of(drawn, "vulnerability_map", "one site, one bit, no envelope").axes[0]
    texts = [text.get_text() for text in panel.texts]
    assert {"mantissa", "exponent", "sign"} <= set(texts)
    assert [line.get_xdata()[0] for line in panel.lines] == [22.5, 30.5, 31.5]
    assert panel.patch.get_hatch() and panel.get_ylabel() == "tensor at site weight"
    assert list(panel.get_xticks()) == list(range(32))


def test_many_tensors_are_pooled_over_blocks(drawn) -> None:
    panel = of(drawn, "vulnerability_map", "five sites, twelve layers").axes[0]
    rows = [label.get_text() for label in panel.get_yticklabels()]
    assert len(rows) == 20 <= MOST_ROWS and rows[0] == "clipped_gradient: blocks.*.attention.projection"


def test_formats_have_panels_of_their_own_and_other_faults_are_counted(tmp_path: Path, synthetic) -> None:
    @dataclasses.dataclass(frozen=True)
    class InFormat(synthetic.BitFault):
        format: str = "fp32"

    faults = [InFormat(bit=bit, format=format, start=5) for format, bit in [("fp32", 31), ("bf16", 15), ("fp16", 3)]]
    faults += [InFormat(bit=0, format="fp16", seed=19, start=5)]
    trials = synthetic.with_golden(synthetic.make_trial(fault=fault) for fault in faults)
    synthetic.write_pack(tmp_path, trials, faults=synthetic.bit_events)
    drawing = CAMPAIGN_FIGURES["vulnerability_map"](judged(tmp_path))
    panels = drawing.figure.axes[:3]
    assert [panel.get_title("left") for panel in panels] == ["fp32", "bf16", "fp16"]
    assert [len(panel.get_xticks()) for panel in panels] == [32, 16, 16]
    assert panels[2].lines[0].get_xdata()[0] == 9.5, "ten bits of mantissa"
    assert drawing.caption.endswith("Not shown: 1 fault of several bits or of none.")
    assert synthetic.check_texts(drawing.figure)


# --- shares ------------------------------------------------------------------------------------------------------


def bar_counts(panel) -> dict[str, list[float]]:
    """Outcome -> width of its bar in each row, in percent."""
    bars = [patch for patch in panel.patches if isinstance(patch, Rectangle)]
    return {
        outcome: [bar.get_width() for bar in bars if bar.get_facecolor() == to_rgba(COLOURS[outcome])]
        for outcome in OUTCOMES
    }


def test_bars_by_site_and_by_time_are_the_table(sweeps, drawn) -> None:
    ds = sweeps["three sites"]
    by_site, by_time = of(drawn, "outcome_shares").axes
    table = fault_table(ds)
    labels = [label.get_text() for label in by_site.get_yticklabels()]
    sites = sorted(table["site"].unique())
    assert labels == [f"{site} (n = {(table['site'] == site).sum()})" for site in sites]
    widths = bar_counts(by_site)
    for row, site in enumerate(sites):
        own = table[table["site"] == site]["outcome"].value_counts(normalize=True)
        assert {outcome: widths[outcome][row] for outcome in OUTCOMES} == pytest.approx(
            {outcome: 100 * own.get(outcome, 0) for outcome in OUTCOMES}
        )
    times = [label.get_text().split(" (")[0] for label in by_time.get_yticklabels()]
    assert times == ["0 to 19", "20 to 39", "40 to 59", "60 to 79", "80 to 99"]
    early = (table["start"] < 20).sum()
    assert by_time.get_yticklabels()[0].get_text() == f"0 to 19 (n = {early})"


def test_few_first_steps_are_rows_of_their_own_and_runs_of_different_length_are_cut_by_share(
    tmp_path: Path, synthetic
) -> None:
    def labels(out: Path) -> list[str]:
        figure = CAMPAIGN_FIGURES["outcome_shares"](judged(out)).figure
        return [label.get_text() for label in figure.axes[1].get_yticklabels()]

    trials = [
        synthetic.make_trial(fault=synthetic.WeightBit(start=start), seed=seed) for start in (5, 30) for seed in (0, 1)
    ]
    synthetic.write_pack(tmp_path, synthetic.with_golden(trials))
    assert labels(tmp_path) == ["5 (n = 2)", "30 (n = 2)"]
    longer = synthetic.make_trial(fault=synthetic.WeightBit(start=199), steps=200)
    synthetic.write_pack(tmp_path, [longer.golden, longer])
    assert labels(tmp_path) == ["0 to 20% (n = 2)", "60 to 80% (n = 2)", "80 to 100% (n = 1)"]


# --- deviation curves --------------------------------------------------------------------------------------------


def test_deviation_curves_are_a_sample_over_the_envelope(sweeps, drawn) -> None:
    ds, figure = sweeps["three sites"], of(drawn, "deviation_curves")
    panels = [panel for panel in figure.axes if panel.get_title()]
    assert (
        len(panels) == 4
        and "2 recipes with fewer such faults not shown" in drawn["three sites"]["deviation_curves"].caption
    )
    for panel in panels:
        assert panel.get_yscale() == "log"
        curves = [line for line in panel.lines if len(line.get_xdata()) > 2]
        assert 40 < len(curves) <= MOST_LINES + len(OUTCOMES)
        colours = {to_rgba(line.get_color()) for line in curves}
        assert to_rgba(COLOURS["lingering"]) in colours and to_rgba(COLOURS["masked"]) in colours
        assert all(line.get_xdata()[0] == 0 for line in curves)
        beta2, clip = panel.get_title().split("\n")[0].split(", ")
        own = ds["envelope_max"].values[
            (ds["beta2"].values == float(beta2[6:])) & ((clip == "clip=null") == np.isnan(ds["clip"].values))
        ]
        (band,) = [patch for patch in panel.patches if patch.get_height() > 0]
        assert band.get_y() + band.get_height() == pytest.approx(own[0])
    assert "clean envelope" in words(figure)


def test_a_small_campaign_is_drawn_whole_and_says_that_it_has_no_envelope(sweeps, drawn) -> None:
    size = "one site, one bit, no envelope"
    figure, ds = of(drawn, "deviation_curves", size), studied(sweeps[size])
    curves = [line for line in figure.axes[0].lines if len(line.get_xdata()) > 2]
    highest = sorted(np.nanmax(line.get_ydata()) for line in curves)
    np.testing.assert_allclose(highest, np.sort(ds["deviation_max"].values))
    assert "no clean envelope" in words(figure)


# --- recovery ----------------------------------------------------------------------------------------------------


def test_recovery_has_medians_and_what_did_not_recover(sweeps, drawn) -> None:
    table, figure = recovery_table(sweeps["few faults"]), of(drawn, "recovery_against_beta2", "few faults")
    titles = [panel.get_title() for panel in figure.axes]
    assert titles == ["no clipping", "clipped at 1", "", ""]
    assert [label.get_text() for label in figure.axes[2].get_xticklabels()] == ["0.95", "0.99", "0.999"]
    betas, faults = sorted(table["beta2"].unique()), sorted(table["fault"].unique())
    for column, clip in enumerate((np.inf, 1.0)):
        upper, lower = figure.axes[column], figure.axes[column + 2]
        for number, fault in enumerate(faults):
            own = table[(table["clip"] == clip) & (table["fault"] == fault)]
            medians = [median_interval(own.loc[own["beta2"] == beta2, "recovery"].to_numpy())[0] for beta2 in betas]
            expected = [median if np.isfinite(median) else np.nan for median in medians]
            np.testing.assert_allclose(upper.containers[number][0].get_ydata(), expected)
            share = 100 * (1 - own.groupby("beta2")["recovered"].mean())
            np.testing.assert_allclose(lower.containers[number][0].get_ydata(), share)
    dots = sum(
        len(scatter.get_offsets())
        for panel in figure.axes[:2]
        for scatter in panel.collections
        if len(scatter.get_sizes()) and scatter.get_sizes()[0] in (12, 34)
    )
    assert dots == len(table), "every trial is drawn, recovered or not"
    assert (
        f"{(~table['recovered']).sum()} trials did not recover" in drawn["few faults"]["recovery_against_beta2"].caption
    )


def test_idle_faults_and_unjudged_ones_do_not_recover(sweeps) -> None:
    table, faulty = recovery_table(sweeps["three sites"]), studied(sweeps["three sites"])
    assert len(table) == int((~faulty["idle"]).sum()) < faulty.sizes["trial"]
    assert set(table["clip"]) == {1.0, np.inf} and (table["watched"] > 0).all()

"""The pictures of a post-mortem: signals around the incident, activations by layer, tokens of its batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import TwoSlopeNorm
from matplotlib.ticker import MaxNLocator

from analysis.again.batches import BatchReader
from analysis.figures.drawing import Drawing, page
from analysis.figures.legends import legend_below
from analysis.measures.anomalies import TrialSignals, usual
from analysis.measures.evidence import Evidence
from analysis.measures.incidents import Incident
from analysis.reading.incident_log import number
from harness.basics.printing import label

AROUND = 60  # steps on either side
MOST_TOKENS = 20
LOSS, NORM, BAND, ALARM = "#4c72b0", "#55a868", "#e0a030", "#c44e52"
MOST_FOLDS = 4.0  # powers of two at which the colours of activations end
NOT_FINITE = "#6a2135"


def incident_signals(run: TrialSignals, incident: Incident, evidence: Evidence) -> Drawing:
    """Loss, gradient norm before clipping, update and weights around an incident, with its alarms."""
    first, stop = max(0, evidence.begin - AROUND), min(run.steps, incident.last + AROUND)
    steps = np.arange(first, stop)
    signals = {
        f"loss\n[{run.loss_unit}]" * bool(run.loss_unit) or "loss": ("loss", LOSS, "linear"),
        "gradient norm\nbefore clipping": ("grad_norm", NORM, "log"),
        "rms of the\nupdate": ("update_rms", "#8172b2", "log"),
        "norm of the\nweights": ("param_norm", "#937860", "linear"),
    }
    is_drawn = False
    with page(9, 8.4, f"Trial {label(run.trial)}, steps {first} to {stop - 1}") as figure:
        panels = figure.subplots(len(signals), 1, sharex=True)
        for panel, (words, (name, colour, scale)) in zip(panels, signals.items(), strict=True):
            values = run[name][first:stop]
            finite = np.isfinite(values) & ((values > 0) | (scale == "linear"))
            panel.plot(steps, np.where(finite, values, np.nan), color=colour, linewidth=1.5, marker=".", markersize=3)
            known = values[finite]
            for step, seen in _undone(incident, name, run[name]):
                if not first <= step <= stop:
                    continue
                is_drawn = True
                panel.plot([step], [seen], "D", markersize=7, markerfacecolor="none", markeredgecolor=ALARM, zorder=5)
            if scale == "log" and len(known) and known.max() < 1e300:
                panel.set_yscale("log")
            broken = steps[~np.isfinite(values)]
            if len(broken):
                panel.plot(
                    broken, np.full(len(broken), 0.95), "x", color=NOT_FINITE, transform=panel.get_xaxis_transform()
                )
            panel.axvspan(evidence.begin - 0.5, incident.last + 0.5, color=BAND, alpha=0.25, linewidth=0)
            panel.set_ylabel(words)
        for alarm in incident.alarms:
            panels[0].axvline(alarm.step, color=ALARM, linewidth=1, linestyle="--")
        panels[-1].set_xlabel("step")
        panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    caption = (
        f"The band is the incident, from its onset at step {evidence.begin} to step {incident.last}; dashed lines are "
        "the first alarms of detectors, crosses are values that are not finite."
    )
    caption += " Diamonds: what was seen of steps that an answer has undone." if is_drawn else ""
    return Drawing(figure, caption)


def _undone(incident: Incident, name: str, stored: np.ndarray) -> Iterator[tuple[int, float]]:
    """What was seen of a signal at answered steps of which the run has kept something else: (step, value)."""
    for act in incident.acts:
        seen = number(getattr(act, name, None))
        is_kept = act.step < len(stored) and np.isclose(stored[act.step], seen, rtol=1e-4)
        if np.isfinite(seen) and not is_kept:
            yield act.step, seen


def activation_picture(run: TrialSignals, incident: Incident, evidence: Evidence) -> Drawing:
    """Activations and attention logits by layer and step, against what each layer had before."""
    first, stop = max(0, evidence.begin - AROUND // 2), min(run.steps, incident.last + AROUND // 2)
    names = {"activation_rms": "rms of the block's output", "attention_logit_max": "largest attention logit"}
    with page(9, 5.4, "Activations by layer") as figure:
        panels = list(figure.subplots(len(names), 1, sharex=True))
        for panel, (name, words) in zip(panels, names.items(), strict=True):
            image = _draw_layers(panel, run[name], ~np.isfinite(run["loss"]), evidence.begin, first, stop)
            panel.set_title(words, fontsize="medium", loc="left")
            panel.axvline(evidence.begin - 0.5, color="0.2", linewidth=1.2, linestyle="--")
        panels[-1].set_xlabel("step")
        figure.colorbar(image, ax=panels, label="times the layer's usual\n(powers of two)", fraction=0.03, pad=0.02)
    caption = (
        "By layer (rows) and step: how many times its median of the 40 steps before the onset (dashed line), in powers "
        "of two; dark is not finite, grey was not measured."
    )
    return Drawing(figure, caption)


def _draw_layers(
    panel: Axes, layers: np.ndarray, is_lost: np.ndarray, begin: int, first: int, stop: int
) -> ScalarMappable:
    levels = np.array([usual(layer)[0][begin] for layer in np.abs(layers).T])
    with np.errstate(divide="ignore", invalid="ignore"):
        folds = np.log2(np.abs(layers[first:stop]) / levels).T
    # What is NaN was not measured, but where the loss is no number either.
    is_broken = (np.isinf(layers[first:stop]) | (np.isnan(layers[first:stop]) & is_lost[first:stop, None])).T
    shown = np.where(is_broken, MOST_FOLDS + 1, folds)
    colours = colormaps["RdBu_r"].with_extremes(over=NOT_FINITE, bad="0.85")
    edges = np.arange(first, stop + 1) - 0.5, np.arange(layers.shape[1] + 1) - 0.5
    norm = TwoSlopeNorm(0, -MOST_FOLDS, MOST_FOLDS)
    clipped = np.where(is_broken, shown, np.clip(shown, -MOST_FOLDS, MOST_FOLDS))
    image = panel.pcolormesh(*edges, np.ma.masked_invalid(clipped), cmap=colours, norm=norm)
    panel.grid(False)
    panel.set_ylabel("layer")
    panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    return image


def token_histogram(reading: BatchReader, steps: Sequence[int], batches: Sequence[np.ndarray]) -> Drawing:
    """The tokens of the batches of these steps that differ most from the corpus, by their share in either."""
    counts = np.bincount(np.concatenate([batch.ravel() for batch in batches]), minlength=len(reading.corpus.counts))
    here, usually = counts / counts.sum(), reading.corpus.counts / reading.corpus.counts.sum()
    shown = np.argsort(-np.abs(here - usually), kind="stable")[:MOST_TOKENS]
    place = np.arange(len(shown))
    with page(9, 0.28 * len(shown) + 1.4, "Tokens of the incident's batches, and of the corpus") as figure:
        panel = figure.subplots()
        sides = (-0.2, here[shown], ALARM, "batches of the incident"), (0.2, usually[shown], "0.6", "training text")
        bars = [panel.barh(place + at, of, height=0.4, color=colour, label=name) for at, of, colour, name in sides]
        panel.set_yticks(place, [label(reading.token_text(int(token))) for token in shown], family="monospace")
        panel.set(ylim=(len(shown) - 0.5, -0.5), xlabel="share of the tokens")
        legend_below(figure, bars)
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    caption = f"The {len(shown)} tokens of {span} whose share differs most from that in the training text."
    return Drawing(figure, caption)

"""trials.html in a real browser, from the disk and with the network off: seen, clicked, typed, and never obeyed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from analysis import open_sweep
from analysis.pages.static_page import write_trial
from analysis.reports.report import write_report
from harness.config import Fault, Trial
from tests.analysis import synthetic
from tests.browsing import Visit, visiting

STEPS = 3000


@dataclass(frozen=True)
class Shown:
    """A sweep with a page of all trials."""

    page: Path
    sweep: xr.Dataset
    spike: Trial
    lost: Trial
    clean: Trial


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """Eight clean trials; of one of them two faulty ones: one comes back, one is lost. Their curves are thinned."""
    out = tmp_path_factory.mktemp("shown")
    rates, mitigations = (1e-3, 1e-2, 3e-2, 1e-1), ("none", "qk_norm")
    grid = [synthetic.make_trial(lr=lr, mitigation=name, steps=STEPS) for lr in rates for name in mitigations]
    clean = grid[2]
    spike, lost = (synthetic.make_trial(steps=STEPS, fault=synthetic.WeightBit(start=1000, bit=bit)) for bit in (3, 30))

    def loss(trial: Trial) -> np.ndarray:
        steps = np.arange(STEPS)
        values = 2 + abs(np.log10(trial.optim.lr) + 2) + 3 * np.exp(-steps / 300) + 0.01 * np.sin(steps)
        values[1500] += 40 if trial.id == spike.id else 0
        values[2000:] = np.nan if trial.id == lost.id else values[2000:]
        return values

    synthetic.write_pack(out, [*grid, spike, lost], loss, faults=synthetic.strike_events, study="shown", block=STEPS)
    write_report(out)
    return Shown(out / "trials.html", open_sweep(out), spike, lost, clean)


@pytest.fixture
def visit(chromium: str) -> Iterator[Visit]:
    """A page with the network off; what it asked for is looked at when the test is done."""
    with visiting(chromium, is_offline=True) as visit:
        yield visit
        visit.check("file:///")
        assert {address.partition("#")[0] for address in visit.asked if address.startswith("file:")} <= ALLOWED


ALLOWED: set[str] = set()


def go(visit: Visit, page: Path, fragment: str = "") -> Any:
    ALLOWED.add(page.as_uri())
    visit.page.goto(page.as_uri() + fragment)
    return visit.page


def traces(page: Any, box: str) -> list[dict[str, Any]]:
    """What plotly draws in a box: the name and the values of each line."""
    page.wait_for_selector(f"{box} .main-svg")
    told = "t => ({name: t.name, x: [...t.x], y: [...t.y], z: t.z, text: t.hovertext})"
    return page.evaluate(f"box => document.querySelector(box).data.map({told})", box)


def opened(page: Any) -> str:
    page.wait_for_selector("#plot-loss .main-svg")
    return page.inner_text("#trial-title").removeprefix("Trial ")


# --- ways to a trial ---------------------------------------------------------------------------------------------


def test_a_point_is_clicked(visit: Visit, shown: Shown) -> None:
    page = go(visit, shown.page, "#x=fault&y=final_loss&colour=outcome")
    page.wait_for_selector("#figure .point")
    point = page.evaluate(
        """id => { const box = document.getElementById("figure");
          for (const [t, trace] of box.data.entries()) for (const [p, row] of (trace.customdata || []).entries())
            if (overview.trials[row] === id) return [t, p]; }""",
        shown.lost.id,
    )
    points = page.locator("#figure .scatterlayer .trace").nth(point[0]).locator(".point")
    points.nth(point[1]).hover(force=True)
    page.mouse.down()
    page.mouse.up()
    assert opened(page) == shown.lost.id and page.url.endswith(f"#trial={shown.lost.id}")
    page.go_back()
    page.wait_for_selector("#list tbody a")
    assert page.locator("#trial").is_hidden()


def test_the_first_axes_are_what_was_varied(visit: Visit, tmp_path: Path) -> None:
    trials = [
        synthetic.make_trial(seed=seed, beta2=beta2, clip=clip)
        for seed in (0, 1)
        for beta2 in (0.9, 0.99)
        for clip in (0.5, 1.0)
    ]
    synthetic.write_pack(tmp_path, trials)
    write_report(tmp_path)
    page = go(visit, tmp_path / "trials.html")
    page.wait_for_selector("#figure .main-svg")
    chosen = page.evaluate("[view.x, view.y, view.colour]")
    assert sorted([chosen[0], chosen[2]]) == ["beta2", "clip"] and chosen[1] == "final_loss"


def test_the_list_is_walked_by_keyboard(visit: Visit, shown: Shown) -> None:
    page = go(visit, shown.page)
    page.wait_for_selector("#list tbody a")
    trials = page.evaluate("shownRows.map(row => overview.trials[row])")
    for _ in range(100):  # by Tab alone
        if page.evaluate("document.activeElement.matches('#list tbody a')"):
            break
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert opened(page) == trials[1]
    assert page.evaluate("document.activeElement.id") == "trial-title"
    page.keyboard.press("Escape")
    page.wait_for_selector("#list tbody a")
    assert page.evaluate("document.activeElement.hash") == f"#trial={trials[1]}", "back where one was"


def test_the_figure_is_walked_by_keyboard(visit: Visit, shown: Shown) -> None:
    page = go(visit, shown.page, "#x=lr&y=final_loss")
    page.wait_for_selector("#figure .main-svg")
    page.focus("#figure")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("ArrowRight")
    said = page.inner_text("#said")
    page.keyboard.press("Enter")
    assert f"trial {opened(page)}," in said
    assert float(shown.sweep.lr.sel(trial=opened(page))) == 1e-3, "the leftmost"


def test_an_address_names_a_trial(visit: Visit, shown: Shown) -> None:
    page = go(visit, shown.page, f"#trial={shown.spike.id}")
    assert opened(page) == shown.spike.id
    page.click(f'a[href="#trial={shown.clean.id}"]')
    visit.until("id => document.getElementById('trial-title').textContent.endsWith(id)", shown.clean.id)
    page.go_back()
    visit.until("id => document.getElementById('trial-title').textContent.endsWith(id)", shown.spike.id)
    page.evaluate("location.hash = 'trial=<img src=x onerror=alert(1)>'")
    visit.until("document.getElementById('trial').textContent.includes('This file has no trial <img')")


def test_a_cell_of_the_heat_map_leads_to_its_trials(visit: Visit, shown: Shown) -> None:
    page = go(visit, shown.page, "#kind=map&x=lr&y=mitigation&colour=final_loss")
    page.wait_for_selector("#figure .heatmaplayer image, #figure .hm")
    heat = traces(page, "#figure")[0]
    clean = shown.sweep.isel(trial=shown.sweep["outcome"].values == "trained")
    for j, mitigation in enumerate(heat["y"]):
        for i, rate in enumerate(heat["x"]):
            own = clean.final_loss.values[(clean.mitigation == mitigation) & (clean.lr == float(rate))]
            assert heat["z"][j][i] == pytest.approx(own.mean())
    page.focus("#figure")
    while "0.01" not in page.inner_text("#said") or "mitigation none" not in page.inner_text("#said"):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert "3 of 10 trials, those of one cell" in page.inner_text("#count")
    assert page.evaluate("document.activeElement.matches('#list tbody a')")


def test_a_filter_by_any_column(visit: Visit, shown: Shown) -> None:
    page = go(visit, shown.page)
    page.click("#add-filter")
    page.select_option("#filters label:has-text('column') select", "mitigation")
    page.select_option("#filters label:has-text('value') select", "qk_norm")
    assert page.inner_text("#count").startswith("4 of 10 trials")
    page.click("#add-filter")
    second = page.locator("#filters fieldset").nth(1)
    second.locator("select").nth(0).select_option("final_loss")
    second.locator("select").nth(1).select_option("at most")
    second.locator("input").fill("2.6")
    second.locator("input").press("Enter")
    wanted = (shown.sweep.mitigation == "qk_norm") & (shown.sweep.final_loss <= 2.6)
    assert page.inner_text("#count").startswith(f"{int(wanted.sum())} of 10 trials")
    drawn = [name for trace in traces(page, "#figure") for name in trace["text"] or []]
    assert len(drawn) == int(wanted.sum())
    page.click("#filters fieldset >> nth=0 >> button")
    assert page.inner_text("#count").startswith(f"{int((shown.sweep.final_loss <= 2.6).sum())} of 10 trials")
    page.click("thead button:has-text('final loss')")
    assert page.locator("th[aria-sort=ascending]").inner_text() == "final loss ↑"


def test_links_of_the_report_lead_to_the_same_points(visit: Visit, shown: Shown) -> None:
    page = go(visit, shown.page.parent / "report.html")
    ALLOWED.add(shown.page.as_uri())
    page.click("#loss_against_rate a")
    page.wait_for_selector("#figure .main-svg")
    assert page.evaluate("[view.x, view.y, view.colour]") == ["lr", "final_validation_loss", "mitigation"]
    values = shown.sweep.final_validation_loss
    points = {(x, y) for trace in traces(page, "#figure") for x, y in zip(trace["x"], trace["y"], strict=True)}
    expected = {(float(lr), float(y)) for lr, y in zip(values.lr, values.values, strict=True) if np.isfinite(y)}
    assert expected <= points


# --- what is shown -----------------------------------------------------------------------------------------------


def test_curves_are_those_of_the_store(visit: Visit, shown: Shown) -> None:
    page = go(visit, shown.page, f"#trial={shown.spike.id}")
    assert opened(page) == shown.spike.id
    by_name = {trace["name"]: trace for trace in traces(page, "#plot-loss")}
    for name, trial in {"loss": shown.spike, "golden twin": shown.clean}.items():
        stored = shown.sweep["loss"].sel(trial=trial.id).values
        at, values = by_name[name]["x"], np.array(by_name[name]["y"], "f4")
        assert 300 < len(at) < 500 and np.array_equal(values, stored[at])
    assert max(by_name["loss"]["y"]) > 40, "one step of three thousand"
    text = page.inner_text("#trial")
    assert re.search(r"Of 3000 values \d+ are drawn: of equal parts of the run the smallest and the largest", text)
    (deviation,) = traces(page, "#plot-deviation")
    assert deviation["y"][deviation["x"].index(1500)] == pytest.approx(40, rel=1e-6)
    page.select_option("#signal", "param_norm")
    assert traces(page, "#plot-other")[-1]["name"] == "param_norm"
    page.check("#log")
    assert page.evaluate("document.querySelector('#plot-loss').layout.yaxis.type") == "log"


def test_what_became_of_a_trial_is_told(visit: Visit, shown: Shown) -> None:
    page = go(visit, shown.page, f"#trial={shown.lost.id}")
    opened(page)
    text = page.inner_text("#trial")
    told = ["Outcome: non-finite; not finite from step 2000", "NaN from step 2000 to 2999", "blocks.0.attention.query"]
    for words in [*told, "Incidents and alarms", "stability-harness sweep out=results/alone", shown.lost.id]:
        assert words in text, words
    assert not page.locator("text=model.context").is_visible()
    page.click("summary")
    assert page.locator("text=model.context").first.is_visible()


@pytest.mark.parametrize("width", [1280, 640])  # 640: as at 200% in a window of 1280
def test_nothing_is_wider_than_the_window(visit: Visit, shown: Shown, width: int) -> None:
    visit.page.set_viewport_size({"width": width, "height": 800})
    for fragment in ("", "#kind=map", f"#trial={shown.lost.id}"):
        page = go(visit, shown.page, fragment)
        page.reload()
        page.wait_for_selector("#plot-loss .main-svg" if "trial" in fragment else "#figure .main-svg")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), fragment
    unlabelled = "[...document.querySelectorAll('select, input')].filter(c => !c.labels.length).length"
    assert page.evaluate(unlabelled) == 0


# --- what is not obeyed ------------------------------------------------------------------------------------------

CANARY = "window.__obeyed = (window.__obeyed || 0) + 1"
HOSTILE = [
    f"</script><script>{CANARY}</script>",
    f"<img src=x onerror='{CANARY}'>",
    "<a href='https://evil.example/'>click</a>",
    f'<a href="javascript:{CANARY}">x</a><b>',
    "%{customdata} {{ 7 * 7 }} ${1+1} $\\frac{1}{2}$",
    "__proto__",
    "\u202e<svg onload=" + CANARY + ">\x00",
    "constructor",
]


def test_names_of_a_store_are_shown_and_not_run(visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "CORPUS", {HOSTILE[0]: HOSTILE[1]})
    trials = [synthetic.make_trial(lr=lr, mitigation=text, fault=fault)
              for lr, text in zip((1e-3, 1e-2) * 4, HOSTILE, strict=True)
              for fault in (None, synthetic.WeightBit(name=text, tensor=text, start=10))]  # fmt: skip
    place = {trial.id: HOSTILE[number // 2] for number, trial in enumerate(trials)}

    def events(trial: Trial) -> list[dict[str, Any]]:
        text = place[trial.id]
        event = {"site": text, "tensor": text, "index": [1], "bit": 3, "changed": True, "step": 10}
        return [] if trial.fault.name == Fault().name else [event | {"before": text, text: text}]

    synthetic.write_pack(tmp_path, trials, faults=events, study=HOSTILE[0], outcome=lambda trial: place[trial.id])
    write_report(tmp_path)
    page = go(visit, tmp_path / "trials.html")
    page.evaluate("addEventListener('securitypolicyviolation', event => { window.__refused = event.blockedURI; })")
    names = page.evaluate("Object.keys(overview.columns)")
    assert {"mitigation", "fault", "outcome", "struck_tensor"} <= {*names}
    for kind in ("points", "map"):
        for name in ("mitigation", "fault", "struck_tensor"):
            y = "mitigation" if kind == "map" else "final_loss"
            page.evaluate("hash => { location.hash = hash; }", f"kind={kind}&x={name}&y={y}&colour=outcome")
            visit.until("([name, kind]) => view.x === name && view.kind === kind", [name, kind])
            page.hover("#figure")
    page.evaluate("location.hash = 'x=mitigation&y=final_loss&colour=outcome&kind=points'")
    visit.until("document.querySelector('#figure').textContent.includes('<img src=x')")
    assert page.locator("#figure a").count() == 0, "a name has become a link"
    page.click("#add-filter")
    page.select_option("#filters label:has-text('column') select", "mitigation")
    assert any("<img src=x" in text for text in page.locator("#filters option").all_inner_texts())
    for trial in trials:
        page.evaluate("id => { location.hash = `trial=${id}`; }", trial.id)
        visit.until("id => document.getElementById('trial-title')?.textContent.endsWith(id)", trial.id)
        page.wait_for_selector("#plot-loss .main-svg")
        links = page.evaluate("[...document.querySelectorAll('#trial a[href]')].map(a => a.getAttribute('href'))")
        assert all(re.fullmatch(r"#|#trial=[0-9a-f]{16}", link) for link in links), links
        assert place[trial.id].strip("\u202e\x00")[:20] in page.inner_text("#trial"), "shown as it stands"
    assert page.evaluate("[window.__obeyed, window.__refused]") == [None, None]
    assert page.locator("main img, main [onload], main [onerror]").count() == 0


def test_the_policy_lets_nothing_else_run(visit: Visit, shown: Shown) -> None:
    page = go(visit, shown.page)
    page.wait_for_selector("#figure .main-svg")
    page.evaluate("""() => {
      window.__refused = [];
      addEventListener("securitypolicyviolation", event => window.__refused.push(event.effectiveDirective));
      const script = document.createElement("script");
      script.textContent = "window.__obeyed = 1";
      document.body.append(script);
      const image = "<img src='https://evil.example/x.png' onerror='window.__obeyed = 2'>";
      document.body.insertAdjacentHTML("beforeend", image);
      fetch("https://evil.example/").catch(() => null);
    }""")
    visit.until("window.__refused.length >= 3")
    assert {"script-src-elem", "img-src", "connect-src"} <= {*page.evaluate("window.__refused")}
    assert page.evaluate("window.__obeyed") is None
    # The policy's own words, and what it held back.
    visit.errors.clear()
    visit.asked.remove("https://evil.example/x.png")


def test_a_page_of_one_trial_and_one_that_is_left_out(visit: Visit, shown: Shown, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    shutil.copytree(shown.page.parent, out)
    page = go(visit, write_trial(out, shown.spike.id))
    assert opened(page) == shown.spike.id
    page.evaluate("id => { location.hash = `trial=${id}`; }", shown.lost.id)
    words = f"stability-harness trial OUT {shown.lost.id}"
    visit.until("words => document.getElementById('trial').textContent.includes(words)", words)

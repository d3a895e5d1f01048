"""The report: what it says is what the store holds, whatever text that is, and a browser shows it."""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from analysis import open_sweep
from analysis.__main__ import main
from analysis.measures.metrics import lr_sensitivity
from analysis.reports import report
from analysis.reports.findings import worst_and_lost
from harness.storage.store import open_store
from tests.analysis import synthetic
from tests.analysis.mitigated import LOST, Ending, Study

HOSTILE = "<script>alert('x')</script>\"&{{ 7 * 7 }}"


@pytest.fixture(scope="module")
def written(realistic: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[report.Report, str]:
    out = tmp_path_factory.mktemp("report") / "sweep"
    shutil.copytree(realistic, out)
    made = report.write_report(out)
    return made, made.html.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def again(written) -> tuple[list[str], str]:
    """What the command prints as it reports on the same results once more, and the page that it leaves."""
    page = written[0].html
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()) as said:
        assert (main(["report", str(page.parent)]), said.getvalue()) == (0, "")
    return printed.getvalue().splitlines(), page.read_text(encoding="utf-8")


def findings_of(ds: xr.Dataset) -> list[str]:
    return report.findings(ds, lr_sensitivity(ds), report.fault_effects(ds))


# --- the whole report --------------------------------------------------------------------------------------------


def test_the_report_holds_figures_tables_and_origins(written) -> None:
    made, page = written
    assert [path.name for path in made.figures] == [
        "loss_against_rate.png",
        "largest_stable_rate.png",
        "sensitivity_against_width.png",
        "faulty_against_golden.png",
        "mitigation_map.png",
    ]
    for path in made.figures:
        assert path.read_bytes().startswith(b"\x89PNG")
    assert page.count("data:image/png;base64,") == 5 == page.count("<figcaption>")
    for text in (
        "<h1>synthetic: mitigation, fault, width, lr</h1>",
        "c0ffee",
        "<td>cpu</td>",
        "all, in 18 packs",
        "<th>180</th>",
    ):
        assert text in page
    for heading in (
        "LR sensitivity [nat/token]",
        "never fired",
        "fired without effect",
        "worst deviation, if finite [nat/token]",
    ):
        assert f"<th>{heading}</th>" in page
    assert "Intervals are 95%, Student's t over seeds and the held-out text; one seed has none." in page
    assert page.count("<td>5: 0.001 to 0.3</td>") == 6, "a row of LR sensitivity for each width and mitigation"
    assert all(html.escape(line, quote=True).replace("&#x27;", "&#39;") in page for line in made.findings)


def test_the_page_needs_nothing_beside_it(written) -> None:
    _, page = written
    links = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"'\s>)]{1,30})""", page)
    pictures = [link for link in links if not link.startswith("trials.html")]
    assert len(pictures) == 5 and all(link.startswith("data:image/png;base64,") for link in pictures)
    assert len(links) - len(pictures) == 1 + 5, "to all trials, and from each figure to its own"
    assert "<script" not in page


def test_findings_compare_with_and_without(written) -> None:
    lines = written[0].findings
    assert lines[0] == "180 trials: 171 trained, 9 non-finite."
    assert lines[1] == "Without a fault, by mitigation: none: 27 trained, 3 non-finite; qk_norm: 30 trained."
    pattern = r"qk_norm: LR sensitivity at width 128 0\.22 \[.*\] against 1\.10 \[0\.94, 1\.26\] without\."
    assert re.fullmatch(pattern, lines[2])
    assert lines[3].startswith("Fault rare_tokens, mitigation none: 27 of 30 trials moved away from their golden twin")
    assert len(lines) == 10
    assert lines[7].startswith("Largest stable learning rate at width 128: ") and "2 seeds" in lines[9]


@pytest.mark.usefixtures("unrendered")
def test_hostile_text_stays_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "CORPUS", {HOSTILE: HOSTILE})
    monkeypatch.setattr(synthetic, "ENVIRONMENT", {"device": HOSTILE})
    trials = [
        synthetic.make_trial(lr=lr, fault=fault, mitigation=HOSTILE)
        for lr in (1e-3, 1e-2)
        for fault in (None, synthetic.WeightBit(name=HOSTILE, start=1))
    ]
    synthetic.write_pack(tmp_path, trials, study=HOSTILE, outcome=lambda trial: HOSTILE)
    page = report.write_report(tmp_path).html.read_text(encoding="utf-8")
    assert "<script" not in page and "alert('x')" not in page and "49" not in page.split("<h2>Figures")[0]
    assert page.count("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&#34;&amp;{{ 7 * 7 }}") >= 8


@pytest.mark.usefixtures("unrendered")
def test_facts_of_facts_are_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = {"tokens": {"train": 28_333_247, HOSTILE: None}, "parts": [{"share": 0.25}, {"share": 0.75}], "path": None}
    monkeypatch.setattr(synthetic, "CORPUS", corpus)
    synthetic.write_pack(tmp_path, [synthetic.make_trial(lr=lr) for lr in (1e-3, 1e-2)])
    page = report.write_report(tmp_path).html.read_text(encoding="utf-8")
    assert ": none, train: 28,333,247</td>" in page and "<td>none</td>" in page
    assert "<td>share: 0.25, share: 0.75</td>" in page
    assert "{&#39;" not in page and "[{" not in page and "<script" not in page


def test_the_same_results_give_the_same_page(written, again) -> None:
    assert again[1] == written[1]


def test_a_figure_that_is_out_of_date_goes(tmp_path: Path) -> None:
    synthetic.write_pack(tmp_path, [synthetic.make_trial()])
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "faulty_against_golden.png").write_bytes(b"old")
    (tmp_path / "figures" / "mine.png").write_bytes(b"mine")
    made = report.write_report(tmp_path)
    assert made.figures == [] and [path.name for path in (tmp_path / "figures").iterdir()] == ["mine.png"]
    assert "No figure: the sweep has no faults." in made.html.read_text(encoding="utf-8")


def test_sweeps_that_are_not_done(tmp_path: Path) -> None:
    open_store(tmp_path, "test")
    assert report.write_report(tmp_path).findings == ["No trials yet."]
    faulty = [synthetic.make_trial(lr=lr, fault=synthetic.WeightBit(start=20)) for lr in (1e-3, 1e-2)]
    synthetic.write_pack(tmp_path, synthetic.with_golden(faulty), steps_done=10, finish=False)
    made = report.write_report(tmp_path)
    lines = made.findings
    assert lines[0] == "4 trials: 4 unfinished." and made.figures == []
    assert (
        lines[-1]
        == "Fault weight_bit, mitigation none: no finished trial with a golden twin, so what it did cannot be "
        "told; 2 unfinished."
    )


# --- numbers -----------------------------------------------------------------------------------------------------


def test_faults_are_counted_by_what_they_did(tmp_path: Path) -> None:
    kinds = ["moved", "masked", "no_effect", "idle", "lost"]
    faulty = {kind: synthetic.make_trial(fault=synthetic.WeightBit(start=20, bit=b)) for b, kind in enumerate(kinds)}

    def loss(trial) -> np.ndarray:
        values = np.full(40, 2.0)
        if trial is faulty["moved"]:
            values[22] = 5.5
        if trial is faulty["lost"]:
            values[30:] = np.nan
        return values

    def events(trial) -> list[dict]:
        if trial.fault.name == "none" or trial is faulty["idle"]:
            return []
        return [event | {"changed": trial is not faulty["no_effect"]} for event in synthetic.strike_events(trial)]

    synthetic.write_pack(tmp_path, synthetic.with_golden(faulty.values()), loss, faults=events)
    ds = open_sweep(tmp_path)
    row = report.fault_effects(ds).iloc[0].to_dict()
    assert row == {
        "fault": "weight_bit",
        "mitigation": "none",
        "trials": 5,
        "outcomes": {"trained": 4, "non-finite": 1},
        "strikes": 4,
        "changed": 3,
        "without_effect": 1,
        "never_fired": 1,
        "with_twin": 5,
        "moved": 2,
        "lost": 1,
        "worst_deviation": 3.5,
        "worst_trial": faulty["moved"].id,
    }
    assert findings_of(ds)[-1] == (
        "Fault weight_bit, mitigation none: 2 of 5 trials moved away from their golden twin; the worst of "
        "those that stayed finite by +3.50 nat/token; 1 became non-finite, unlike the twin; 1 never fired; 1 fired "
        "without effect."
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((0.0, 3, 3), ["all 3 became non-finite, unlike the twin"]),
        ((np.nan, 1, 1), ["1 became non-finite, unlike the twin"]),
        ((0.5, 0, 3), ["the worst by +0.50 nat/token"]),
        ((np.nan, 0, 0), []),
    ],
)
def test_trials_that_were_lost_have_no_worst_deviation(given: tuple[float, int, int], said: list[str]) -> None:
    assert worst_and_lost(*given) == said


def test_the_sentence_on_a_fault_leaves_no_mitigation_out(tmp_path: Path) -> None:
    """The sentences on rates and losses leave room for one on the fault: it is then of all mitigations."""
    study = Study(tmp_path)
    study.write(
        lambda trial: Ending(loss=2 + trial.optim.lr) if trial.fault.name == "none" else LOST,
        mitigations=["none", "qk_norm"],
        faults=[study.flip()],
    )
    told = [line for line in report.write_report(tmp_path).summary if "weight_bit" in line]
    assert told == [
        "Away from their golden twins, over mitigations none, qk_norm: weight_bit moved 18 of 18 trials (all 18 became "
        "non-finite, unlike the twin)."
    ]


def write_sensitivities(out: Path, final: dict[str, list[float]], rates=(1e-3, 1e-2)) -> None:
    """A mitigation's trials end at 2 for the first rate, and for the last at what `final` says for each seed."""
    for mitigation, values in final.items():
        trials = [
            synthetic.make_trial(lr=lr, seed=seed, mitigation=mitigation) for seed in range(len(values)) for lr in rates
        ]
        curves = {
            trial.id: np.where(np.arange(40) == 0, 5, 2 if trial.optim.lr == rates[0] else values[trial.seed])
            for trial in trials
        }
        synthetic.write_pack(out, trials, lambda trial, curves=curves: curves[trial.id])


@pytest.mark.parametrize(
    ("final", "expected"),
    [
        ({"none": [4, 4.02], "qk_norm": [2.2, 2.22]}, "0.11 [0.04, 0.17] against 1.00 [0.94, 1.07] without."),
        (
            {"none": [4, 5], "qk_norm": [4.5, 4.7]},
            "1.30 [0.66, 1.94] against 1.25 [-1.93, 4.43] without; the intervals overlap.",
        ),
        ({"none": [4], "qk_norm": [3]}, "0.50 against 1.00 without; one seed, so no interval."),
        ({"qk_norm": [3]}, "0.50."),
    ],
    ids=["apart", "overlap", "one seed", "nothing to compare with"],
)
def test_findings_say_how_sure_they_are(tmp_path: Path, final: dict, expected: str) -> None:
    write_sensitivities(tmp_path, final)
    assert findings_of(open_sweep(tmp_path))[1:] == [f"qk_norm: LR sensitivity at width 32 {expected}"]


def test_different_rates_are_not_compared(tmp_path: Path) -> None:
    write_sensitivities(tmp_path, {"none": [4]})
    write_sensitivities(tmp_path, {"qk_norm": [3]}, rates=(1e-3, 1e-1))
    assert findings_of(open_sweep(tmp_path))[1].endswith(
        "without; their learning rates differ, so the two cannot be compared."
    )


# --- mitigations -------------------------------------------------------------------------------------------------


def section(page: str, heading: str) -> str:
    return page.split(f"<h2>{heading}</h2>")[1].split("<h2>")[0] if f"<h2>{heading}</h2>" in page else ""


def test_mitigations_have_a_figure_and_a_table_with_intervals(tmp_path: Path) -> None:
    study = Study(tmp_path)
    size = {"none": 3.0, HOSTILE: 2.5}
    study.write(lambda t: Ending(loss=size[t.mitigation]), mitigations=list(size), faults=[study.flip()])
    page = section(report.write_report(tmp_path).html.read_text(encoding="utf-8"), "Mitigations")
    assert page.count("data:image/png;base64,") == 1 and "<script" not in page
    for heading in ("largest stable rate", "deviation, weight_bit [nat/token]", "step time [x baseline]"):
        assert f"<th>{heading}</th>" in page
    assert page.count("&lt;script&gt;") == 1, "one row, at one width"
    cell = '<td class="better">2.500 [2.500, 2.500] at 0.001<br>-0.500 [-0.500, -0.500]</td>'
    assert cell in page and "3 seeds" in page


@pytest.mark.usefixtures("unrendered")
def test_without_other_mitigations_there_is_no_section(tmp_path: Path) -> None:
    Study(tmp_path).write(mitigations=["none"])
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "mitigation_map.png").write_bytes(b"old")
    assert "<h2>Mitigations" not in report.write_report(tmp_path).html.read_text(encoding="utf-8")
    assert not (tmp_path / "figures" / "mitigation_map.png").exists()


def test_without_a_baseline_the_section_says_so(tmp_path: Path) -> None:
    Study(tmp_path).write(mitigations=["a", "b"])
    page = section(report.write_report(tmp_path).html.read_text(encoding="utf-8"), "Mitigations")
    assert "No figure: the baseline, mitigation=none, is not among the finished trials." in page
    assert "<table" not in page


@pytest.mark.usefixtures("unrendered")
def test_many_mitigations_do_not_make_many_sentences(tmp_path: Path) -> None:
    study = Study(tmp_path)
    names = ["none", *(f"m{number}" for number in range(11))]

    def ending(trial) -> Ending:
        size = names.index(trial.mitigation)
        return Ending(loss=2 + size * trial.optim.lr, deviation={} if trial.fault.name == "none" else {1: size})

    study.write(ending, mitigations=names, faults=[study.flip()])
    made = report.write_report(tmp_path)
    assert made.findings[1] == (
        "LR sensitivity of 12 mitigations: lowest with none at width 32 0.00 [0.00, 0.00]; "
        "highest with m10 at width 32 0.40 [0.40, 0.40]; without any at width 32 0.00 [0.00, 0.00]."
    )
    assert made.findings[2].startswith(
        "Fault weight_bit, 12 mitigations: 99 of 108 trials moved away from their golden twin; the worst by +11.00"
    )
    assert len(made.findings) == 6
    page = section(made.html.read_text(encoding="utf-8"), "Figures")
    assert page.count("Not shown: 2 mitigations with higher values.") == 2
    assert page.count("Not shown: 8 mitigations with higher values.") == 1


# --- the command -------------------------------------------------------------------------------------------------


def test_the_command_says_what_was_found_and_where_to_look(written, again) -> None:
    out, lines = written[0].html.parent, again[0]
    assert any("LR sensitivity at width 128" in line for line in lines)
    assert lines[0] == "synthetic: mitigation, fault, width, lr" and len(lines) <= 1 + 5 + 4
    assert lines[-4] == f"Trials: {out / 'trials.html'}"
    assert lines[-3] == f"Report: {out / 'report.html'}" and str(out / "figures" / "loss_against_rate.png") in lines[-2]
    assert lines[-1] == f"Next: stability-harness incidents {out}"


@pytest.mark.parametrize("name", ["x.pgf", "x.eps", "x", "pipe.png"])
def test_a_figure_of_a_kind_that_is_not_written(tmp_path: Path, realistic, capsys, name: str) -> None:
    """TeX draws some of them, and may not be there; nothing is waited for that is no file."""
    os.mkfifo(tmp_path / "pipe.png")
    assert main(["figure", "loss_against_rate", str(realistic), str(tmp_path / name)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "None" not in captured.err
    assert "; allowed: .png, .svg, .pdf\n" in captured.err or "cannot be written" in captured.err
    assert [file.name for file in tmp_path.iterdir()] == ["pipe.png"]


def test_errors_are_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "missing")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"error: out={tmp_path / 'missing'}: does not exist; allowed: ")

    synthetic.write_pack(tmp_path, [synthetic.make_trial()])
    (tmp_path / "report.html").mkdir()
    assert main(["report", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and f"error: out={tmp_path}: its report.html is not what" in captured.err

    capsys.readouterr()
    assert main(["nonsense"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: python -m analysis: argument command: invalid choice: 'nonsense'; allowed: ca")


# --- in a browser ------------------------------------------------------------------------------------------------


def dump_dom(browser: str, page: Path, profile: Path) -> str:
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--dump-dom"]
    return subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_browser_shows_the_page(written, chromium: str, tmp_path: Path) -> None:
    measure = """<script>
    addEventListener("load", () => {
      const images = [...document.images].map(i => i.complete ? i.naturalWidth : 0);
      const wide = document.documentElement.scrollWidth > innerWidth;
      document.title = JSON.stringify({images, wide, tables: document.querySelectorAll("tbody tr").length});
    });
    </script></body>"""
    page = tmp_path / "page.html"
    page.write_text(written[1].replace("</body>", measure), encoding="utf-8")
    title = re.search(r"<title>(.*?)</title>", dump_dom(chromium, page, tmp_path / "profile"))
    assert title, "no page"
    found = json.loads(html.unescape(title[1]))
    assert len(found["images"]) == 5 and all(width > 400 for width in found["images"])
    assert not found["wide"], "the page scrolls sideways"
    assert found["tables"] > 10

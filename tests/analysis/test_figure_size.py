"""A figure in the size of the place where it will stand: width, size of texts, title."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from analysis.__main__ import main
from analysis.figures.files import fit, inches
from analysis.figures.registry import Needs, Results, figures
from tests.analysis.mitigated import Study


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sized")
    study = Study(folder)
    study.write(mitigations=["none", "qk_norm"], faults=[study.flip()])
    return folder


@pytest.mark.parametrize(
    ("text", "length"), [("3.3in", 3.3), ("84mm", 84 / 25.4), ("240pt", 240 / 72), ("8.4 cm", 8.4 / 2.54), ("5", 5)]
)
def test_lengths(text: str, length: float) -> None:
    assert inches("--width", text) == pytest.approx(length)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--width", "84km"), "error: --width=84km: not a length; allowed: 1in to 40in, or as many cm, mm or pt"),
        (("--width", "0.2in"), "error: --width=0.2in: out of range; allowed: 1in to 40in, or as many cm, mm or pt"),
        (("--width=-3in",), "error: --width=-3in: not a length; allowed: 1in to 40in, or as many cm, mm or pt"),
        (("--font", "0"), "error: --font=0: out of range; allowed: 1 to 72 points"),
        (("--font", "nan"), "error: --font=nan: out of range; allowed: 1 to 72 points"),
    ],
)
def test_a_wrong_size_is_one_line(out: Path, tmp_path: Path, capsys, words: tuple[str, ...], said: str) -> None:
    assert main(["figure", "loss_against_rate", str(out), str(tmp_path / "x.svg"), *words]) == 2
    assert capsys.readouterr().err == f"{said}\n" and not (tmp_path / "x.svg").exists()


@pytest.mark.parametrize("name", list(figures(Needs.SWEEP, Needs.COMPARISON)))
def test_every_figure_fits(out: Path, name: str) -> None:
    drawing = figures(*Needs)[name](Results.open(out))
    assert drawing.figure is not None, drawing.caption
    before = drawing.figure.get_size_inches()
    fit(drawing.figure, 5.0, 7.0)
    FigureCanvasAgg(drawing.figure).draw()
    assert drawing.figure.get_size_inches() == pytest.approx([5.0, 5.0 * before[1] / before[0]])
    shown = [text for text in drawing.figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert shown and {text.get_fontsize() for text in shown} == {7.0}


def test_files_have_that_width(out: Path, tmp_path: Path) -> None:
    words = ["figure", "loss_against_rate", str(out)]
    assert main([*words, str(tmp_path / "x.svg"), "--width", "3.3in", "--font", "8", "--no-title"]) == 0
    text = (tmp_path / "x.svg").read_text()
    width = re.search(r'width="([\d.]+)pt"', text)
    assert width and float(width[1]) == pytest.approx(3.3 * 72)
    assert "Final loss against learning rate" not in text and "peak learning rate" in text
    assert main([*words, str(tmp_path / "x.png"), "--width", "4in"]) == 0
    with Image.open(tmp_path / "x.png") as picture:
        assert picture.width == pytest.approx(400, abs=2) and np.asarray(picture).std() > 0
    assert main([*words, str(tmp_path / "x.pdf"), "--width", "10cm"]) == 0
    box = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+)", (tmp_path / "x.pdf").read_bytes())
    assert box and float(box[1]) == pytest.approx(10 / 2.54 * 72, abs=1)


def test_panels_keep_the_titles_that_tell_them_apart(out: Path) -> None:
    single = figures(*Needs)["largest_stable_rate"](Results.open(out)).figure
    several = Figure()
    for panel, title in zip(several.subplots(1, 2), ("width 32", "width 64"), strict=True):
        panel.set_title(title)
    assert single is not None
    fit(single, has_title=False)
    fit(several, has_title=False)
    assert [panel.get_title() for panel in single.axes] == [""]
    assert [panel.get_title() for panel in several.axes] == ["width 32", "width 64"]


def test_the_old_name_of_a_figure_is_said_to_be_old(out: Path, tmp_path: Path, capsys) -> None:
    assert main(["figure", "stability_edge", str(out), str(tmp_path / "x.svg")]) == 0
    assert capsys.readouterr().err.startswith("note: the figure stability_edge is called largest_stable_rate now; ")
    assert main(["figure", "stability_edges", str(out), str(tmp_path / "y.svg")]) == 2
    assert "stability_edges" in capsys.readouterr().err and not (tmp_path / "y.svg").exists()

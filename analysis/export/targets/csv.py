"""CSV files: trials.csv, curves.csv and events.csv in a folder a sweep, each written whole."""

from __future__ import annotations

from pathlib import Path

from analysis.export import tables
from analysis.export.registry import Target
from analysis.export.runs import Source
from analysis.export.tracking import replaced


class Csv(Target):
    """See above."""

    about = "CSV files"

    def write(self, source: Source, place: Path) -> list[str]:
        """Numbers have all their digits, so that they are the store's as float64 too."""
        folder = place / source.as_in(place).name
        folder.mkdir(exist_ok=True)
        written = 0
        with replaced(folder / "curves.csv") as aside, open(aside, "w", encoding="utf-8", newline="") as file:
            file.write(",".join(tables.CURVES) + "\n")
            for part in tables.curves(source):
                part.astype({"value": float}).to_csv(file, header=False, index=False)
                written += len(part)
        for name, table in (("trials", tables.trials(source)), ("events", tables.events(source))):
            with replaced(folder / f"{name}.csv") as aside:
                table.to_csv(aside, index=False)
        return [f"{source.sweep.sizes['trial']} trials, {written} values: {folder}/trials.csv, curves.csv, events.csv"]

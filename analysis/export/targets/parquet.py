"""Parquet files: trials.parquet, curves.parquet and events.parquet in a folder a sweep, each written whole."""

from __future__ import annotations

from pathlib import Path

from analysis.export import tables
from analysis.export.registry import Target, needed
from analysis.export.runs import Source
from analysis.export.tracking import replaced

ROWS = 500_000  # of a row group, about


class Parquet(Target):
    """See above."""

    about = "Parquet files"
    extra = "parquet"

    def write(self, source: Source, place: Path) -> list[str]:
        """See `Target`."""
        with needed("parquet", "parquet"):
            import pyarrow as pa
            import pyarrow.parquet as pq
        folder = place / source.as_in(place).name
        folder.mkdir(exist_ok=True)
        words = pa.dictionary(pa.int32(), pa.string())
        schema = pa.schema({"trial": words, "signal": words, "step": pa.int64(), "value": pa.float32()})
        written, waiting = 0, []
        with replaced(folder / "curves.parquet") as aside, pq.ParquetWriter(aside, schema) as file:
            for part in tables.curves(source):
                waiting.append(pa.Table.from_pandas(part, schema, preserve_index=False))
                written += len(part)
                if sum(map(len, waiting)) >= ROWS:
                    file.write_table(pa.concat_tables(waiting).unify_dictionaries())
                    waiting.clear()
            if waiting:
                file.write_table(pa.concat_tables(waiting).unify_dictionaries())
        for name, table in (("trials", tables.trials(source)), ("events", tables.events(source))):
            with replaced(folder / f"{name}.parquet") as aside:
                table.to_parquet(aside, index=False, engine="pyarrow")
        names = ", ".join(f"{name}.parquet" for name in ("trials", "curves", "events"))
        return [f"{source.sweep.sizes['trial']} trials, {written} values: {folder}: {names}"]

"""NetCDF: the dataset of `open_sweep` in one file a sweep, written whole, for `xarray.open_dataset`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xarray as xr

from analysis.export.names import key
from analysis.export.registry import Target, needed
from analysis.export.runs import Source
from analysis.export.tracking import replaced
from analysis.reading.levels import texts
from harness.basics.printing import printable


class NetCdf(Target):
    """See above."""

    about = "one netCDF file, the dataset of open_sweep"
    extra = "netcdf"

    def write(self, source: Source, place: Path) -> list[str]:
        """See `Target`."""
        with needed("netcdf", "netcdf"):
            import h5netcdf  # noqa: F401
            import h5py  # noqa: F401
        sweep = _plain(source)
        file = place / f"{source.as_in(place).name}.nc"
        encoding = {key(name): {"zlib": True, "complevel": 1} for name in source.signals}
        with replaced(file) as aside:
            sweep.to_netcdf(aside, engine="h5netcdf", encoding=encoding)
        return [f"{sweep.sizes['trial']} trials: {file}"]


def _plain(source: Source) -> xr.Dataset:
    """The dataset under names that are none of a group, with texts that a file can have."""
    left_out = [name for name, of in source.sweep.data_vars.items() if "step" in of.dims and name not in source.signals]
    sweep = source.sweep.drop_vars(left_out)
    sweep = sweep.rename({name: key(str(name)) for name in sweep.variables if key(str(name)) != name})
    plain = {
        name: (of.dims, np.array([printable(item) for item in texts(of.values).tolist()], dtype=str), of.attrs)
        for name, of in sweep.coords.items()
        if of.dtype.kind in "UO"
    }
    sweep = sweep.assign_coords(plain)
    sweep = sweep.copy()
    for of in (sweep, *(sweep[name] for name in sweep.variables)):
        kept = {key(str(name)): value for name, value in of.attrs.items()}
        of.attrs = {name: printable(value) if isinstance(value, str) else value for name, value in kept.items()}
    return sweep

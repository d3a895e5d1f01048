"""How much this machine holds, and sizes in words."""

from __future__ import annotations

import os
import re


def main_memory() -> int:
    """Bytes of main memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def bytes_of(text: str) -> float | None:
    """`80GB`, `500M`, `1.5 TiB`, in powers of 1024; a number alone counts MB, as for Slurm. None for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)I?B?", text.upper())
    return float(match[1]) * 1024 ** " KMGT".index(match[2] or "M") if match else None


def in_units(size: float) -> str:
    """Bytes in words: `1.5 GiB`."""
    unit, name = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB") if size >= 2**20 else (2**10, "KiB")
    return f"{size / unit:,.{int(size < 10 * unit)}f} {name}"

"""What is tried: the kinds of examples, each with a check that builds what an example needs and runs it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis.strategies import SearchStrategy

from tests.fuzz import command_lines, stores, yaml_files


@dataclass(frozen=True)
class Kind:
    """Examples, and what raises Failure for one."""

    name: str
    examples: SearchStrategy[Any]
    check: Callable[[Any], None]


def in_folder(check: Callable[..., None]) -> Callable[[Any], None]:
    """A check in a folder of its own, which is gone afterwards."""

    def checked(example: Any) -> None:
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        try:
            command_lines.furnish(folder)
            check(folder, *example)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    return checked


KINDS = {
    "command_lines": Kind("command_lines", command_lines.command_lines, in_folder(command_lines.check)),
    "yaml_files": Kind("yaml_files", yaml_files.yaml_files, in_folder(yaml_files.check)),
    "stores": Kind("stores", stores.stores, in_folder(stores.check)),
}

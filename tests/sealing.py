"""Files that somebody has changed and sealed again: what a checksum cannot find."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from harness.storage.json_seal import SEAL, UNSEALED, sealed


def seal_again(file: Path, text: str) -> None:
    """Write this text, which has a seal somewhere, with one that fits."""
    file.write_bytes(sealed(re.sub(rf'"{SEAL}":"[0-9a-f]{{64}}"', f'"{SEAL}":"{UNSEALED}"', text)))


def seal_values(file: Path, values: Any) -> None:
    """The same of JSON, parsed."""
    seal_again(file, json.dumps(values, separators=(",", ":")))

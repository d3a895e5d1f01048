"""Where a value comes from that an error names and nobody has typed: the file of the study."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.config import ConfigError
from sweeps.compose.arguments import folder_of, options_of
from sweeps.compose.run_length import keys_of

VALUE = re.compile(
    r"(?<![\w.=-])([a-z_]+(?:\.[a-z_0-9]+)+|fault|mitigation|recipe|seed|detect|playbook)=[^\s:;]*[^\s:;,]"
)


def with_origins(error: ConfigError, arguments: Sequence[str]) -> ConfigError:
    """The same, in which each value that stands in the study and not in the command line says so.

    What is allowed, behind the reason, stays as it is.
    """
    given = [text.partition("=") for text in options_of(arguments).overrides]
    typed = {key.lstrip("+~") for key, _, _ in given}
    study = next((value for key, _, value in given if key == "study"), "grid")
    try:
        fixed = keys_of(study, folder_of(arguments)) - typed
    except (ConfigError, OSError):  # of which the error itself may speak
        return error

    def told(match: re.Match[str]) -> str:
        return f"{match[0]} (of study={study})" if match[1] in fixed else match[0]

    reasons = []
    for reason in error.reasons:
        why, allowed, rest = reason.partition("; allowed:")
        is_told = reason.startswith(f"study={study}: ")
        reasons.append(reason if is_told else VALUE.sub(told, why) + allowed + rest)
    return ConfigError(*reasons)

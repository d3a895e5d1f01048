"""Completion in a shell: commands, their options, and keys, groups and their options as Hydra does."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
from collections.abc import Collection, Sequence
from typing import Any

from harness.basics.errors import PROGRAM

SCRIPTS = {
    "bash": f"""_stability_harness() {{
    local IFS=$'\\n'
    COMPREPLY=($("$1" completion bash --breaks "$COMP_WORDBREAKS" --line "${{COMP_LINE:0:COMP_POINT}}" 2>/dev/null))
}}
complete -o nospace -o default -F _stability_harness {PROGRAM}
""",
    "zsh": f"""#compdef {PROGRAM}
_stability_harness() {{
    local -a found
    found=(${{(f)"$("${{words[1]}}" completion zsh --line "${{(j: :)words[1,CURRENT]}}" 2>/dev/null)"}})
    if (( $#found )); then compadd -Q -S '' -- $found; else _files; fi
}}
compdef _stability_harness {PROGRAM}
""",
    # fish adds the space itself.
    "fish": f"""function _stability_harness
    set --local line (commandline --cut-at-cursor --current-process | string collect)
    {PROGRAM} completion fish --line $line 2>/dev/null | string trim --right
end
complete --command {PROGRAM} --arguments '(_stability_harness)'
""",
}


def completed(line: str, commands: Collection[str], breaks: str = "") -> list[str]:
    """What the last word of a command line may become; without what stands before the last of `breaks` in it."""
    try:
        *earlier, word = _split(line)
        candidates = sorted(text for text in _candidates(earlier[1:], word, commands) if text.startswith(word))
    except Exception:  # a shell shows what is printed here in the middle of the line that is being typed
        return []
    begun = max((word.rfind(mark) for mark in breaks), default=-1) + 1
    return [text[begun:] for text in candidates]


def _split(line: str) -> list[str]:
    """The words of a line as a shell reads them, the last one being typed: it may be empty, or have an open quote."""
    for end in ("", "'", '"'):
        try:
            parts = shlex.split(line + end)
        except ValueError:
            continue
        return [*parts, ""] if not end and line[-1:].isspace() else parts
    return [""]


def _candidates(earlier: Sequence[str], word: str, commands: Collection[str]) -> list[str]:
    """What may come after `earlier`, the words between the program and the `word` that is being typed."""
    if not earlier:
        return [f"{name} " for name in (*commands, "--help", "--version")]
    name, *rest = earlier
    if word.startswith("-") and name != "sweep":
        return ["--help "]
    if name == "sweep":
        return _of_sweep(rest, word)
    if name == "coordinate-check":
        from sweeps.commands.coordinate_keys import is_taken

        known = [text for text in rest if not text.startswith("--") or text.startswith("--config-dir")]
        return [text for text in _of_sweep(known, word) if is_taken(text)]
    if name == "figure" and not rest:
        from analysis.commands.figure import figure_names

        return [f"{figure} " for figure in figure_names()]
    if name == "list":
        from sweeps.compose.places import LISTED

        return [f"{group} " for group in LISTED if group not in rest]
    if name == "completion" and not rest:
        return [f"{shell} " for shell in SCRIPTS]
    return []  # files, which the shell completes


def _of_sweep(earlier: Sequence[str], word: str) -> list[str]:
    """Hydra's own completion; and that of the last of several values, such as `mitigation=none,qk_norm+z`."""
    if word.startswith("-"):
        return ["--cfg ", "--config-dir=", "--help ", "--info ", "--list ", "--multirun ", "--version "]
    from hydra.core.plugins import Plugins
    from hydra.plugins.completion_plugin import CompletionPlugin

    from sweeps.compose.arguments import folder_of
    from sweeps.compose.hydra_calls import CONFIG_NAME, config_loader

    key, equals, values = word.partition("=")
    begun = max(values.rfind(","), values.rfind("+")) + 1
    # Of what stands before, only these change which keys there are; several of their values share them.
    chosen = dict(
        text.split("=", 1) for text in earlier if text.startswith(("fault=", "recipe=", "study=", "search=", "hydra/"))
    )
    given = [f"{group}={value.rpartition(',')[2]}" for group, value in chosen.items()]
    # Hydra's plugins of shells read the line there, and print; this one a word a line.
    os.environ["COMP_LINE"] = " ".join([PROGRAM, "--multirun", *given, f"{key}{equals}{values[begun:]}"])
    plugins: list[Any] = Plugins.instance().discover(CompletionPlugin)
    plugin = next(cls for cls in plugins if cls.provides() == "fish")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        plugin(config_loader(folder_of(earlier))).query(CONFIG_NAME)
    lines = printed.getvalue().splitlines()
    return [f"{key}={values[:begun]}{text.partition('=')[2]}" for text in lines] if begun else lines

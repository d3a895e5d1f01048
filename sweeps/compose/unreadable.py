"""Why a word of the command line is no override, in plain words: those of Hydra's grammar name its tokens."""

from __future__ import annotations

import re

from harness.basics.errors import nearest
from sweeps.compose.places import options

OPENS = {"(": ")", "[": "]", "{": "}"}
FUNCTIONS = {
    "range": "range(stop), range(start, stop) or range(start, stop, step), of numbers",
    "interval": "interval(low, high), of numbers",
    "choice": "choice(value, value)",
    "glob": "glob(pattern)",
    "tag": "tag(log, interval(low, high))",
    "sort": "sort(value, value)",
    "shuffle": "shuffle(value, value)",
}
"""Functions of Hydra's grammar that make several values, and how each is written."""
LIST = "values joined by commas without spaces, key=1,2"
_EVALUATED = re.compile(r"\w+ while evaluating '(\w+)\(")
_QUOTED = re.compile(r"\\.|'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"")
_KEY = re.compile(r"[+~]*[\w.@/:-]*")


def why(text: str, said: str) -> str:
    """What is wrong with `text` and what is allowed instead, where Hydra `said` that it cannot be read."""
    key, is_given, value = text.partition("=")
    if match := _EVALUATED.match(said):
        return _of_function(match[1])
    if not is_given:
        hint = f"did you mean study={text}? " if text in options("study") else ""
        return f"has no =; {hint}allowed: key=value"
    if key.lstrip("+~").startswith("-"):
        return f"begins with a dash; allowed: {key.lstrip('-')}=value"
    if not _KEY.fullmatch(key):
        return "a space or another sign in the key that no key has; allowed: key=value, without spaces around ="
    plain = _QUOTED.sub("x", value)
    if "'" in plain or '"' in plain:
        return "a quote is not closed; allowed: a quote before and after the value"
    if reason := _brackets(plain):
        return f"{reason}; allowed: brackets in pairs, and in a shell quotes around the word: '{key}=range(3)'"
    if plain.endswith(","):
        return f"no space after a comma; allowed: {LIST}"
    if plain.startswith(",") or ",," in plain:
        return f"no value between two commas; allowed: {LIST}"
    if plain.startswith("=") or "=" in plain:
        return f"more than one =; allowed: key=value, or quotes around the value: '{key}=\"a=b\"'"
    signs = "".join(dict.fromkeys(re.findall(r"[^\w.+*/:%@?|,$\s\\-]", plain)))
    return f"{signs or 'the value'} needs quotes; allowed: quotes around the value: '{key}=\"...\"'"


def _brackets(text: str) -> str:
    """What is wrong with its brackets; empty where nothing is."""
    opened: list[str] = []
    for letter in text:
        if letter in OPENS:
            opened.append(OPENS[letter])
        elif letter in OPENS.values() and (not opened or opened.pop() != letter):
            return f"the bracket {letter} closes none"
    return "a bracket is not closed" if opened else ""


def _of_function(name: str) -> str:
    if name in FUNCTIONS:
        return f"{name}() cannot be read so; allowed: {FUNCTIONS[name]}"
    return f"no function {name}; {nearest(name, [*FUNCTIONS])}allowed: {', '.join(FUNCTIONS)}, or quotes"

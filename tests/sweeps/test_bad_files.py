"""Wrong files of a user's own: studies, mitigations and faults in a folder of theirs, and what those may call."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sweeps import command

# file: (content, how the line begins, what it holds)
FILES = {
    "study/odd.yaml": (
        "model: {widht: 32}",
        "study=odd: model.widht=32: unknown key; did you mean model.width",
        "allowed",
    ),
    "study/typed.yaml": ("model: {context: abc}", "study=typed: model.context=abc: wrong type (str)", "an integer"),
    "study/range.yaml": ("optim: {beta2: 1.5}", "study=range: optim.beta2=1.5: out of range", "allowed: >= 0 and < 1"),
    "study/flat.yaml": ("optim: 3", "study=flat: optim=3: unknown key", "allowed: "),
    "study/device.yaml": ("device: tpu", "device=tpu: out of range", "allowed: auto, cpu, cuda"),
    "study/axis.yaml": (
        "hydra: {sweeper: {params: {optim.rl: '1,2'}}}",
        "optim.rl=1,2 (of study=axis): unknown key",
        "optim.lr",
    ),
    "study/value.yaml": (
        "hydra: {sweeper: {params: {optim.lr: '1,fast'}}}",
        "optim.lr=fast (of study=value): wrong type",
        "a number",
    ),
    "study/run.yaml": ("hydra: {sweeper: {params: {device: cpu}}}", "device=cpu: belongs to the run", "allowed"),
    "study/fault.yaml": ("fault: {bit: 3}", "study=fault: fault.bit=3: belongs under hydra.sweeper.params", "allowed"),
    "study/named.yaml": ("mitigation: qk_norm", "study=named: mitigation=qk_norm: belongs under", "allowed"),
    "study/chosen.yaml": ("defaults: [override /mitigation: qk_norm]", "study=chosen: mitigation=qk_norm: ", "params"),
    "study/hydra.yaml": ("hydra: {nope: 3}", "study=hydra: hydra.nope: may not come from a file", "sweeper.params"),
    "study/broken.yaml": ("model: [", "{folder}/study/broken.yaml: line", "allowed: YAML"),
    "mitigation/odd.yaml": ("optim: {beta3: 1}", "mitigation=odd: optim.beta3=1: unknown key; did you", "optim.beta2"),
    "mitigation/typed.yaml": ("optim: {beta2: high}", "mitigation=typed: optim.beta2=high: wrong type", "a number"),
    "mitigation/range.yaml": ("optim: {beta2: 2}", "mitigation=range: optim.beta2=2.0: out of range", "allowed: >= 0"),
    "mitigation/device.yaml": (
        "device: cpu",
        "mitigation=device: device=cpu: unknown key",
        "allowed: adafactor, adagc, ademamix, block, data, detect, lars, mars, model",
    ),
    "mitigation/typo.yaml": (
        "about: {txet: What it is}\noptim: {clip: 3}",
        "mitigation=typo: about.txet=What it is: unknown key; did you mean about.text",
        "allowed: about.text, about.paper, about.section",
    ),
    "mitigation/neutral.yaml": (
        "about: {neutral: {optim.clpi: 1}}\noptim: {clip: 3}",
        "mitigation=neutral: optim.clpi=1: unknown key in about.neutral; did you mean optim.clip",
        "allowed: optim.name, ",
    ),
    "mitigation/beside.yaml": (
        "about: {beside: {optim.beta2: high}}\noptim: {clip: 3}",
        "mitigation=beside: about.beside.optim.beta2=high: wrong type (str)",
        "a number",
    ),
    "mitigation/survives.yaml": (
        "about: {survives: {minus_inf: it does}}\noptim: {clip: 3}",
        "mitigation=survives: minus_inf=it does: unknown key in about.survives",
        "allowed: inf, nan",
    ),
    "mitigation/about.yaml": ("about: nothing\noptim: {clip: 3}", "mitigation=about: about=nothing: a section", "text"),
    "mitigation/sum.yaml": ("defaults: [qk_norm]", "mitigation=sum: defaults: a mitigation stands alone", "allowed"),
    "mitigation/broken.yaml": ("model: [", "{folder}/mitigation/broken.yaml: line", "allowed: YAML"),
    "fault/odd.yaml": ("{kind: value, bitt: 3}", "fault=odd: bitt=3: unknown key; did you mean bit", "element"),
    "fault/typo.yaml": (
        "{about: {not_neutral: no}, kind: value}",
        "fault=typo: about.not_neutral=false: unknown key",
        "allowed: about.text, about.paper, about.section, about.note, about.example",
    ),
    "fault/kind.yaml": (
        "kind: gremlin",
        "fault=kind: kind=gremlin: unknown kind of fault",
        "rare_tokens, realistic_sdc, reduction",
    ),
    "fault/typed.yaml": ("{kind: value, start: 1, bit: high}", "fault.bit=high: wrong type (str)", "an integer"),
}


OPTIONS = [(name, *case, option) for name, case in FILES.items() for option in ("alone", "swept")]
OPTIONS = [case for case in OPTIONS if case[-1] == "alone" or not case[0].startswith("study/")]


@pytest.mark.parametrize(
    ("name", "content", "start", "rest", "how"), OPTIONS, ids=[f"{case[0]} {case[-1]}" for case in OPTIONS]
)
def test_users_file(empty: Path, name: str, content: str, start: str, rest: str, how: str) -> None:
    command.write_yaml(empty / "mine", name, content)
    group, _, option = name.removesuffix(".yaml").partition("/")
    choice = f"{group}={'none,' if how == 'swept' else ''}{option}"
    (line,) = command.refused(empty, "--config-dir=mine", choice, "schedule.warmup=2", "train.steps=6")
    assert line.startswith(f"error: {start.format(folder=empty / 'mine')}")
    assert "allowed" in line
    assert rest in line


def test_folder_with_a_configuration_of_its_own(empty: Path) -> None:
    command.write_yaml(empty / "mine", "config.yaml", "model: {width: 8}")
    (line,) = command.refused(empty, *command.tiny("--config-dir=mine"))
    assert line.startswith("error: --config-dir=mine: its config.yaml would take the place of")


@pytest.mark.parametrize(
    "argument",
    ["+hydra.callbacks.mine={_target_:os.mkdir,path:called}", "hydra.launcher.workers={_target_:os.mkdir,path:called}"],
)
def test_nothing_that_an_argument_names_is_called(empty: Path, argument: str) -> None:
    (line,) = command.refused(empty, *command.tiny(argument))
    assert "would be imported and called; allowed: no _target_" in line or "has no effect here; allowed" in line

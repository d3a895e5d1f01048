"""The list of slow tests names tests that there are, and the mark reaches them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.slow import MEAN, measured, slow_functions

TESTS = Path(__file__).parent
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.harness.test_one" name="test_a[1]" time="{above}"/>
<testcase classname="tests.harness.test_one" name="test_a[2]" time="{above}"/>
<testcase classname="tests.harness.test_one" name="test_b" time="{below}"/>
{many}
</testsuite></testsuites>"""


@pytest.mark.parametrize("file", slow_functions())
def test_each_is_a_test(file: str) -> None:
    tree = ast.parse((TESTS / file).read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    gone = slow_functions()[file] - functions
    assert not gone, f"tests/slow.txt: {file}: {gone}: no such test; allowed: those of the file"


def test_a_slow_function_is_slow_in_each_case_or_in_all(tmp_path: Path) -> None:
    many = "".join(f'<testcase classname="tests.test_two" name="test_c[{n}]" time="0.5"/>' for n in range(200))
    (tmp_path / "junit.xml").write_text(JUNIT.format(above=MEAN + 0.1, below=MEAN - 0.1, many=many))
    assert measured(tmp_path / "junit.xml") == {"harness/test_one.py": ["test_a"], "test_two.py": ["test_c"]}
    (tmp_path / "rest.xml").write_text(JUNIT.format(above=MEAN - 0.1, below=MEAN + 0.1, many=""))
    both = measured(tmp_path / "junit.xml", tmp_path / "rest.xml")
    assert both == {"harness/test_one.py": ["test_a", "test_b"], "test_two.py": ["test_c"]}


def test_the_mark_is_on_those_alone(request: pytest.FixtureRequest) -> None:
    listed = slow_functions()
    for item in request.session.items:
        is_listed = item.name.partition("[")[0] in listed.get(item.path.relative_to(TESTS).as_posix(), ())
        assert (item.get_closest_marker("slow") is not None) == is_listed, item.nodeid

"""Hold docs/faults.md to the tests: 24 rows, each with tests that exist, none of them borrowed for two faults."""

from __future__ import annotations

import ast
import collections
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUM_FAULTS = 24


def _rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "faults.md").read_text("utf-8").splitlines()
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if re.match(r"\| [0-9]+ \|", line)]
    return [[cell.strip() for cell in row] for row in cells]


def _named_tests(cell: str) -> list[tuple[str, str]]:
    return re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", cell)


def test_the_table_has_a_row_for_each_fault_and_every_cell_says_something() -> None:
    rows = _rows()
    assert [row[0] for row in rows] == [str(number) for number in range(1, NUM_FAULTS + 1)]
    assert all(len(row) == 4 and all(row) for row in rows)


def test_every_fault_names_its_tests_and_they_exist() -> None:
    for number, _, _, shown_by in _rows():
        named = _named_tests(shown_by)
        assert named and len(named) == shown_by.count("`") // 2, f"fault {number}: {shown_by}"
        for file, function in named:
            tree = ast.parse((ROOT / file).read_text("utf-8"))
            defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert function in defined, f"fault {number}: {file} has no {function}"


def test_no_test_stands_for_two_faults() -> None:
    counts = collections.Counter(named for row in _rows() for named in _named_tests(row[3]))
    assert [named for named, count in counts.items() if count > 1] == []

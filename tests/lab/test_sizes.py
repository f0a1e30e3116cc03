"""Check the counts of lines, and the budget of each room."""

import json

from liger_lab.tools import sizes

TEXT = '''"""First line.

Second."""

# a comment
import os  # code


def function():
    """Document."""
    text = """two
    lines"""
    return text  # no docstring
'''


def test_each_line_has_one_kind():
    assert sizes.count(TEXT) == {"code": 5, "docstrings": 4, "comments": 1, "blank": 3}


def test_a_room_is_held_to_its_budget():
    rooms = {"liger_hw/a/": {"code": 90, "docstrings": 11, "comments": 50, "blank": 50}}
    assert sizes.problems(rooms, {"liger_hw/a/": 101}) == []
    (line,) = sizes.problems(rooms, {"liger_hw/a/": 100})
    assert line.startswith("liger_hw/a/: got 101 lines of code and docstrings, allowed: 100. Make it smaller")
    lines = sizes.problems(rooms, {"liger_hw/b.py": 100})
    assert lines[0].startswith("liger_hw/b.py: has a budget and no file") and "such as 110" in lines[1]


def test_the_budget_names_every_room():
    assert set(json.loads(sizes.BUDGET.read_text())) == set(sizes.sizes(sizes.ROOT))

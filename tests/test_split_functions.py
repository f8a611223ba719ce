"""The page of functions of split tensors is what the table says."""

import re

from distdl_rma.layers.split.calls.table import RULES
from functions import GROUPS, PAGE, written


def test_the_page_is_written_from_the_table():
    assert PAGE.read_text() == written(), "run docs/functions.py"


def test_every_kind_of_rule_has_its_place():
    assert {rule.kind for rule in RULES.values()} <= {*GROUPS, "registered"}


def test_every_rule_says_what_it_does():
    assert all(rule.doc or rule.handler.__doc__ for rule in RULES.values())


def test_every_group_but_that_of_copies_has_functions():
    headings = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
    assert headings == [title for group, (title, _) in GROUPS.items() if group != "copies"]

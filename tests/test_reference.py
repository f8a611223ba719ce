"""The reference of docs/reference has every public name, and each has a docstring to show there."""

from __future__ import annotations

import re
from functools import cached_property
from importlib import import_module
from inspect import getdoc, isclass, isfunction
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[1] / "docs" / "reference").glob("*.rst"))
AUTOMODULE = re.compile(r"^\.\. automodule:: (\S+)\n((?:   :.*\n)*)", re.MULTILINE)
LISTED = re.compile(r"^\.\. auto(?:class|exception|function):: (?:distdl_rma\.(\S+)\.)?(\w+)$", re.MULTILINE)
MEMBERS = property, cached_property, classmethod, staticmethod


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_every_public_name_of_its_module_and_each_has_a_docstring(page):
    public, listed, by_hand = names_of(page)
    assert not by_hand or public.keys() <= listed.keys()
    public |= listed
    assert public
    assert [name for name, value in public.items() if not documented(name, value)] == []
    members = {
        f"{name}.{member}": value
        for name, one in public.items()
        if isclass(one)
        for member, value in vars(one).items()
        if member[0] != "_" and (isfunction(value) or isinstance(value, MEMBERS))
    }
    assert [name for name, value in members.items() if not getdoc(value)] == []


def names_of(page):
    """Public names of a page's module, names that the page lists, and whether it lists all of them itself."""
    text = page.read_text()
    home, options = AUTOMODULE.search(text).groups()
    module = import_module(home)
    public = {name: getattr(module, name) for name in getattr(module, "__all__", ()) if name[0] != "_"}
    listed = {
        name: getattr(import_module(f"distdl_rma.{other}") if other else module, name)
        for other, name in LISTED.findall(text)
    }
    return public, listed, ":no-members:" in options


def documented(name, value):
    # A dataclass without a docstring has its signature there.
    own = vars(value).get("__doc__") if isclass(value) else getdoc(value)
    return bool(own) and not own.startswith(f"{name}(")

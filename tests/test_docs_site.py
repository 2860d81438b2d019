"""The documentation as a website: pages that are written by a program are current, and formulas need no network."""

import importlib.util
from dataclasses import fields
from pathlib import Path

import pytest

from trl_dataeff.options import DataEfficientOptions


DOCS = Path(__file__).parents[1] / "docs"


def module(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_the_page_of_the_configuration_is_current():
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert page == module("reference").page(), "python docs/reference.py --write"
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == [f"| `{field.name}`" for field in fields(DataEfficientOptions)]
    assert all(len(row) == 4 for row in rows)


def test_formulas_become_mathml():
    pytest.importorskip("latex2mathml")
    hooks = module("hooks")
    page = '<p><span class="arithmatex">\\(a &lt; \\frac{1}{2}\\)</span> and [<code>~a.Name</code>]</p>'
    made = hooks.on_page_content(page)
    assert "<mfrac><mrow><mn>1</mn></mrow><mrow><mn>2</mn></mrow></mfrac>" in made
    assert 'display="inline"' in made
    assert "arithmatex" not in made
    assert made.endswith("and <code>a.Name</code></p>")
    assert "replay_clip" in hooks.on_page_content('<div class="arithmatex">\\[\\texttt{replay\\_clip}\\]</div>')
    kept = "<p>[<code>a</code>](page.html) <code>x[0]</code></p>"
    assert hooks.on_page_content(kept) == kept
    assert hooks.on_page_content("<code>[`Selector`], *optional*</code>") == "<code>Selector, optional</code>"

"""The documentation as a website: pages that are written by a program are current, and formulas need no network."""

import importlib.util
import re
from dataclasses import fields
from pathlib import Path

import pytest
from trl import GRPOConfig

from trl_dataeff import DataEfficientGRPOConfig


ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def module(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_pages_that_a_program_writes_are_current():
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert page == module("reference").page(), "python docs/reference.py --write"
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    own = {field.name for field in fields(DataEfficientGRPOConfig)} - {field.name for field in fields(GRPOConfig)}
    assert sorted(row[0] for row in rows) == sorted(f"| `{name}`" for name in own)
    page = (DOCS / "recipes.md").read_text(encoding="utf-8")
    assert page == module("reference").recipes_page(page), "python docs/reference.py --write"
    listed = [f"recipes/{name}.yaml" for name in re.findall(r"^\| `(.+?)` \|", page, re.M) if "/" in name]
    assert sorted(listed) == sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("recipes/**/*.yaml"))


PAGES = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("examples/*.ipynb")]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as MkDocs and GitHub make them."""
    text = re.sub(r"(?s)```.*?```", "", page.read_text(encoding="utf-8"))
    titles = [re.sub(r"\[(.+?)\]\(.+?\)", r"\1", title).lower() for title in re.findall(r"^#+ (.+)$", text, re.M)]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title)).strip("-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_of_the_repository_lead_somewhere(page):
    text = re.sub(r"(?s)```.*?```", "", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_formulas_become_mathml_and_files_of_the_root_are_included_with_their_links():
    pytest.importorskip("latex2mathml")
    hooks = module("hooks")
    made = hooks.on_page_content(
        '<p><span class="arithmatex">\\(a &lt; \\frac{1}{2}\\)</span> and [<code>~a.Name</code>]</p>'
    )
    assert "<mfrac><mrow><mn>1</mn></mrow><mrow><mn>2</mn></mrow></mfrac>" in made
    assert made.endswith("and <code>a.Name</code></p>")
    kept = "<p>[<code>a</code>](page.html) <code>x[0]</code></p>"
    assert hooks.on_page_content(kept) == kept
    made = hooks.on_page_markdown("<!-- include CONTRIBUTING.md -->\n")
    assert made.startswith("# Contributing")
    assert "](selectors.md)" in made

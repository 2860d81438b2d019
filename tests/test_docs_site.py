"""The documentation as a website: what programs write is current, links lead somewhere, formulas need no network."""

import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from trl import GRPOConfig

from trl_dataeff import DataEfficientGRPOConfig
from trl_dataeff.tracking.files import SCHEMA


ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("examples/*.ipynb")]


def module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_what_programs_write_is_current():
    reference = module(DOCS / "reference.py")
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert page == reference.configuration(), "python docs/reference.py --write"
    own = {field.name for field in fields(DataEfficientGRPOConfig)} - {field.name for field in fields(GRPOConfig)}
    assert set(re.findall(r"^\| `(\w+)`<br>", page, re.M)) == own
    texts = [path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")]
    assert [text for text in texts if reference.filled(text) != text] == [], "python docs/reference.py --write"
    assert sorted(name for text in texts for name in reference.MARKED.findall(text)) == ["metrics", "recipes"]


def test_the_columns_of_the_table_of_groups_are_explained():
    page = (DOCS / "reading.md").read_text(encoding="utf-8").partition("`groups.parquet` has these columns")[2]
    assert re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.+?) \|", page, re.M))) == SCHEMA.names


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as MkDocs and GitHub make them."""
    text = re.sub(r"(?s)```.*?```", "", page.read_text(encoding="utf-8"))
    titles = [re.sub(r"\[(.+?)\]\(.+?\)", r"\1", title).lower() for title in re.findall(r"^#+ (.+)$", text, re.M)]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title)).strip("-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_of_the_repository_lead_somewhere(page):
    text = re.sub(r"(?s)```.*?```", "", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        is_on_the_host = link.startswith("../../actions/")  # the state of the project's CI
        if "://" in link or is_on_the_host:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_a_notebook_goes_along_with_the_site():
    pytest.importorskip("latex2mathml")
    structure = pytest.importorskip("mkdocs.structure.files")
    hooks = module(DOCS / "hooks.py")
    files = hooks.on_files(structure.Files([]), config=SimpleNamespace(site_dir="site"))
    page = hooks.on_page_markdown("[notebook](../examples/first_run.ipynb)")
    assert page == f"[notebook]({files.get_file_from_path('examples/first_run.ipynb').src_uri})"


def test_formulas_become_mathml_and_files_of_the_root_are_included_with_their_links():
    pytest.importorskip("latex2mathml")
    hooks = module(DOCS / "hooks.py")
    page = '<p><span class="arithmatex">\\(a &lt; \\frac{1}{2}\\)</span> and [<code>~a.Name</code>]</p>'
    made = hooks.on_page_content(page)
    assert "<mfrac><mrow><mn>1</mn></mrow><mrow><mn>2</mn></mrow></mfrac>" in made
    assert made.endswith("and <code>a.Name</code></p>")
    kept = "<p>[<code>a</code>](page.html) <code>x[0]</code></p>"
    assert hooks.on_page_content(kept) == kept
    made = hooks.on_page_markdown("<!-- include CONTRIBUTING.md -->\n")
    assert made.startswith("# Contributing")
    assert "](selectors.md)" in made


def test_each_cell_of_a_table_names_its_column():
    pytest.importorskip("latex2mathml")
    hooks = module(DOCS / "hooks.py")
    head = """<thead><tr><th><code>a</code> of &lt;b&gt;</th><th style="text-align: left;">a "c"</th></tr></thead>"""
    rows = """<tr><td>1</td>\n<td style="text-align: left;">2</td></tr>\n<tr><td>3</td><td></td></tr>"""
    table = f"<td>outside</td>\n<table>\n{head}\n<tbody>\n{rows}\n</tbody>\n</table>"
    made = hooks.on_page_content(table)
    labels = re.findall(r'data-label="([^"]*)"', made)
    assert labels == ["a of &lt;b&gt;", "a &quot;c&quot;"] * 2
    assert re.sub(r' data-label="[^"]*"', "", made) == table


def test_markup_is_taken_from_the_types_of_docstrings_alone():
    pytest.importorskip("latex2mathml")
    hooks = module(DOCS / "hooks.py")
    row = """<tr class="doc-section-item"><td><code>a</code></td><td>
        <code>`str` or [`Name`], *optional*</code> </td>
        <td><p>a <code>2 * b</code>, <code>~/c</code></p></td></tr>"""
    made = hooks.on_page_content(row)
    assert "<code>str or Name, optional</code>" in made
    assert "<code>2 * b</code>, <code>~/c</code>" in made
    cell = '<table class="other"><tr><td><code>~/`c`</code></td></tr></table>'
    code = f"<p><code>`a` ** b</code></p>{cell}<pre><code># *`x`*</code></pre>"
    assert hooks.on_page_content(code) == code

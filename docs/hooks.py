"""
What MkDocs does to the pages: files of the repository's root are included, notebooks go along with the site, and
formulas become MathML, which browsers draw without scripts and without a network.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files


ROOT = Path(__file__).parents[1]
INCLUDE = re.compile(r"<!-- include ([\w.]+) -->\n?")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.+?)\\[)\]]</\1>', re.DOTALL)
#: How docstrings name other parts of the package: [`Name`] or [`~module.Name`]
NAMED = re.compile(r"\[<code>~?([\w.]+)</code>\](?!\()")
#: A row of a docstring's arguments, attributes or results. Its first cells are a name and a type, which is Markdown in
#: the source and code on the page; a description follows, whose code stays as it is.
ARGUMENT = re.compile(r'(?s)<tr class="doc-section-item">.*?</tr>')
TYPE = re.compile(r"(<td[^>]*>\s*<code>)([^<]*)(</code>\s*</td>)")
MARKUP = re.compile(r"[`*~]|\[(?=`)|(?<=`)\]")
TABLE = re.compile(r"(?s)<table>.*?</table>")
HEADING = re.compile(r"(?s)<th[^>]*>(.*?)</th>")
ROW = re.compile(r"(?s)<tr[^>]*>.*?</tr>")
CELL = re.compile(r"<td(?=[\s>])")
TAG = re.compile(r"<[^>]+>")


def on_files(files: Files, config: Any, **kwargs: Any) -> Files:
    for path in ROOT.glob("examples/*.ipynb"):
        files.append(File(f"examples/{path.name}", str(ROOT), config.site_dir, use_directory_urls=False))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    markdown = markdown.replace("](../examples/", "](examples/")
    return INCLUDE.sub(lambda found: _links_from_docs((ROOT / found[1]).read_text(encoding="utf-8")), markdown)


def _links_from_docs(markdown: str) -> str:
    """Links of a file in the root, as they are in `docs`, where its page is in small letters."""
    markdown = re.sub(r"\]\(([A-Z]+)\.md", lambda found: f"]({found[1].lower()}.md", markdown)
    return markdown.replace("](docs/", "](")


def on_page_content(content: str, **kwargs: Any) -> str:
    content = NAMED.sub(r"<code>\1</code>", FORMULA.sub(_mathml, content))
    content = ARGUMENT.sub(lambda row: TYPE.sub(_plain_type, row[0]), content)
    return TABLE.sub(lambda table: _with_labels(table[0]), content)


def _with_labels(table: str) -> str:
    """A table whose cells name their column: on a phone, `site.css` shows them one below the other."""
    labels = [TAG.sub("", heading).strip().replace('"', "&quot;") for heading in HEADING.findall(table)]

    def labelled(row: re.Match[str]) -> str:
        names = iter(labels)
        return CELL.sub(lambda cell: f'{cell[0]} data-label="{next(names)}"', row[0])

    return ROW.sub(labelled, table)


def _plain_type(found: re.Match[str]) -> str:
    start, markdown, end = found.groups()
    return start + MARKUP.sub("", markdown) + end


def _mathml(found: re.Match[str]) -> str:
    tag, bracket, formula = found.groups()
    formula = re.sub(r"\\texttt\{(.+?)\}", lambda name: name[0].replace(r"\_", "_"), formula)
    if bracket == "[":
        return f'<{tag} class="formula">{convert(html.unescape(formula), display="block")}</{tag}>'
    return f"<{tag}>{convert(html.unescape(formula), display='inline')}</{tag}>"

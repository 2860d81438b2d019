"""Size of the project: lines and code lines (without docstrings, comments and blank lines) of each part, and words of the pages.

python .ci/size.py             the totals
python .ci/size.py --folders   and each folder of the package
python .ci/size.py --pages     and each page of the documentation
"""

import ast
import pathlib
import re
import subprocess
import sys


ROOT = pathlib.Path(__file__).resolve().parent.parent
#: Written by programs, or included from the root
GENERATED = ("configuration.md", "api.md", "versions.md", "changelog.md", "contributing.md")


def code_lines(source: str) -> int:
    """Lines that are neither blank nor a comment nor part of a docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(source.split("\n"), 1)
    return sum(1 for i, line in lines if line.strip() and not line.strip().startswith("#") and i not in docstrings)


def words(page: str) -> int:
    """Words of a page, code included, without the tables that programs write; a word has a letter or a digit."""
    written = re.sub(r"(?s)<!-- [a-z0-9 -]+ -->\n.*?<!-- end -->", "", page)
    return sum(1 for word in written.split() if re.search(r"\w", word))


def pages() -> dict[str, int]:
    """Words of README, CONTRIBUTING and each page that is not generated."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {path.name: words(path.read_text(encoding="utf-8")) for path in paths if path.name not in GENERATED}


def tracked(folder: str, ending: str) -> list[pathlib.Path]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.splitlines() if name.endswith(ending)]
    return [path for path in paths if path.exists()]


def read(paths: list[pathlib.Path]) -> list[str]:
    return [path.read_text(encoding="utf-8") for path in paths]


def row(name: str, paths: list[pathlib.Path]) -> str:
    sources = read(paths)
    lines = sum(source.count("\n") for source in sources)
    return f"{name:<24}{sum(map(code_lines, sources)):>8,} code lines{lines:>9,} lines{len(paths):>5} files"


def main() -> None:
    package = tracked("trl_dataeff", ".py")
    print(row("trl_dataeff", package))
    for folder in ("tests", "benchmarks", "examples"):
        print(row(folder, tracked(folder, ".py")))
    counts = pages()
    print(f"{'README.md':<24}{counts.pop('README.md'):>8,} words")
    print(f"{'CONTRIBUTING.md':<24}{counts.pop('CONTRIBUTING.md'):>8,} words")
    print(f"{'docs':<24}{sum(counts.values()):>8,} words{len(counts):>17} pages")
    if "--pages" in sys.argv[1:]:
        for name, count in counts.items():
            print(f"  {name:<22}{count:>8,} words")
    if "--folders" in sys.argv[1:]:
        parts = sorted({path.relative_to(ROOT / "trl_dataeff").parts[0] for path in package})
        for part in parts:
            at = ROOT / "trl_dataeff" / part
            print(row(f"  {part}", [path for path in package if path == at or at in path.parents]))


if __name__ == "__main__":
    main()

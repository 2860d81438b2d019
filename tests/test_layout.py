"""The layout of the tests: they mirror the package, and share helpers through `tests.factories` alone."""

import ast
from pathlib import Path

import pytest


TESTS = Path(__file__).parent
ROOT = TESTS.parent
MODULES = sorted(TESTS.rglob("*.py"))
# These test what is not a folder of the package: `benchmarks/`, `examples/`, and training on several processes
OUTSIDE = {"benchmarks", "examples", "distributed"}


def imported(path: Path) -> set[str]:
    """Every module that `path` imports, and every `module.name` of its `from` imports."""
    names = set()
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join((*package[: len(package) + 1 - node.level], *filter(None, [node.module])))
            module = base if node.level else node.module
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("path", MODULES, ids=[path.relative_to(TESTS).as_posix() for path in MODULES])
def test_only_factories_are_imported(path):
    """Besides, a test may import the script beside it that it runs as a child process."""
    folder = ".".join(path.relative_to(ROOT).parts[:-1])
    for name in imported(path):
        last = [part for part in name.split(".") if part.startswith("test_") or part == "conftest"]
        assert not (name.startswith("tests.") and last), (
            f"{name} is a test module: move what is shared to tests/factories"
        )
        if name.startswith("tests.") and folder != "tests.factories":
            beside = folder != "tests" and (name == folder or name.startswith(f"{folder}."))
            assert beside or name.startswith("tests.factories"), f"{name} belongs to other tests"


def test_folders_are_those_of_the_package():
    for folder in {path.parent for path in TESTS.rglob("test_*.py")} - {TESTS}:
        name = folder.relative_to(TESTS)
        assert (folder / "__init__.py").exists(), f"tests/{name} lacks its __init__.py"
        if name.parts[0] not in OUTSIDE:
            assert (ROOT / "trl_dataeff" / name).is_dir(), f"tests/{name}: there is no trl_dataeff/{name}"

"""The layout of the tests: they mirror the package, and share helpers through `tests.factories` alone."""

import ast
from pathlib import Path


TESTS = Path(__file__).parent
ROOT = TESTS.parent
MODULES = sorted(TESTS.rglob("*.py"))
OUTSIDE = {"benchmarks", "examples"}  # folders of the repository
SCENARIOS = {"distributed", "engines", "upstream"}  # no folder of their own: several processes, vLLM, TRL's tests


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


def test_only_factories_are_imported():
    """Besides, a test may import the script beside it that it runs as a child process."""
    wrong = []
    for path in MODULES:
        folder = ".".join(path.relative_to(ROOT).parts[:-1])
        for name in sorted(imported(path)):
            a_test = any(part.startswith("test_") or part == "conftest" for part in name.split("."))
            beside = folder != "tests" and f"{name}.".startswith(f"{folder}.")
            if name.startswith("tests.") and (a_test or not (beside or f"{name}.".startswith("tests.factories."))):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(["Move what is shared to tests/factories:", *wrong])


def test_folders_are_those_of_the_package():
    for folder in {path.parent for path in TESTS.rglob("test_*.py")} - {TESTS}:
        name = folder.relative_to(TESTS)
        assert (folder / "__init__.py").exists(), f"tests/{name} lacks its __init__.py"
        tested = (ROOT if name.parts[0] in OUTSIDE else ROOT / "trl_dataeff") / name
        if name.parts[0] not in SCENARIOS:
            assert tested.is_dir() or tested.with_suffix(".py").is_file(), f"tests/{name}: there is no {tested}"

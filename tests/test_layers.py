"""
The layers of the package (see its docstring): a module imports only from layers below its own, and there is no cycle.

Every import counts: those within functions, and those for type checkers alone.
"""

from __future__ import annotations

import graphlib
import sys
from collections.abc import Iterable, Mapping

import grimp
import pytest


ROOT = "trl_dataeff"
#: Top to bottom. Units of one layer do not import each other; modules of one unit may, without cycles.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli", "testing"),
    ("analysis",),
    ("trainer",),
    ("callback",),
    ("collector",),
    ("validation",),
    ("selection",),
    ("difficulty", "replay", "tracking"),
    ("checkpoint", "signals"),
    ("rollouts", "rewards", "config"),
    ("utils",),
    ("version",),
)

Imports = Mapping[str, Iterable[str]]


def imports_of(package: str) -> dict[str, set[str]]:
    """By module, the modules of the package that it imports."""
    graph = grimp.build_graph(package, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def cycle(imports: Imports) -> list[str]:
    """A cycle of imports, its first module at both ends; empty if there is none."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def violations(imports: Imports, layers: tuple[tuple[str, ...], ...], root: str) -> list[str]:
    """What is wrong with the imports, a line each. `layers` has names below `root`."""
    depth = {unit: depth for depth, units in enumerate(layers) for unit in units}
    found = []
    for module in sorted(imports):
        unit = unit_of(module, root)
        if unit not in depth and module != root:
            found.append(f"{module} belongs to no layer: give it one")
        for imported in sorted(imports[module]):
            other = unit_of(imported, root)
            if imported == root:
                found.append(f"{module} imports the root package")
            elif module == root or other == unit or unit not in depth or other not in depth:
                continue
            elif depth[other] == depth[unit]:
                found.append(f"{module} imports {imported} of its own layer")
            elif depth[other] < depth[unit]:
                found.append(f"{module} imports {imported} of a layer above")
    return found


def unit_of(module: str, root: str) -> str:
    """The part of a module's name that a layer names: `"rollouts"` of `trl_dataeff.rollouts.group`."""
    return module.removeprefix(root).removeprefix(".").split(".")[0]


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    return imports_of(ROOT)


def test_no_import_cycle(imports):
    assert cycle(imports) == []


def test_imports_go_down(imports):
    assert violations(imports, LAYERS, ROOT) == []


def test_every_layer_has_modules(imports):
    units = {unit_of(module, ROOT) for module in imports}
    assert {unit for layer in LAYERS for unit in layer} == units - {""}
    assert len(imports) > 40


# What the tests above find, shown on packages with planted violations

CLEAN = {
    "top/a.py": "from pkg.middle import a\n",
    "middle.py": "import pkg.left.a\na = 1\n",
    "left/a.py": "",
    "right/b.py": "",
}
PKG_LAYERS = (("top",), ("middle",), ("left", "right"))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes the package `pkg` of these files, and returns its imports."""

    def make(files: dict[str, str]) -> dict[str, set[str]]:
        for name, text in {"__init__.py": "", **files}.items():
            path = tmp_path / "pkg" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for folder in [path for path in (tmp_path / "pkg").rglob("*") if path.is_dir()]:
            (folder / "__init__.py").touch()
        return imports_of("pkg")

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    sys.modules.pop("pkg", None)


def test_a_clean_package_passes(package):
    imports = package({**CLEAN, "__init__.py": "from pkg.top import a\nfrom pkg.right import b\n"})
    assert imports["pkg.top.a"] == {"pkg.middle"}
    assert violations(imports, PKG_LAYERS, "pkg") == []
    assert cycle(imports) == []


TYPE_CHECKING = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pkg.top.a\n"


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("left/a.py", "import pkg.middle", "pkg.left.a imports pkg.middle of a layer above"),
        ("left/a.py", "def f():\n    from pkg.top import a", "pkg.left.a imports pkg.top.a of a layer above"),
        ("right/b.py", TYPE_CHECKING, "pkg.right.b imports pkg.top.a of a layer above"),
        ("left/a.py", "from ..right import b", "pkg.left.a imports pkg.right.b of its own layer"),
        ("middle.py", "from pkg import something", "pkg.middle imports the root package"),
        ("new/deep/c.py", "", "pkg.new.deep.c belongs to no layer: give it one"),
    ],
)
def test_a_planted_violation_is_found(package, name, text, found):
    assert found in violations(package({**CLEAN, name: text}), PKG_LAYERS, "pkg")


@pytest.mark.parametrize("text", ["import pkg.left.a", TYPE_CHECKING.replace("top.a", "left.a")])
def test_a_planted_cycle_within_a_package_is_found(package, text):
    imports = package({**CLEAN, "left/a.py": "def f():\n    import pkg.left.c", "left/c.py": text})
    assert violations(imports, PKG_LAYERS, "pkg") == []
    found = cycle(imports)
    assert found[0] == found[-1]
    assert set(found) == {"pkg.left.a", "pkg.left.c"}

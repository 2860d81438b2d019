"""
The layers of the package (see its docstring): a module imports only from layers below its own, and there is no cycle.

Every import counts: those within functions, and those for type checkers alone.
"""

from __future__ import annotations

import graphlib
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


# What the tests above find, shown on planted violations

CLEAN = {"pkg.top.a": {"pkg.middle"}, "pkg.middle": {"pkg.left.a"}, "pkg.left.a": {"pkg.left.b"}, "pkg.right.b": set()}
PKG_LAYERS = (("top",), ("middle",), ("left", "right"))


def test_a_clean_package_passes():
    imports = {**CLEAN, "pkg": {"pkg.top.a", "pkg.right.b"}}
    assert violations(imports, PKG_LAYERS, "pkg") == []
    assert cycle(imports) == []


@pytest.mark.parametrize(
    ("module", "imported", "found"),
    [
        ("pkg.left.a", "pkg.top.a", "pkg.left.a imports pkg.top.a of a layer above"),
        ("pkg.left.a", "pkg.right.b", "pkg.left.a imports pkg.right.b of its own layer"),
        ("pkg.middle", "pkg", "pkg.middle imports the root package"),
        ("pkg.new.deep.c", "pkg.middle", "pkg.new.deep.c belongs to no layer: give it one"),
    ],
)
def test_a_planted_violation_is_found(module, imported, found):
    assert violations({**CLEAN, module: {imported}}, PKG_LAYERS, "pkg") == [found]


def test_imports_of_functions_and_of_type_checkers_count():
    imports = imports_of(ROOT)
    assert "trl_dataeff.analysis.audit" in imports["trl_dataeff.cli.main"]  # within a function, and for type checkers


def test_a_cycle_within_a_unit_is_found():
    assert set(cycle({**CLEAN, "pkg.left.b": {"pkg.left.a"}})) == {"pkg.left.a", "pkg.left.b"}

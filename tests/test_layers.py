"""The package's layers and names.

A module imports only from layers below its own, also in functions and for type checkers.
"""

import ast
import graphlib
import re
from pathlib import Path

import grimp
import pytest
from grimp import Layer

import trl_dataeff


ROOT = "trl_dataeff"
#: Top to bottom. Units of one layer do not import each other; modules of one unit may, without cycles.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli", "testing"),
    ("analysis",),
    ("trainer",),
    ("callback", "run"),
    ("collector",),
    ("validation",),
    ("selection",),
    ("replay", "tracking"),
    ("difficulty", "checkpoint", "generation", "signals"),
    ("rollouts", "rows", "config", "rewards"),
    ("compact",),
    ("utils", "compat", "math_verifier"),
)


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(ROOT, cache_dir=None)


def test_every_module_belongs_to_a_layer(graph):
    assert {module.removeprefix(f"{ROOT}.") for module in graph.find_children(ROOT)} == {*sum(LAYERS, ())}


def test_imports_go_down(graph):
    layers = [Layer(*units) for units in LAYERS]  # units of a layer are independent
    assert graph.find_illegal_dependencies_for_layers(layers, containers={ROOT}) == set()
    assert graph.find_modules_that_directly_import(ROOT) == set()


def test_the_faster_update_imports_nothing_else_of_the_package(graph):
    """`CompactGRPOTrainer` could be a package of its own."""
    storey = {f"{ROOT}.compact", *graph.find_descendants(f"{ROOT}.compact")}
    assert len(storey) > 5
    imported = set().union(*(graph.find_modules_directly_imported_by(module) for module in storey))
    assert imported - storey == {f"{ROOT}.utils"}
    assert not graph.find_modules_directly_imported_by(f"{ROOT}.utils")


def test_no_import_cycle(graph):
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises a `CycleError` that names the modules


def modules_with(pattern: str) -> set[str]:
    """Units of the package in which an attribute or a text matches."""
    package, users = Path(trl_dataeff.__file__).parent, set()
    for path in package.rglob("*.py"):
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute | ast.Constant)]
        if any(re.fullmatch(pattern, ast.unparse(node)) for node in nodes):
            users.add(path.relative_to(package).parts[0])
    return users


def test_private_names_of_the_trainer_stand_in_the_seam_alone():
    seam = {"compact", "generation", "replay", "trainer.py"}
    assert modules_with(r"(.*\.)?trainer\._[a-z]\w*") <= seam
    # These ask as well whether a subclass has a method of its own, by its name
    assert modules_with(r"'_[a-z]\w*'") <= {*seam, "compat.py", "collector", "validation.py"}


def test_every_public_name_is_there_and_no_other():
    for name in trl_dataeff.__all__:
        assert getattr(trl_dataeff, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        trl_dataeff.nothing  # noqa: B018

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
    ("callback",),
    ("collector",),
    ("validation",),
    ("selection",),
    ("difficulty", "update", "tracking"),
    ("checkpoint", "generation", "signals"),
    ("rollouts", "rewards", "config"),
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


def test_no_import_cycle(graph):
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises a `CycleError` that names the modules


def test_private_names_of_the_trainer_stand_in_the_seam_alone():
    """Read of a trainer, or given as text."""
    package, users = Path(trl_dataeff.__file__).parent, set()
    for path in package.rglob("*.py"):
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute | ast.Constant)]
        if any(re.fullmatch(r"(.*\.)?trainer\._[a-z]\w*|'_[a-z]\w*'", ast.unparse(node)) for node in nodes):
            users.add(str(path.relative_to(package)))
    assert {Path(user).parts[0] for user in users} == {"compat.py", "generation", "trainer.py", "update"}


def test_every_public_name_is_there_and_no_other():
    for name in trl_dataeff.__all__:
        assert getattr(trl_dataeff, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        trl_dataeff.nothing  # noqa: B018

"""
The layers of the package (see its docstring): a module imports only from layers below its own, and there is no cycle.

Every import counts: those within functions, and those for type checkers alone.
"""

from __future__ import annotations

import ast
import graphlib
import inspect
from pathlib import Path

import grimp
import pytest
from grimp import Layer
from trl import GRPOTrainer

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
    ("difficulty", "replay", "tracking"),
    ("checkpoint", "signals"),
    ("rollouts", "rewards", "config"),
    ("utils", "compat"),
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


# Private names of TRL and Transformers

SEAM = {"trainer.py", "rollouts/capture.py", "compat.py"}


def private_names(cls: type) -> set[str]:
    """Names with one underscore of a class: its methods and attributes, and what its methods assign to `self`."""
    names = set(dir(cls))
    for base in cls.__mro__[:-1]:
        if inspect.getmodule(base).__name__.startswith(("trl", "transformers")):
            names |= assigned(ast.parse(inspect.getsource(inspect.getmodule(base))))
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def assigned(tree: ast.AST) -> set[str]:
    """What a module assigns to attributes of `self`, and the functions and fields of its classes."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def private_uses(source: str, private: set[str]) -> set[str]:
    """Private names that a module reads of a trainer, by attribute or by text, or of `self` without defining them."""
    tree = ast.parse(source)
    own, found = assigned(tree), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in private:
            owner = ast.unparse(node.value).split(".")[-1].lstrip("_")
            if owner == "trainer" or (owner == "self" and node.attr not in own):
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in private - own:
            found.add(node.value)
    return found


def test_private_names_of_trl_stand_in_the_seam_alone():
    private, package = private_names(GRPOTrainer), Path(trl_dataeff.__file__).parent
    assert {"_generate", "_step", "_buffered_inputs", "_tr_loss"} <= private
    uses = {str(path.relative_to(package)): private_uses(path.read_text(), private) for path in package.rglob("*.py")}
    assert {"trainer.py", "rollouts/capture.py"} <= {name for name, found in uses.items() if found} <= SEAM
    for planted in ("f(self.trainer._step)", "getattr(x, '_step')", "class A:\n def f(self): return self._step"):
        assert private_uses(planted, private) == {"_step"}
    assert private_uses("class A:\n def f(self):\n  self._step = 1\n  return self._step", private) == set()

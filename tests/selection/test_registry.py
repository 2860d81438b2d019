"""Selectors by name: registered by the decorator or by an entry point, and made with arguments."""

from __future__ import annotations

import sys
import types
from importlib import metadata

import numpy as np
import pytest

from tests.factories import generator
from trl_dataeff import DotsGresoSelector, DotsSelector, GresoSelector, Selector, UniformSelector, register_selector
from trl_dataeff.selection import make_selector, registered_selectors
from trl_dataeff.selection.base import SelectorContext


pytestmark = pytest.mark.usefixtures("registry")
BUILT_IN = {"uniform": UniformSelector, "greso": GresoSelector, "dots": DotsSelector, "dots+greso": DotsGresoSelector}


class First(Selector):
    """The first prompts. Not registered by a decorator."""

    def __init__(self, offset: int = 0, *, step: int = 1):
        self.offset, self.step = offset, step

    def propose(self, n, rng):
        return self.offset + self.step * np.arange(n)


class Other(First):
    """Another class."""


class Abstract(Selector):
    """Lacks `propose`."""


def not_a_selector(**arguments):
    """What a package may offer by mistake: a factory."""
    return First(**arguments)


@pytest.fixture
def offer(monkeypatch):
    """Offers `value` as an entry point called `name`, of the distribution `package`."""
    points: list[metadata.EntryPoint] = []

    def call(name, value, package="their-package", group="trl_dataeff.selectors"):
        points.append(metadata.EntryPoint(name, value, group)._for(types.SimpleNamespace(name=package)))

    monkeypatch.setattr(metadata, "entry_points", lambda **given: metadata.EntryPoints(points).select(**given))
    return call


@pytest.fixture(autouse=True)
def _unnamed():
    yield
    for cls in (First, Other, Abstract):
        if "name" in cls.__dict__:
            del cls.name


def test_the_built_in_selectors():
    assert registered_selectors() == sorted(BUILT_IN)
    for name, cls in BUILT_IN.items():
        assert type(make_selector(name)) is cls
        assert cls.name == name


def test_the_decorator_names_the_class_and_returns_it():
    assert First.name == ""
    assert register_selector("first")(First) is First
    assert First.name == "first"
    assert registered_selectors() == sorted([*BUILT_IN, "first"])
    selector = make_selector("first", {"offset": 3, "step": 2})
    assert type(selector) is First
    assert selector.propose(3, generator()).tolist() == [3, 5, 7]
    assert make_selector("first").offset == make_selector("first", {}).offset == 0


def test_a_selector_that_is_made_is_not_bound():
    assert not hasattr(make_selector("dots"), "context")
    assert make_selector("uniform") is not make_selector("uniform")


@pytest.mark.parametrize("name", [*BUILT_IN, "first"])
def test_a_name_belongs_to_one_class(name):
    register_selector("first")(First)
    register_selector("first")(First)  # again, as by a second import
    before = type(make_selector(name))
    with pytest.raises(
        ValueError,
        match=rf"The name '{name.replace('+', '.')}' belongs to the selector .*{before.__name__} already.*Other",
    ):
        register_selector(name)(Other)
    assert type(make_selector(name)) is before
    assert "name" not in Other.__dict__, "nothing was changed"


@pytest.mark.parametrize(("name", "thing"), [("", First), ("new", dict), ("new", First()), ("new", not_a_selector)])
def test_only_selectors_are_registered(name, thing):
    with pytest.raises(ValueError, match="a selector needs a name and is a subclass of Selector"):
        register_selector(name)(thing)
    assert registered_selectors() == sorted(BUILT_IN)


def test_an_unknown_name_says_which_there_are(offer):
    offer("theirs", "no.such.module:Class")
    with pytest.raises(ValueError, match="grezo") as caught:
        make_selector("grezo")
    message = str(caught.value)
    assert "no selector 'grezo'; known are 'dots', 'dots+greso', 'greso', 'theirs', 'uniform'." in message
    assert "Did you mean 'greso'?" in message
    assert "@register_selector('grezo')" in message
    assert "'trl_dataeff.selectors'" in message
    with pytest.raises(ValueError, match="no selector 'zzz'") as caught:
        make_selector("zzz")
    assert "Did you mean" not in str(caught.value)


def test_wrong_arguments_say_what_the_class_takes():
    register_selector("first")(First)
    with pytest.raises(
        ValueError,
        match=r"selector 'first' cannot be created with the arguments \{'ofset': 3\} \(.*'ofset'.*\)\. First takes: offset, step\.",
    ):
        make_selector("first", {"ofset": 3})
    register_selector("bare")(Other := type("Bare", (Selector,), {"propose": First.propose}))
    with pytest.raises(ValueError, match=r"'bare' cannot be created .*Bare takes: none\."):
        make_selector("bare", {"offset": 3})
    assert make_selector("bare").__class__ is Other
    with pytest.raises(ValueError, match=r"UniformSelector takes: shuffle\."):
        make_selector("uniform", {"shufle": False})
    for name in ("dots", "dots+greso"):
        with pytest.raises(ValueError, match=r"exploraton.* takes: .*exploration"):
            make_selector(name, {"exploraton": 0.1})


def test_a_class_without_propose_cannot_be_made():
    register_selector("abstract")(Abstract)
    with pytest.raises(ValueError, match=r"'abstract' cannot be created .*propose"):
        make_selector("abstract")


def test_an_entry_point_is_imported_when_it_is_asked_for(offer):
    offer("theirs", f"{__name__}:First")
    offer("broken", "no.such.module:Class")
    offer("elsewhere", f"{__name__}:First", group="trl_dataeff.predictors")
    assert registered_selectors() == sorted([*BUILT_IN, "theirs", "broken"])
    assert First.name == ""
    assert make_selector("theirs", {"offset": 2}).offset == 2
    assert First.name == "theirs"
    assert type(make_selector("theirs")) is First


def test_an_entry_point_whose_module_registers_it(offer, monkeypatch):
    module = types.ModuleType("their_module")
    module.__getattr__ = lambda name: register_selector("theirs")(First)
    monkeypatch.setitem(sys.modules, "their_module", module)
    offer("theirs", "their_module:First")
    assert type(make_selector("theirs")) is First
    offer("alias", "their_module:First")
    with pytest.raises(ValueError, match=r"'alias' of their-package .* registered as 'theirs' in its own code"):
        make_selector("alias")


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_entry_point_cannot_replace_a_registered_selector(offer, name):
    offer(name, f"{__name__}:First")
    assert type(make_selector(name)) is BUILT_IN[name]
    assert registered_selectors() == sorted(BUILT_IN)


def test_entry_points_that_fail_name_their_package(offer):
    offer("missing", "no.such.module:Class")
    with pytest.raises(
        ValueError, match=r"'missing' of their-package \(entry point 'no\.such\.module:Class'.*ModuleNot"
    ):
        make_selector("missing")
    offer("factory", f"{__name__}:not_a_selector")
    with pytest.raises(ValueError, match=r"'factory' of their-package .* not a subclass of Selector"):
        make_selector("factory")
    offer("instance", f"{__name__}:BUILT_IN")
    with pytest.raises(ValueError, match=r"'instance' of their-package .* not a subclass of Selector"):
        make_selector("instance")
    offer("twice", f"{__name__}:First", "one-package")
    offer("twice", f"{__name__}:Other", "another-package")
    with pytest.raises(ValueError, match=r"Several installed packages .*'twice'.*one-package.*another-package"):
        make_selector("twice")


class TestContext:
    def test_embeddings_are_made_once_at_the_first_call(self):
        calls = []
        context = SelectorContext(3, 2, 4, embed=lambda: calls.append(1) or np.ones((3, 5)))
        assert not calls
        assert context.embeddings() is context.embeddings()
        assert len(calls) == 1

    def test_without_a_way_to_embed_it_says_so(self):
        with pytest.raises(ValueError, match="has no embeddings of its prompts"):
            SelectorContext(3, 2, 4).embeddings()

    def test_defaults_of_the_contract(self):
        """A selector that implements `propose` and no more."""
        selector = First()
        context = SelectorContext(9, 2, 4)
        selector.bind(context)
        assert selector.context is context
        assert np.isnan(selector.predict(np.arange(3))).all()
        assert selector.predict(np.arange(3)).dtype == np.float32
        assert (selector.exact, selector.uses_references) == (False, False)
        assert selector.roll_out_references(lambda ids: pytest.fail("nothing is generated"), generator()) is None
        assert selector.observe([]) is None
        assert selector.state_dict() == selector.metrics() == {}
        assert selector.load_state_dict({}) is None

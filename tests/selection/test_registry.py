"""Selectors by name or dotted path, what all of them have in common, and uniform selection, against TRL's sampler."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import RepeatSampler

from tests.factories.groups import generator
from trl_dataeff import DotsSelector, GresoSelector, PaperDotsSelector, Selector, UniformSelector, register_selector
from trl_dataeff.selection import make_selector
from trl_dataeff.selection.base import SelectorContext


BUILT_IN = {"uniform": UniformSelector, "greso": GresoSelector, "dots": DotsSelector, "dots_paper": PaperDotsSelector}


@register_selector("first_prompts")
class First(Selector):
    def __init__(self, offset: int = 0, *, step: int = 1):
        self.offset = offset
        self.step = step

    def propose(self, n, rng):
        return self.offset + self.step * np.arange(n)


@pytest.mark.parametrize("name", ["first_prompts", f"{__name__}.First"])
def test_a_selector_of_ones_own_is_found_by_its_name_or_its_dotted_path(name):
    assert First.name == "first_prompts"
    selector = make_selector(name, {"offset": 3, "step": 2})
    assert selector.propose(3, generator()).tolist() == [3, 5, 7]
    assert make_selector(name).offset == 0


@pytest.mark.parametrize("name", [*BUILT_IN, "first_prompts"])
def test_a_name_belongs_to_one_class(name):
    assert register_selector("first_prompts")(First) is First  # again, as by a second import
    before = type(make_selector(name))
    with pytest.raises(ValueError, match="dict"):
        register_selector("new")(dict)
    with pytest.raises(ValueError, match=before.__name__):
        register_selector(name)(type("Other", (First,), {}))
    assert type(make_selector(name)) is before


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("grezo", {}, "`greso`"),
        ("DOTS", {}, "`dots`"),
        (f"{__name__}.Missing", {}, r"test_registry\.Missing"),
        ("json.dumps", {}, "`trl_dataeff.Selector`"),
        (f"{__name__}.First", {"ofset": 3}, "`offset`"),
        ("uniform", {"shufle": False}, "shuffle"),
    ],
)
def test_wrong_names_and_arguments(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_selector(name, arguments)


def test_embeddings_are_made_once_at_the_first_call():
    calls = []

    def embed():
        calls.append("embed")
        return np.ones((3, 5))

    context = SelectorContext(3, 2, 4, embed=embed)
    assert not calls
    assert context.embeddings() is context.embeddings()
    assert len(calls) == 1
    with pytest.raises(ValueError, match="`embed`"):
        SelectorContext(3, 2, 4).embeddings()


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_prompt_keeps_its_chance_and_impossible_requests_are_refused(name):
    selector = make_selector(name)
    rng = generator()
    embeddings = np.eye(11, dtype=np.float16)
    selector.bind(SelectorContext(11, 4, group_size=2, embed=lambda: embeddings))
    assert type(selector) is BUILT_IN[name]
    seen = set()
    for _ in range(400):
        seen |= set(selector.propose(4, rng).tolist())
    assert seen == set(range(11))
    for n in (0, 12, -1):
        with pytest.raises(ValueError, match=rf"{n} .*\b11\b"):
            selector.propose(n, rng)


def uniform(size: int, batch: int, shuffle: bool = True) -> UniformSelector:
    selector = UniformSelector(shuffle=shuffle)
    selector.bind(SelectorContext(size, batch, group_size=4))
    return selector


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("size", "batch"), [(24, 8), (7, 2), (8, 8), (5, 1)])
def test_uniform_takes_prompts_in_the_order_of_trls_sampler(size, batch, shuffle):
    sampler = RepeatSampler(range(size), mini_repeat_count=1, batch_size=batch, shuffle=shuffle, seed=11)
    selector = uniform(size, batch, shuffle)
    rng = generator(11)
    for _ in range(3):  # passes
        order = list(sampler)
        for start in range(0, size // batch * batch, batch):
            assert selector.propose(batch, rng).tolist() == order[start : start + batch]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30))
def test_a_pass_offers_each_of_its_prompts_once_whatever_the_sizes(sizes):
    """12 prompts in passes of 12: a proposal that spans two passes repeats none, so visits differ by at most two."""
    selector = uniform(12, 3)
    rng = generator()
    visits = np.zeros(12, dtype=int)
    for n in sizes:
        visits[selector.propose(n, rng)] += 1
        assert visits.max() - visits.min() <= 2


def test_a_batch_larger_than_the_dataset_is_refused():
    with pytest.raises(ValueError, match=r"\b8\b.*\b5\b"):
        uniform(5, 8)

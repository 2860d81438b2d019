"""The benchmark on a pretrained model: its questions, its tables, and that a study goes on where it stopped."""

import json
import math

import pytest

from benchmarks.lab.runs import run_all
from benchmarks.lab.store import RunFile
from benchmarks.smollm2 import ends
from benchmarks.smollm2.pools import HELD_OUT_OF_A_KIND, POOLS, held_out, training_questions
from benchmarks.smollm2.questions import LEARNABLE, UNSOLVABLE
from benchmarks.smollm2.report import tables
from benchmarks.smollm2.train import Spec


@pytest.fixture(autouse=True)
def _questions_can_be_made():
    pytest.importorskip("reasoning_gym")


@pytest.mark.parametrize(("name", "unsolvable"), [("mixed", 128), ("unsolvable", 269), ("learnable", 0)])
def test_pools_have_their_shares_and_nothing_of_what_is_measured_with(name, unsolvable):
    asked = training_questions(POOLS[name], 3)
    prompts = {q.prompt for q in asked}
    assert len(prompts) == len(asked) == 384
    assert sum(q.kind in UNSOLVABLE for q in asked) == unsolvable
    counts = [sum(q.kind == kind for q in asked) for kind in LEARNABLE]
    assert max(counts) - min(counts) <= 1
    assert not prompts & {q.prompt for q in held_out()}
    assert training_questions(POOLS[name], 3) == asked
    assert len(prompts & {q.prompt for q in training_questions(POOLS[name], 4)}) < 0.5 * len(prompts)


def test_answers_are_right():
    assert len(held_out()) == HELD_OUT_OF_A_KIND * len(LEARNABLE)
    for question in [*held_out(), *training_questions(POOLS["mixed"], 0)]:
        asked, answer = question.prompt.splitlines()[-1], question.answer.strip()
        numbers = [int(word.strip("?")) for word in asked.split() if word.strip("?").isdigit()]
        if question.kind in ("products", "large_products"):
            assert math.prod(numbers) == int(answer)
        if question.kind in ("largest", "smallest", "gcd"):
            functions = {"largest": max, "smallest": min, "gcd": lambda n: math.gcd(*n)}
            assert functions[question.kind](numbers) == int(answer)
        if question.kind == "second":
            assert str(numbers[1]) == answer
        if question.kind == "letters":
            letter, word = asked.split('"')[1::2]
            assert word.count(letter) == int(answer)
        if question.kind == "backwards":
            assert asked.split('"')[1][::-1] == answer


def rows(method: str, seed: int, points: list[tuple[int, float, float]], **measured) -> list[dict]:
    """Evaluations (rollouts, success of kind a, of kind b) of one run."""
    return [
        {
            "run": f"{method}-{seed}",
            "method": method,
            "seed": seed,
            "pool": "mixed",
            "learning_rate": 1e-3,
            "step": n // 64,
            "rollouts": n,
            "cpu_s": n / 2,
            "wall_s": n,
            "accuracy_sampled": (a + b) / 2,
            "accuracy_greedy": a,
            "accuracy_by_kind": {"a": a, "b": b},
            "groups": 8,
            "effective_groups": 4,
            **measured,
        }
        for n, a, b in points
    ]


def test_the_table_by_hand():
    """
    Uniform is at 0.3 after 256 rollouts and ends at 0.5 after 512; the other is at 0.3 after 128 and at 0.5 after 256, in all
    and in kind a, and is behind in b.
    """
    uniform = rows("uniform", 0, [(0, 0.1, 0.1), (256, 0.3, 0.3), (512, 0.5, 0.5)], entropy=0.5)
    other = rows("default", 0, [(0, 0.1, 0.1), (256, 0.8, 0.2), (512, 0.8, 0.2)], prediction_error=0.25)
    text = tables([*uniform, *other])
    line = next(line for line in text.splitlines() if line.startswith("| `default`"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    # Success after half of the rollouts, and rollouts to what uniform has after half of its steps, and at its end
    assert cells[1:7] == ["1", "0.100 -> 0.500", "0.500", "0.50", "0.50", "0.50"]
    assert cells[7] == "-", "one seed has no interval"
    assert cells[11] == "-0.200"  # in b, from 0.2 - 0.3 at 256 rollouts to 0.2 - 0.5 at 512
    measured = [line for line in text.splitlines() if line.startswith("| `default`")][-1]
    assert "0.25" in measured
    assert measured.count(" - ") >= 3, "what was not measured is printed as undefined"


def write_run(folder, name, method, seed, end, success, *, finished=True, **columns):
    file = RunFile(folder, name)
    file.begin()
    for row in rows(
        method, seed, [(0, 0.1, 0.1), (end, success, success)], cpu_s=7.0, entropy_held_out=0.25, **columns
    ):
        file.append(row)
    if finished:
        file.end()


def cells_of(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_runs_whose_rate_falls_are_compared_at_their_ends(tmp_path):
    """Of a method, runs of 256 rollouts and of 512, or at another rate, are two lines; a run that is not finished is none."""
    write_run(tmp_path, "a", "uniform", 1, 512, 0.3)
    write_run(tmp_path, "b", "uniform", 0, 512, 0.5)
    write_run(tmp_path, "c", "default", 0, 256 + 40, 0.4)
    write_run(tmp_path, "d", "default", 1, 640, 0.9, finished=False)
    write_run(tmp_path, "e", "uniform", 0, 512, 0.6, learning_rate=2e-3)
    cells = cells_of(ends.by_budget(tmp_path))
    assert [line[1:7] for line in cells] == [
        ["`uniform`", "0.001", "512", "2", "0.400", "0.500, 0.300"],
        ["`uniform`", "0.002", "512", "1", "0.600", "0.600"],
        ["`default`", "0.001", "256", "1", "0.400", "0.400"],
    ]
    assert all(line[-2:] == ["0.25", "7"] for line in cells)
    assert cells_of(ends.by_kind(tmp_path))[0] == ["mixed", "`uniform`", "0.001", "512", "0.40", "0.40"]
    assert [line[:5] for line in cells_of(ends.by_rate(tmp_path))] == [line[1:3] + line[4:7] for line in cells]
    assert cells_of(ends.in_short(tmp_path)) == [[*line[:6], "7"] for line in cells[1:]], "each at its own rate"


def fake_run(spec, weights, sink):
    sink({"method": spec.method, "seed": spec.seed, "step": 0, "rollouts": 0, "accuracy_sampled": 0, "accuracy_greedy": 0,
          "groups": 0, "effective_groups": 0, "calls": 1})  # fmt: skip


def test_a_study_goes_on_where_it_stopped(tmp_path):
    specs = [Spec("uniform", seed, "mixed") for seed in range(3)]
    unfinished = RunFile(tmp_path, specs[1].name)
    unfinished.begin()
    unfinished.append({"rollouts": 7})
    finished = RunFile(tmp_path, specs[0].name)
    finished.begin()
    finished.append({"rollouts": 5})
    finished.end()
    made = run_all(specs, tmp_path, tmp_path, workers=1, train=fake_run)
    assert [row["rollouts"] for row in made] == [5, 0, 0]
    assert json.loads(unfinished.path.read_text().splitlines()[-1]) == {"done": True}

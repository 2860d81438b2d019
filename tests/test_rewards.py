"""Rewards for answers that can be checked, against answers judged by hand."""

import threading
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_dataeff.rewards import (
    Number,
    answer_number,
    completion_text,
    exact_answer_reward,
    marked_answer,
    math_verify_reward,
    numeric_answer_reward,
    single_number,
)


def chat(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{1} no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{open", None),
        ("<answer> Paris </answer> bye", "Paris"),
        ("#### 7\nthen #### 8 apples\nmore", "8 apples"),
    ],
)
def test_marked_answer(text, expected):
    assert marked_answer(text) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("text", "text"),
        (chat([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), "ab"),
        ([*chat(None), {"role": "tool", "content": "13"}, *chat("so 14")], "so 14"),
        (chat(None), ""),
        ([], ""),
    ],
)
def test_text_of_a_completion(completion, expected):
    assert completion_text(completion) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("costs $1,200.50.", Fraction(120050, 100)),
        ("a loss of -$5", -5),
        ("10-7", 7),
        ("it is −8 degrees", -8),  # noqa: RUF001
        ("-3 / 4 of a cup", Fraction(-3, 4)),
        ("1 3/4 cups", Fraction(7, 4)),
        (r"-1\tfrac{1}{2}", Fraction(-3, 2)),
        (r"1{,}000", 1000),
        ("1e-3", Fraction(1, 1000)),
        (r"\boxed{\$5}", 5),
        (r"\boxed{60^{\circ}}", 60),
        (r"\boxed{\textbf{18}}", 18),
        (r"\boxed{48\,\text{cm}^2}", 48),
        (r"\boxed{9.8\ \mathrm{m/s^2}}", Fraction(98, 10)),
        ("#### 2. Conclusion\nIt is 5.", 5),
        ("<answer>**60**</answer>", 60),
        ("#### 60 km/h", 60),
        ("3 2 1\n#### \\$1,000\nAsk 2 more!", 1000),
        ("#### Step 2: double\n2*7\nThe answer is 14.", 14),  # a heading
        (r"\boxed{10,\!000}", 10000),
        (r"\boxed{2\sqrt{3}}", None),
        (r"\boxed{(1, 2)}", None),
        (r"\boxed{2^{60}}", None),
        ("1/0", None),
        ("9" * 5000, None),
    ],
)
def test_number_of_a_completion(text, value):
    number = answer_number(text)
    assert (None if number is None else number.value) == value


COMPARED = {
    numeric_answer_reward: [
        ("1234567", "1234568", 0.0),  # whole numbers are equal or not
        ("0.667", "2/3", 1.0),
        ("50.01", "50", 0.0),
        ("12345", "12345.67", 0.0),  # near, but more than a cent off
        ("0.0004", "0", 0.0),
        ("75%", "0.75", 1.0),
        (r"75\%", "3/4", 1.0),
        ("25%", "0.25%", 0.0),  # two percentages are compared as such
        ("7500%", "0.75", 0.0),
        ("<think>1 or 2?</think>\nI do not know", "2", 0.0),  # reasoning is no answer
        ("<think>3</think>4</think> 5 of them", "5", 1.0),
    ],
    exact_answer_reward: [
        (r"<think>maybe \boxed{1}</think> It is 2", "it is 2", 1.0),
        ('"new   york"', "New York", 1.0),
        ("I think Paris", "Paris", 0.0),
        (r"It is \boxed{\text{Paris}}", "Paris", 1.0),
        ("42", "<think>7?</think>so 42\n#### 42", 1.0),
        ("ﬁne", "fine", 1.0),
        ("?", "?", 1.0),
    ],
    math_verify_reward: [
        (r"\boxed{\frac{2}{6}}", r"\frac{1}{3}", 1.0),
        (r"It is $\frac13$.", "1/3", 1.0),
        (r"\boxed{\sqrt{12}}", r"$2\sqrt{3}$", 1.0),
        ("so 24", "48/2=24\n#### 24", 1.0),
        (r"\boxed{x^2+1}", r"\boxed{1+x^2}", 1.0),
        (r"<think>\boxed{34}</think> \boxed{35}", "34", 0.0),
        (r"\boxed{3}. No: \boxed{xyz}", "$xyz$", 1.0),
        ("<answer>**3**</answer> (not 4)", "3", 1.0),
        ("#### 60 km/h", "60", 1.0),
        (r"\boxed{\text{odd}}", r"\text{odd}", 1.0),
        (r"$\begin{pmatrix}1\\2\end{pmatrix}$", r"\begin{pmatrix}1\\2\end{pmatrix}", 1.0),
        ("34", "hello there", None),
    ],
}


@pytest.mark.parametrize(
    ("reward", "completion", "gold", "expected"), [(reward, *row) for reward, rows in COMPARED.items() for row in rows]
)
def test_answers_are_compared(reward, completion, gold, expected):
    assert reward([completion], answer=[gold]) == [expected]


@given(numerator=st.integers(-(10**9), 10**9), denominator=st.integers(1, 10**6))
def test_every_spelling_of_a_fraction_is_that_number(numerator, denominator):
    value = Fraction(numerator, denominator)
    sign = "-" if numerator < 0 else ""
    spellings = [
        f"{numerator}/{denominator}",
        rf"{sign}\frac{{{abs(numerator)}}}{{{denominator}}}",
        rf"$\dfrac{{{numerator}}}{{{denominator}}}$",
    ]
    for spelling in spellings:
        assert single_number(spelling) == Number(value)
        assert answer_number(f"Thus 17 gives {spelling}.") == Number(value)
        assert answer_number(rf"1 \boxed{{{spelling}}} 2") == Number(value)


@given(text=st.text())
def test_any_text_is_scored(text):
    assert numeric_answer_reward([text, chat(text)], answer=["3", "3"])[0] in (0.0, 1.0)
    assert exact_answer_reward([text], answer=["3"])[0] in (0.0, 1.0)
    assert numeric_answer_reward(["3"], answer=[text])[0] in (0.0, 1.0, None)


def test_math_verify_works_outside_of_the_main_thread():
    """Where signals, which stop a parse that takes too long, are not allowed."""
    result = []
    thread = threading.Thread(target=lambda: result.extend(math_verify_reward(["34", "35"], answer=["34", "34"])))
    thread.start()
    thread.join()
    assert result == [1.0, 0.0]


@pytest.mark.parametrize("reward", COMPARED)
def test_answer_comes_before_solution_row_by_row(reward):
    scores = reward(completions=["1", "2", "3", "4"], answer=["1", None, "", None], solution=["9", "2", "3", None])
    assert scores == [1.0, 1.0, 1.0, None]
    assert reward(completions=["5"], solution=["5"]) == [1.0]
    scores = reward(completions=["7", "8"], prompts=["a", "b"], answer=[7, 7], level=["x", "y"], trainer_state=None)
    assert scores == [1.0, 0.0]
    with pytest.raises(ValueError, match="neither `answer` nor `solution`"):
        reward(completions=["1"])

"""Rewards for answers that can be checked, against answers judged by hand."""

import os
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_dataeff import rewards
from trl_dataeff.math_verifier import MathVerifier
from trl_dataeff.rewards import (
    answer_number,
    completion_text,
    exact_answer_reward,
    marked_answer,
    math_verify_reward,
    numeric_answer_reward,
    single_number,
)


SLOW = r"\boxed{10^{10^{10}}}"


def chat(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{1} no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{open", None),
        (r"\boxed{1} and \boxed{open", "1"),
        (r"\boxed{1 \boxed{2} 3}", "2"),
        (r"} \boxed{{3}} }", "{3}"),
        (r"\fbox {\{4\}} {", r"\{4\}"),
        (r"\boxed{[0, 1\}}", r"[0, 1\}"),  # an escaped brace has no partner
        ("<answer> Paris </answer> bye", "Paris"),
        ("<ANSWER>1</answer> or <answer>2</Answer> or <answer>3", "2"),
        ("#### 7\nthen #### 8 apples\nmore", "8 apples"),
        ("#### 7\n#### Paris\n ", "Paris"),
        ("#### 7\n#### Paris\nmore", "7"),  # a heading
        ("##### 7", None),
        ("####\n", None),
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
        ("on 1/2/2000", 2000),
        ("1/2.5", Fraction(5, 2)),
        ("1e-3", Fraction(1, 1000)),
        (".5", Fraction(1, 2)),
        ("12345,678", 678),  # not a group of thousands
        (r"1{,}000", 1000),
        (r"\boxed{1\,000}", 1000),
        (r"\boxed{10,\!000}", 10000),
        (r"\boxed{1\!000\!000}", 10**6),
        (r"\boxed{\$5}", 5),
        (r"\boxed{$-5$}", -5),
        (r"\boxed{75\%}", 75),
        (r"\boxed{\textbf{18}}", 18),
        (r"\boxed{18 \, \text{dollars}}", 18),
        (r"\boxed{x = -\tfrac{1}{2}}", Fraction(-1, 2)),
        ("#### 2. Conclusion\nIt is 5.", 5),
        ("<answer>**60**</answer>", 60),
        ("#### 60 km/h", 60),
        ("3 2 1\n#### \\$1,000\nAsk 2 more!", 1000),
        ("#### Step 2: double\n2*7\nThe answer is 14.", 14),  # a heading
        (r"<answer>\(5\)</answer>", 5),
        (r"#### \[5\]", 5),
        (r"\boxed{\left(-5\right)}", -5),
        (r"\boxed{\displaystyle 5\quad}", 5),
        (r"\boxed{\mbox{5 cm}}", 5),
        (r"\boxed{x \approx 5}", 5),
        (r"\boxed{- 5}", -5),
        (r"\boxed{x = -5}", -5),
        (r"\boxed{f(2, 3) = 5}", 5),
        (r"\boxed{x = 2 \text{ or } x = 3}", None),
        (r"\boxed{x = 2, y = 3}", None),
        ("#### x=2; x=3", None),
        ("#### x = 5;", 5),
        ("#### x = 5, the total", 5),
        ("#### x = 2 or 3", None),
        ("#### 2 + 1,000 = 1,002", 1002),
        (r"\boxed{2\,3}", None),
        (r"\boxed{2\sqrt{3}}", None),
        (r"\boxed{(1, 2)}", None),
        (r"\boxed{(1,\,200)}", None),  # a list, where `1,\!200` is a number
        (r"\boxed{2^{60}}", None),
        (r"\boxed{3/x}", None),
        (r"\boxed{1/2.5}", None),
        (r"\boxed{1/2/3}", None),
        (r"\boxed{60^{\circ}}", None),
        (r"\boxed{48\,\text{cm}^2}", None),
        ("1 3/4 cups", None),  # neither 1 nor 3/4
        (r"\boxed{1\frac{3}{4}}", None),
        ("1/0", None),
        ("9" * 5000, None),
    ],
)
def test_number_of_a_completion(text, value):
    assert answer_number(text) == value


COMPARED = {
    numeric_answer_reward: [
        ("1234567", "1234568", 0.0),
        ("0.5", "1/2", 1.0),
        ("1,000", "1000.0", 1.0),
        ("0.333", "1/3", 0.0),
        ("0.667", "2/3", 0.0),
        ("0.3333333333333333", "1/3", 0.0),
        ("0.1", 0.1, 1.0),
        ("0.00001", 1e-05, 1.0),
        ("50.01", "50", 0.0),
        ("-0", "0", 1.0),
        ("75%", "75", 1.0),
        ("75%", "0.75", 0.0),
        (r"\$12.50", r"#### 12.5 dollars", 1.0),
        (r"\boxed{1\,000}", "1000", 1.0),
        ("3", "three", None),
        ("3", "3 or 4", None),
        ("nan", float("nan"), None),
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
        (".5", "5", 0.0),
        (".5.", ".5", 1.0),
        ("(A)", "a", 1.0),
        ("[1, 2)", "(1, 2]", 0.0),
        ("nan", float("nan"), None),
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
        ("#### 60 apples", "60", 1.0),
        (r"\boxed{1\frac{3}{4}}", "7/4", 1.0),
        (r"\boxed{60^{\circ}}", "60", 1.0),
        (r"\boxed{48\,\text{cm}^2}", "48", 1.0),
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
        assert single_number(spelling) == value
        assert answer_number(f"Thus 17 gives {spelling}.") == value
        assert answer_number(rf"1 \boxed{{{spelling}}} 2") == value


@given(
    number=st.decimals(-(10**12), 10**12, places=2),
    separator=st.sampled_from([",", "{,}", r"\,", r"\!", r",\!", ""]),
    around=st.sampled_from(
        ["{}", "${}$", r"\boxed{{{}}}", "#### {}", "<answer>{}</answer>", r"\boxed{{{}\%}}", "**{}**"]
    ),
)
def test_every_spelling_of_a_decimal_is_that_number(number, separator, around):
    spelling = around.format(f"{number:,}".replace(",", separator))
    assert answer_number(spelling) == Fraction(number)
    assert numeric_answer_reward([spelling] * 2, answer=[str(number), str(number + Decimal("0.01"))]) == [1.0, 0.0]


@given(text=st.text())
def test_any_text_is_scored(text):
    assert numeric_answer_reward([text, chat(text)], answer=["3", "3"])[0] in (0.0, 1.0)
    assert exact_answer_reward([text], answer=["3"])[0] in (0.0, 1.0)
    assert numeric_answer_reward(["3"], answer=[text])[0] in (0.0, 1.0, None)


HOSTILE = {
    "boxes": r"\boxed{",
    "closed boxes": r"\boxed{1}",
    "braces": "{",
    "fractions": "1/",
    "digits": "7",
    "groups": "1,000",
    "spaced numbers": "1 ",
    "spaces": " ",
    "tags": "<answer>",
    "closing tags": "</answer>",
    "hashes": "####",
    "headings": "#### 1. a\n",
    "text": r"\text{",
    "commands": r"\text ",
    "LaTeX fractions": r"\frac{1",
    "accents": "\u0301\u0316",
    "dollars": "$ ",
    "signs": "-",
}


@pytest.mark.parametrize("reward", [exact_answer_reward, numeric_answer_reward])
@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE)
def test_time_is_linear_in_the_length(reward, unit):
    """A loop of 200,000 characters takes less than a second; in quadratic time it would take minutes."""
    loop = unit * (200_000 // len(unit))
    start = time.monotonic()
    reward([loop, rf"\boxed{{{loop}}}", loop + "}" * 100_000], answer=["3", "3", "3"])
    reward(["3"], answer=[loop])
    assert time.monotonic() - start < 10


def test_math_verify_stops_a_slow_completion_outside_of_the_main_thread(monkeypatch):
    """Where math-verify cannot limit its own time, here even with its signal blocked. The next one is compared."""
    monkeypatch.setattr(rewards, "MAX_SECONDS_PER_COMPLETION", 0.5)
    monkeypatch.setattr(rewards, "_math_verifier", MathVerifier())
    scores = []

    def score():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        scores.extend(math_verify_reward([SLOW, "34", SLOW, "35"], answer=["34", "34", "34", "34"]))

    start = time.monotonic()
    thread = threading.Thread(target=score, daemon=True)
    thread.start()
    with pytest.warns(RuntimeWarning, match=r"limit: 0\.5 seconds"):
        thread.join(20)
    assert scores == [0.0, 1.0, 0.0, 0.0]
    assert time.monotonic() - start < 20


def test_math_verify_limits_a_batch(monkeypatch):
    """Of slow completions. Those that are left get no score, because they may be right."""
    monkeypatch.setattr(rewards, "MAX_SECONDS_PER_COMPLETION", 60.0)
    monkeypatch.setattr(rewards, "SECONDS_PER_BATCH", 2.0)
    monkeypatch.setattr(rewards, "MEAN_SECONDS_PER_COMPLETION", 0.001)
    start = time.monotonic()
    with pytest.warns(RuntimeWarning, match="get no score"):
        scores = math_verify_reward(["34", *[SLOW] * 20, "34"], answer=["34"] * 22)
    assert scores == [1.0] + [None] * 21
    assert time.monotonic() - start < 20


def test_a_process_that_ends_is_replaced():
    """Unnoticed between two comparisons; as a comparison that took too long within one."""
    verifier = MathVerifier()
    assert verifier.compare("$1$", "$1$", 1.0) == 1.0
    ended = verifier._process
    time.sleep(1.2)
    assert ended.poll() is None  # the time limit of a comparison ends with it
    ended.kill()
    ended.wait()
    assert verifier.compare("$1$", "$1$", 10.0) == 1.0
    killer = threading.Timer(0.5, os.kill, [verifier._process.pid, signal.SIGTERM])
    killer.start()
    with pytest.raises(TimeoutError):
        verifier.compare("$10^{10^{10}}$", "$1$", 30.0)
    assert verifier.compare("$2$", "$1$", 10.0) == 0.0
    last = verifier._process
    verifier.close()
    assert last.poll() is not None


def test_a_reply_that_nobody_waited_for_is_not_taken_for_the_next_one(monkeypatch):
    """After Ctrl-C in a notebook, where the process goes on."""
    verifier = MathVerifier()
    verifier.compare("$1$", "$1$", 10.0)
    with monkeypatch.context() as patch:
        patch.setattr("trl_dataeff.math_verifier._reply_of", interrupt)
        with pytest.raises(KeyboardInterrupt):
            verifier.compare("$1$", "$1$", 10.0)
    assert verifier.compare("$2$", "$1$", 10.0) == 0.0
    verifier.close()


def interrupt(process):
    raise KeyboardInterrupt


def test_a_process_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="cannot be started"):
        MathVerifier().compare("$1$", "$1$", 10.0)


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
print("script runs", flush=True)
import os, signal, threading
from trl_dataeff import rewards
assert rewards.math_verify_reward(["34"], answer=["34"]) == [1.0]
assert "torch" not in sys.modules and "math_verify" not in sys.modules
"""
FORK = """
child = os.fork()
scores = rewards.math_verify_reward(["35", "34"] * 100, answer=["34"] * 200)  # both at the same time
assert scores == [0.0, 1.0] * 100
if child:
    assert os.waitpid(child, 0)[1] == 0
    assert rewards.math_verify_reward(["34"], answer=["34"]) == [1.0]
"""
KILLED_WHILE_IT_COMPARES = f"""
threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGKILL]).start()
rewards.math_verify_reward([{SLOW!r}], answer=["34"])
"""


@pytest.mark.parametrize(
    ("more", "code"),
    [("", 0), (FORK, 0), (KILLED_WHILE_IT_COMPARES, -signal.SIGKILL)],
    ids=["ends", "forks", "is killed"],
)
def test_a_script_without_a_main_guard_runs_once_and_leaves_no_process(tmp_path, more, code):
    """Whatever is in its folder. A process that were left would keep stderr open, for which `subprocess.run` waits."""
    root = os.path.dirname(os.path.dirname(rewards.__file__))
    (tmp_path / "train.py").write_text(SCRIPT.format(root=root) + more)
    (tmp_path / "json.py").write_text("raise RuntimeError('a file of the folder, not of Python')")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "-W", "always::ResourceWarning", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert done.stdout == "script runs\n"
    if more == "":
        assert done.stderr == ""  # no warning of a process that was left


def test_math_verify_without_the_library_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match="pip install math-verify"):
        math_verify_reward(["1"], answer=["1"])


def test_math_verify_reads_any_characters():
    assert math_verify_reward(["\ud800 \n\r\u2028 34", "34\n"], answer=["34", "34"]) == [1.0, 1.0]


@pytest.mark.parametrize("reward", COMPARED)
def test_answer_comes_before_solution_row_by_row(reward):
    scores = reward(completions=["1", "2", "3", "4"], answer=["1", None, "", None], solution=["9", "2", "3", None])
    assert scores == [1.0, 1.0, 1.0, None]
    assert reward(completions=["5"], solution=["5"]) == [1.0]
    scores = reward(completions=["7", "8"], prompts=["a", "b"], answer=[7, 7], level=["x", "y"], trainer_state=None)
    assert scores == [1.0, 0.0]
    with pytest.raises(ValueError, match="neither `answer` nor `solution`"):
        reward(completions=["1"])

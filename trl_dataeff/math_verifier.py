"""
Comparison of mathematical answers by math-verify, in a process of its own that can be ended at any time.

math-verify builds on sympy, which may take hours for a short text such as `10^{10^{10}}`. Its own time limit is a
signal handler in Python, which only the main thread can use, and holds for each step of a comparison. Here the
operating system ends the process when the time is over, and the next comparison starts another process.

This file has both ends: [`MathVerifier`], and what its process runs, which is this file as a script. The script
imports math-verify and the standard library: neither the package, nor torch, nor the user's training script.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from typing import Any


class MathVerifier:
    """
    Compares answers by math-verify, in a process that is started at the first comparison and kept.

    One comparison runs at a time, whichever thread asks. The process ends with this one, even if this one is killed.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)

    def compare(self, text: str, gold: str, seconds: float) -> float | None:
        """
        Compare the answer in a text with the gold answer.

        Args:
            text (`str`):
                Text with the answer, as math-verify reads it.
            gold (`str`):
                Gold answer, as math-verify reads it.
            seconds (`float`):
                Time limit, above 0. The start of the process does not count. Windows has no such limit.

        Returns:
            `float`, *optional*: 1.0 if the answers are equal, 0.0 if not, `None` if the gold answer cannot be parsed.

        Raises:
            `TimeoutError`: the comparison took longer than `seconds`, or crashed.
            `RuntimeError`: the process cannot be started.
        """
        request = json.dumps({"text": text, "gold": gold, "seconds": seconds})
        with self._lock:
            process = self._running_process()
            reply = ""
            try:
                reply = _ask(process, request)
            finally:
                if not reply:  # also after Ctrl-C: its reply would be taken for that to the next request
                    _kill(process)
        if not reply:
            raise TimeoutError(f"math-verify took longer than {seconds:g} seconds, or crashed.")
        score: float | None = json.loads(reply)
        return score

    def close(self) -> None:
        """Kill the process, if there is one. In a fork this leaves the process of the parent alone."""
        if self._process is not None:
            _kill(self._process)
            self._process = None

    def _running_process(self) -> subprocess.Popen[str]:
        # After a fork, `poll` says of the process of the parent that it has ended, too
        if self._process is None or self._process.poll() is not None:
            self._process = _start()
        return self._process


def _start() -> subprocess.Popen[str]:
    """Start a process that runs this file, and wait until it is ready for requests."""
    # The process finds math-verify where this one would. `-P` keeps the folder of this file out of the path, whose
    # modules have common names
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        encoding="utf-8",
    )
    if not _reply_of(process):
        _kill(process)
        raise RuntimeError("The process for math-verify cannot be started. Its error is on stderr, above.")
    return process


def _ask(process: subprocess.Popen[str], request: str) -> str:
    """Return the reply to a request; empty if the process has ended."""
    assert process.stdin is not None
    try:
        process.stdin.write(request + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return _reply_of(process)


def _reply_of(process: subprocess.Popen[str]) -> str:
    """Wait for a line of the process; empty if it has ended."""
    assert process.stdout is not None
    return process.stdout.readline()


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()  # waits for its end and closes the pipes


def serve() -> None:
    """Reply to requests, one JSON object a line, until the input ends. Runs in the process of a [`MathVerifier`]."""
    replies = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is not a reply
    logging.disable()  # math-verify warns that it has no time limit of its own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process too, but is meant for the other one
    if hasattr(signal, "SIGALRM"):  # a process inherits what another one blocks or ignores
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    _compare("$1$", "$1$")  # imports math-verify, and builds what it keeps
    replies.write("ready\n")
    replies.flush()
    for line in sys.stdin:
        request = json.loads(line)
        _end_process_after(request["seconds"])
        score = _compare(request["text"], request["gold"])
        _end_process_after(0)
        replies.write(json.dumps(score) + "\n")
        replies.flush()


def _end_process_after(seconds: float) -> None:
    """Let the operating system end this process by SIGALRM after so many seconds; 0 revokes that."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _compare(text: str, gold: str) -> float | None:
    from math_verify import parse, verify

    expected = _parsed_gold(gold)
    if not expected:
        return None
    found = parse(text, parsing_timeout=None)
    return float(verify(expected, found, timeout_seconds=None))


@functools.lru_cache(maxsize=64)
def _parsed_gold(gold: str) -> list[Any]:
    """Parse a gold answer. Those of the last prompts are kept, because the completions of a group share theirs."""
    from math_verify import parse

    parsed: list[Any] = parse(gold, parsing_timeout=None)
    return parsed


if __name__ == "__main__":
    serve()

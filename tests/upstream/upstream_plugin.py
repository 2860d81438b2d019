"""
A pytest plugin that runs TRL's own GRPO tests against `DataEfficientGRPOTrainer` with every feature off, on small
local models in place of the Hub's. `make test-upstream TRL_REPO=/path/to/trl` runs it twice: with TRL's class, which
gives the baseline, and with ours, where only a test that passes in the baseline counts as a failure:

    export PYTHONPATH=tests/upstream
    python -m pytest -p upstream_plugin $TRL_REPO/tests/test_grpo_trainer.py --upstream-class=trl \\
        --upstream-results=trl.json
    python -m pytest -p upstream_plugin $TRL_REPO/tests/test_grpo_trainer.py --upstream-baseline=trl.json

It is not imported as `tests.upstream...`: TRL's tests are a package `tests` too.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path


os.environ["HF_HUB_OFFLINE"] = "1"  # before the Hub's client is imported: what has no stand-in fails at once
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import datasets
import pytest
import torch
import transformers
import trl
import trl.trainer
import trl.trainer.grpo_trainer
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from upstream_stand_ins import FULL_VOCABULARY, SMALL_VOCABULARY, NoStandInError, StandIns, load_dataset

from trl_dataeff import DataEfficientGRPOTrainer
from trl_dataeff.config import own_copy


NO_STAND_IN = "no local stand-in"
_CPU = not torch.cuda.is_available()
_LOADERS = (
    _BaseAutoModelClass,
    transformers.AutoModelForCausalLM,  # has a method of its own
    transformers.AutoConfig,
    transformers.AutoProcessor,
    transformers.AutoTokenizer,
    transformers.GenerationConfig,
    transformers.PreTrainedConfig,
    transformers.PreTrainedModel,
    transformers.PreTrainedTokenizerBase,
    transformers.ProcessorMixin,
)
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKEN_ID = re.compile(r"\b151\d{3}\b")  # of one of Qwen's special tokens, in the source of a test


@dataclass
class CPUConfig(trl.GRPOConfig):
    """`GRPOConfig` that also starts without a GPU, where its own default of bf16 is refused."""

    use_cpu: bool = _CPU
    bf16: bool | None = False if _CPU else None


class OffTrainer(DataEfficientGRPOTrainer):
    """`DataEfficientGRPOTrainer` with everything off, whatever config a test passes: the same training as `GRPOTrainer`'s."""

    def __init__(self, *args, **kwargs):
        given = inspect.signature(DataEfficientGRPOTrainer.__init__).bind(self, *args, **kwargs)
        given.arguments["args"] = args = own_copy(given.arguments.get("args") or CPUConfig())
        args.selection, args.replay, args.skip_zero_advantage = "uniform", "off", False
        super().__init__(*given.args[1:], **given.kwargs)


def _skips(function):
    """Skips the test that asks for what has no stand-in."""

    @functools.wraps(function)
    def skipping(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except NoStandInError as error:
            pytest.skip(f"{NO_STAND_IN} for {error}")

    return skipping


def _redirected(stand_ins: StandIns, loader: type) -> classmethod:
    original = loader.__dict__["from_pretrained"].__func__

    @_skips
    @functools.wraps(original)
    def from_pretrained(cls, name, *args, **kwargs):
        if isinstance(name, str) and _HUB_ID.fullmatch(name) and not Path(name).exists():
            name = str(stand_ins.model_path(name))
        return original(cls, name, *args, **kwargs)

    return classmethod(from_pretrained)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("upstream", "TRL's own tests against trl_dataeff")
    group.addoption("--upstream-class", choices=("dataeff", "trl"), default="dataeff", help="the class under test")
    group.addoption("--upstream-results", metavar="FILE", help="write the outcome of each test to FILE (JSON)")
    group.addoption(
        "--upstream-baseline", metavar="FILE", help="results with TRL's class: only what passes there may fail"
    )
    group.addoption("--upstream-summary", metavar="FILE", help="write a summary in Markdown to FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(UpstreamRun(config), "upstream-run")


class UpstreamRun:
    """One run: the replacements while it lasts, the outcomes of its tests, and the summary at its end."""

    def __init__(self, config: pytest.Config):
        self.ours = config.getoption("--upstream-class") == "dataeff"
        self.results = config.getoption("--upstream-results")
        self.summary_file = config.getoption("--upstream-summary")
        baseline = config.getoption("--upstream-baseline")
        self.baseline = json.loads(Path(baseline).read_text()) if baseline else {}
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.folder = tempfile.TemporaryDirectory(prefix="trl_dataeff_upstream_")
        self.stand_ins = StandIns(Path(self.folder.name))
        # Before test modules are imported: they import these names
        self.patch = pytest.MonkeyPatch()
        for loader in _LOADERS:
            self.patch.setattr(loader, "from_pretrained", _redirected(self.stand_ins, loader))
        self.patch.setattr(datasets, "load_dataset", _skips(load_dataset))
        for module in (trl, trl.trainer, trl.trainer.grpo_trainer):
            self.patch.setattr(module, "GRPOConfig", CPUConfig)
            if self.ours:
                self.patch.setattr(module, "GRPOTrainer", OffTrainer)

    def pytest_unconfigure(self) -> None:
        self.patch.undo()
        self.folder.cleanup()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        writes_ids = _TOKEN_ID.search(inspect.getsource(item.function))
        self.stand_ins.vocabulary = FULL_VOCABULARY if writes_ids else SMALL_VOCABULARY

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (report.when == "call" or not report.passed) and report.nodeid not in self.named("failed"):
            outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
            self.outcomes[report.nodeid], self.reasons[report.nodeid] = outcome, _reason(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.results:
            Path(self.results).write_text(json.dumps(self.outcomes, indent=1))
        if self.baseline and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            good = self.named("passed") and not self.regressions()  # that all fail with both classes shows nothing
            session.exitstatus = pytest.ExitCode.OK if good else pytest.ExitCode.TESTS_FAILED

    def named(self, outcome: str) -> list[str]:
        return [test for test, result in self.outcomes.items() if result == outcome]

    def regressions(self) -> list[str]:
        """Tests that pass with TRL's class and fail with ours."""
        return [test for test in self.named("failed") if self.baseline.get(test) == "passed"]

    def pytest_terminal_summary(self, terminalreporter) -> None:
        text = self.summary()
        terminalreporter.section("TRL's tests")
        terminalreporter.write_line(text)
        if self.summary_file:
            Path(self.summary_file).write_text(f"### TRL's GRPO tests\n\n{text}\n")

    def summary(self) -> str:
        """Counts, and why tests failed or had no stand-in, in Markdown."""
        name = "DataEfficientGRPOTrainer, everything off" if self.ours else "GRPOTrainer (baseline)"
        counts = ", ".join(f"{len(self.named(kind))} {kind}" for kind in ("passed", "failed", "skipped", "xfailed"))
        regressions = self.regressions()
        listed = {
            "Pass with TRL's class and fail with ours": regressions,
            "Other failures": [test for test in self.named("failed") if test not in regressions],
            "Skipped for want of a stand-in": [t for t in self.named("skipped") if NO_STAND_IN in self.reasons[t]],
        }
        lines = [f"{name}, trl {trl.__version__}: {counts}"]
        for title, tests in listed.items():
            lines += ["", f"{title}: {len(tests) or 'none'}", *(f"- `{test}`: {self.reasons[test]}" for test in tests)]
        return "\n".join(lines)


def _reason(report: pytest.TestReport) -> str:
    """Why a test failed or was skipped, in one line."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else str(report.longrepr)).strip().splitlines()[0][:200]

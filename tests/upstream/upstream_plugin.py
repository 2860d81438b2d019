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
import transformers.dynamic_module_utils
import trl
import trl.trainer
import trl.trainer.grpo_trainer
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from upstream_stand_ins import FULL_VOCABULARY, SMALL_VOCABULARY, NoStandInError, StandIns

from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.config import own_copy


# --- The classes under test ------------------------------------------------------------------------------------------


_CPU = not torch.cuda.is_available()


@dataclass
class BaselineConfig(trl.GRPOConfig):
    """`GRPOConfig` that also starts without a GPU, where its own default of bf16 is refused."""

    use_cpu: bool = _CPU
    bf16: bool | None = False if _CPU else None


@dataclass
class OffConfig(DataEfficientGRPOConfig):
    """`DataEfficientGRPOConfig` with everything off: training is to be the same as with `GRPOTrainer`."""

    use_cpu: bool = _CPU
    bf16: bool | None = False if _CPU else None
    selection: str = "uniform"
    replay: str = "off"
    skip_zero_advantage: bool = False


class OffTrainer(DataEfficientGRPOTrainer):
    """`DataEfficientGRPOTrainer` with everything off, also where a test passes a plain `GRPOConfig` or none."""

    built = 0

    def __init__(self, *args, **kwargs):
        given = inspect.signature(DataEfficientGRPOTrainer.__init__).bind(self, *args, **kwargs)
        config = given.arguments.get("args")
        given.arguments["args"] = args = OffConfig() if config is None else own_copy(config)
        args.selection, args.replay, args.skip_zero_advantage = "uniform", "off", False
        OffTrainer.built += 1
        super().__init__(*given.args[1:], **given.kwargs)


# --- What tests see --------------------------------------------------------------------------------------------------

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


def _local(stand_ins: StandIns, name):
    """The folder of the stand-in if `name` is an id of the Hub, else `name`."""
    if not isinstance(name, str) or Path(name).exists() or not _HUB_ID.fullmatch(name):
        return name
    return str(stand_ins.model_path(name))


def _redirected(stand_ins: StandIns, loader: type) -> classmethod:
    original = loader.__dict__["from_pretrained"].__func__

    @functools.wraps(original)
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        try:
            path = _local(stand_ins, pretrained_model_name_or_path)
        except NoStandInError as error:
            pytest.skip(f"no local stand-in for {error}")
        return original(cls, path, *args, **kwargs)

    return classmethod(from_pretrained)


def _load_dataset(*args, **kwargs):
    try:
        return StandIns.load_dataset(*args, **kwargs)
    except NoStandInError as error:
        pytest.skip(f"no local stand-in for {error}")


def _replace(patch: pytest.MonkeyPatch, stand_ins: StandIns, ours: bool) -> None:
    """Has to run before test modules are imported: they import these names."""
    for loader in _LOADERS:
        patch.setattr(loader, "from_pretrained", _redirected(stand_ins, loader))
    patch.setattr(datasets, "load_dataset", _load_dataset)
    patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(stand_ins.folder / "modules"))
    for module in (trl, trl.trainer, trl.trainer.grpo_trainer):
        patch.setattr(module, "GRPOConfig", OffConfig if ours else BaselineConfig)
        if ours:
            patch.setattr(module, "GRPOTrainer", OffTrainer)


# --- Options and results ---------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("upstream", "TRL's own tests against trl_dataeff")
    group.addoption(
        "--upstream-class",
        choices=("dataeff", "trl"),
        default="dataeff",
        help="the class under test; `trl` gives the baseline (default: dataeff)",
    )
    group.addoption("--upstream-results", metavar="FILE", help="write the outcome of each test to FILE (JSON)")
    group.addoption(
        "--upstream-baseline",
        metavar="FILE",
        help="results of a run with `--upstream-class=trl`: the run fails only for tests that pass there",
    )
    group.addoption("--upstream-summary", metavar="FILE", help="append a summary in Markdown to FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(UpstreamRun(config), "upstream-run")


class UpstreamRun:
    """One run: the replacements while it lasts, the outcomes of its tests, and the summary at its end."""

    def __init__(self, config: pytest.Config):
        self.label = config.getoption("--upstream-class")
        self.results_file = config.getoption("--upstream-results")
        self.summary_file = config.getoption("--upstream-summary")
        baseline = config.getoption("--upstream-baseline")
        self.baseline = json.loads(Path(baseline).read_text()) if baseline else None
        self.outcomes: dict[str, dict[str, str]] = {}
        self.folder = tempfile.TemporaryDirectory(prefix="trl_dataeff_upstream_")
        self.patch = pytest.MonkeyPatch()
        self.stand_ins = StandIns(Path(self.folder.name))
        _replace(self.patch, self.stand_ins, ours=self.label == "dataeff")

    def pytest_unconfigure(self) -> None:
        self.patch.undo()
        self.folder.cleanup()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        writes_ids = _TOKEN_ID.search(inspect.getsource(item.function))
        self.stand_ins.vocabulary = FULL_VOCABULARY if writes_ids else SMALL_VOCABULARY

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
            if self.outcomes.get(report.nodeid, {}).get("outcome") != "failed":
                self.outcomes[report.nodeid] = {"outcome": outcome, "reason": _reason(report)}

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.results_file:
            Path(self.results_file).write_text(json.dumps(self.outcomes, indent=1))
        if self.baseline is None or session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        passed = any(result["outcome"] == "passed" for result in self.outcomes.values())
        good = passed and not self.regressions()  # that all fail with both classes shows nothing
        session.exitstatus = pytest.ExitCode.OK if good else pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter) -> None:
        terminalreporter.section("TRL's tests")
        for line in self.summary():
            terminalreporter.write_line(line)
        if self.summary_file:
            with open(self.summary_file, "a") as file:
                file.write("\n".join(["### TRL's GRPO tests", "", *self.summary(), "", ""]))

    def regressions(self) -> list[str]:
        """Tests that pass with TRL's class and fail with ours."""
        return [
            test
            for test, result in self.outcomes.items()
            if result["outcome"] == "failed" and (self.baseline or {}).get(test, {}).get("outcome") == "passed"
        ]

    def summary(self) -> list[str]:
        name = "DataEfficientGRPOTrainer, everything off" if self.label == "dataeff" else "GRPOTrainer (baseline)"
        built = f"; {OffTrainer.built} trainers built" if self.label == "dataeff" else ""
        lines = [f"{name}, trl {trl.__version__}: {self._counts()}{built}"]
        failed = [test for test, result in self.outcomes.items() if result["outcome"] == "failed"]
        if self.baseline is None:
            return [*lines, *self._listed("Failed", failed), *self._without_stand_in()]
        regressions = self.regressions()
        lines += self._listed("Pass with TRL's class and fail with ours", regressions)
        lines += self._listed("Fail with both, or not in the baseline", [t for t in failed if t not in regressions])
        return [*lines, *self._without_stand_in()]

    def _counts(self) -> str:
        outcomes = [result["outcome"] for result in self.outcomes.values()]
        kinds = ("passed", "failed", "skipped", "xfailed")
        return ", ".join(f"{outcomes.count(kind)} {kind}" for kind in kinds if kind in outcomes) or "no tests"

    def _listed(self, title: str, tests: list[str]) -> list[str]:
        return ["", f"{title}: {len(tests) or 'none'}", *(f"- `{t}`: {self.outcomes[t]['reason']}" for t in tests)]

    def _without_stand_in(self) -> list[str]:
        reasons = [result["reason"] for result in self.outcomes.values() if "no local stand-in" in result["reason"]]
        ids = sorted({reason.rpartition(" for ")[2] for reason in reasons})
        return ["", f"Skipped for want of a stand-in: {len(reasons) or 'none'}", *(f"- `{i}`" for i in ids)]


def _reason(report: pytest.TestReport) -> str:
    """Why a test failed or was skipped, in one line."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else str(report.longrepr)).strip().splitlines()[0][:200]

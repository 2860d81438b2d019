"""A pytest plugin that runs TRL's own GRPO tests with `DataEfficientGRPOTrainer` and every feature off, on small
local models in place of the Hub's. `make test-upstream TRL_REPO=/path/to/trl` runs it twice: with TRL's class, and
with ours on what passed.

It is not imported as `tests.upstream...`: TRL's tests are a package `tests` too.
"""

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
from trl_dataeff.config import with_own_fields


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
    """
    `DataEfficientGRPOTrainer` with everything off, whatever config a test passes: the same training as
    `GRPOTrainer`'s.
    """

    def __init__(self, *args, **kwargs):
        given = inspect.signature(DataEfficientGRPOTrainer.__init__).bind(self, *args, **kwargs)
        given.arguments["args"] = args = with_own_fields(given.arguments.get("args") or CPUConfig())
        args.selection = "uniform"
        args.replay = "off"
        args.compact_update = False
        super().__init__(*given.args[1:], **given.kwargs)


def _skips(function):
    """Skips the test that asks for what has no stand-in."""

    @functools.wraps(function)
    def skipping(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except NoStandInError as error:
            pytest.skip(f"no local stand-in for {error}")

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
    what = "names of tests: TRL's class writes those that pass, ours runs them"
    group.addoption("--upstream-passed", metavar="FILE", type=Path, help=what)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(UpstreamRun(config), "upstream-run")


class UpstreamRun:
    """One run: the replacements while it lasts, and which of its tests pass."""

    def __init__(self, config: pytest.Config):
        self.ours = config.getoption("--upstream-class") == "dataeff"
        self.file = config.getoption("--upstream-passed")
        self.passes: dict[str, bool] = {}
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

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.ours:
            chosen = json.loads(self.file.read_text())
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
            items[:] = [item for item in items if item.nodeid in chosen]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        writes_ids = _TOKEN_ID.search(inspect.getsource(item.function))
        self.stand_ins.vocabulary = FULL_VOCABULARY if writes_ids else SMALL_VOCABULARY

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        so_far = report.when == "setup" or self.passes[report.nodeid]
        self.passes[report.nodeid] = so_far and report.passed

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        passed = [name for name, passes in self.passes.items() if passes]
        if not self.ours:
            self.file.write_text(json.dumps(passed))
        elif not passed and session.exitstatus == pytest.ExitCode.OK:  # that all are skipped shows nothing
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

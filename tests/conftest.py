"""One thread a process, no network, and a cache folder of its own for each pytest process."""

import atexit
import os
import shutil
import signal
import tempfile


# Before torch is imported: the models are tiny, and more threads only get in each other's way
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["TRL_DATAEFF_CACHE"] = tempfile.mkdtemp(prefix="trl_dataeff_tests_")

import hypothesis
import pytest
import torch
from transformers.utils import logging

from tests.factories.tiny import save_tiny


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it for what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(shutil.rmtree, os.environ["TRL_DATAEFF_CACHE"], ignore_errors=True)
hypothesis.settings.register_profile("noisy machines", deadline=None)
hypothesis.settings.load_profile("noisy machines")
torch.set_num_threads(1)
logging.disable_progress_bar()


@pytest.fixture
def caplog_transformers(caplog):
    """`caplog` for loggers below `transformers`, which do not propagate by themselves."""
    logging.enable_propagation()
    yield caplog
    logging.disable_propagation()


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))

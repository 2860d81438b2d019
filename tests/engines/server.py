"""A vLLM server on the CPU."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path


SETTINGS = {  # of vLLM on the CPU, also within the process of the tests
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
_FLOAT32 = ("--dtype", "float32", "--enforce-eager")
_AS_TRL = ("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1")  # what TRL's guide asks for


@contextmanager
def served(model: Path, log: Path):
    """The address of a vLLM server of the model in the folder `model`, within the block.

    Its output goes to the file `log`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not `vllm serve`, which looks for the version of a package `vllm`, and this one is `vllm-cpu`
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    # One process less: that of a worker
    command = [*server, "--model", model, *_FLOAT32, *_AS_TRL, "--distributed-executor-backend", "uni"]
    own = os.environ | SETTINGS | {"VLLM_SERVER_DEV_MODE": "1"}  # with the endpoints that load weights
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=own, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url, log)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _wait(process: subprocess.Popen, url: str, log: Path, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        with suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=10).close()
            return
        time.sleep(0.5)
    raise AssertionError(f"The vLLM server has not started:\n{log.read_text()[-4000:]}")

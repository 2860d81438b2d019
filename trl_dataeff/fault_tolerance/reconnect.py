"""A vLLM server (`vllm_mode="server"`) that is restarted during a run (`vllm_reconnect`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from transformers.utils import logging


if TYPE_CHECKING:
    from trl import GRPOConfig, GRPOTrainer

logger = logging.get_logger(__name__)
_RESTARTS = 3  # in a row, before one call is given up
_GONE = OSError  # what `requests` raises derives from it, and so does ConnectionError


class ReconnectingClient:
    """
    TRL's `VLLMClient` that waits for a server that is gone, and continues when it is back.

    The client itself repeats a request five times within about a minute. Then this class waits until the server answers
    again, joins its weight-transfer group again, sends the present weights (a server that was restarted has those of the
    original model), and repeats the request. A server that was restarted within that minute answers as if nothing was: it is
    known by its `instance_id`, which is compared after each generation and before weights are sent. Servers with data
    parallelism have several, and are not known when they are restarted within that minute.

    Args:
        client: the client, on the main process.
        device: where weights are sent from.
        timeout (`float`): seconds to wait for the server each time (`vllm_server_timeout`).
        named_params (`Callable` or `None`): makes a new iterator over the policy's weights, without communication between
            processes; `None` where they are sharded, so that this process cannot send them alone.
        on_return (`Callable`): called each time the server is back.
    """

    def __init__(
        self,
        client: Any,
        *,
        device: Any,
        timeout: float,
        named_params: Callable[[], Iterator[Any]] | None,
        on_return: Callable[[], None],
    ):
        self._client = client
        self._device = device
        self._timeout = timeout
        self._named_params = named_params
        self._on_return = on_return
        self._metadata: list[Any] | None = None
        self._joined = self._instance()  # the server that has our weights

    @classmethod
    def install(cls, trainer: GRPOTrainer, sharded: bool, on_return: Callable[[], None]) -> None:
        """Replace the client of a trainer, whose weights may be `sharded` over processes."""
        vllm: Any = trainer.vllm_generation
        vllm.vllm_client = cls(
            vllm.vllm_client,
            device=trainer.accelerator.device,
            timeout=cast("GRPOConfig", trainer.args).vllm_server_timeout,
            named_params=None if sharded else vllm._iter_named_params,
            on_return=on_return,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._retry(self._sampled, self._client.generate, *args, **kwargs)

    def chat(self, *args: Any, **kwargs: Any) -> Any:
        return self._retry(self._sampled, self._client.chat, *args, **kwargs)

    def image_features(self, *args: Any, **kwargs: Any) -> Any:
        return self._retry(self._client.image_features, *args, **kwargs)

    def update_named_params(self, metadata: list[Any], named_params: Iterator[Any]) -> None:
        self._metadata = metadata
        try:
            self._check_instance()
            self._client.update_named_params(metadata, named_params)
        except _GONE as error:
            self._wait_for_return(error)  # sends them too

    def reset_prefix_cache(self) -> None:
        self._retry(self._client.reset_prefix_cache)

    def _instance(self) -> Any:
        """
        What tells the present server from one that is started again; `None` if it does not say. With several API servers (by
        default as many as `--data-parallel-size`) each has an id of its own, and any of them may answer.
        """
        info = self._client.get_server_info()
        parallel = info.get("parallel_config", {})
        api_servers = parallel.get("_api_process_count", parallel.get("data_parallel_size", 1))
        return info.get("instance_id") if api_servers == 1 else None

    def _check_instance(self) -> None:
        if self._instance() != self._joined:
            raise ConnectionError("it was restarted")

    def _sampled(self, request: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What `request` returns, if the server that has our weights sampled it."""
        result = request(*args, **kwargs)
        self._check_instance()
        return result

    def _retry(self, request: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for _ in range(_RESTARTS):
            try:
                return request(*args, **kwargs)
            except _GONE as error:
                self._wait_for_return(error)
        return request(*args, **kwargs)

    def _wait_for_return(self, error: OSError) -> None:
        logger.warning(
            f"The vLLM server at {self._client.base_url} does not answer ({type(error).__name__}: {error}). Waiting up "
            f"to `vllm_server_timeout` ({self._timeout} s) for it to come back."
        )
        if self._named_params is None:
            raise ConnectionError(
                "The vLLM server went away, and with weights that are sharded over processes (FSDP, DeepSpeed ZeRO-3) "
                "it cannot be given the present ones in the middle of a step. Restart it, and then this run."
            ) from error
        for attempt in range(_RESTARTS):
            self._client.check_server(self._timeout)  # TRL's ConnectionError says what it waited for
            try:
                instance = self._instance()
                self._client.close_communicator()
                self._client.init_communicator(device=self._device)
                if self._metadata is not None:
                    self._client.update_named_params(self._metadata, self._named_params())
                self._client.reset_prefix_cache()
                self._joined = instance
            except _GONE as again:
                error = again
                time.sleep(min(2.0**attempt, self._timeout))
            else:
                logger.warning("The vLLM server is back, with the present weights.")
                self._on_return()
                return
        raise ConnectionError(
            f"The vLLM server at {self._client.base_url} came back {_RESTARTS} times without taking the present weights "
            f"({error}). See its own log; then restart it, and this run."
        ) from error

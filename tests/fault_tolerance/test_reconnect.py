"""A vLLM server that stops answering, and comes back or does not (`vllm_reconnect`)."""

import time
from types import SimpleNamespace

import pytest

from tests.factories import make_trainer
from trl_dataeff.fault_tolerance.reconnect import ReconnectingClient


class Server:
    """A vLLM server as its client sees it: gone at the requests that are numbered; restarts lose the weights."""

    base_url = "http://gone:8000"

    def __init__(self, gone=()):
        self.gone, self.requests, self.log = set(gone), 0, []
        self.weights = self.joined = None
        self.instance = 0

    def restart(self):
        self.weights, self.joined, self.instance = "original", False, self.instance + 1

    def get_server_info(self):
        return {"instance_id": f"{self.instance:05d}"}

    def request(self, name):
        self.requests += 1
        if self.requests in self.gone:
            self.restart()
            raise ConnectionError(f"{name}: connection refused")
        self.log.append(name)

    def check_server(self, total_timeout):
        self.log.append(f"wait {total_timeout}")

    def close_communicator(self):
        self.log.append("close")

    def init_communicator(self, device):
        self.request("join")
        self.joined = True

    def update_named_params(self, metadata, named_params):
        self.request("weights")
        assert self.joined
        self.weights = list(named_params)

    def reset_prefix_cache(self):
        self.request("reset")

    def generate(self, prompts):
        self.request("generate")
        return [self.weights, prompts]


def client_of(server, version=None, **options):
    returns = []
    options = {"named_params": lambda: iter(version or ["present"]), **options}
    client = ReconnectingClient(server, device="cpu", timeout=7.0, on_return=lambda: returns.append(1), **options)
    return client, returns


@pytest.mark.parametrize("gone", [{4}, {3}, {2}, {4, 5}, {4, 6}, {4, 8}, {2, 3, 4}])
def test_a_server_that_comes_back_gets_the_present_weights(gone, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    server = Server(gone)
    server.joined = True
    client, returns = client_of(server)
    client.init_communicator(device="cpu")
    client.update_named_params(["metadata"], iter(["present"]))
    client.reset_prefix_cache()
    for _ in range(3):
        assert client.generate(["a"]) == [["present"], ["a"]]
    assert len(returns) >= 1
    assert "wait 7.0" in server.log
    assert client.base_url == server.base_url


@pytest.mark.parametrize("when", ["before a generation", "within one", "before the weights"])
def test_a_server_that_is_restarted_unnoticed_gets_the_present_weights(when, monkeypatch):
    """TRL's session repeats a request by itself, so that no error is seen."""
    server = Server()
    server.joined = True
    client, returns = client_of(server)
    client.update_named_params(["metadata"], iter(["present"]))
    assert client.generate(["a"]) == [["present"], ["a"]]
    if when == "within one":
        monkeypatch.setattr(client._client, "generate", restarting_once(server))
    else:
        server.restart()
    if when == "before the weights":
        client.update_named_params(["metadata"], iter(["present"]))
    assert client.generate(["a"]) == [["present"], ["a"]]
    assert client.generate(["a"]) == [["present"], ["a"]]
    assert len(returns) == 1


@pytest.mark.parametrize("parallel", [{"_api_process_count": 2}, {"data_parallel_size": 2}])
def test_several_api_servers_are_not_taken_for_a_restart(parallel):
    """Each has an id of its own, and the one that answers is chosen at random."""

    class Several(Server):
        def get_server_info(self):
            self.instance += 1
            return {**super().get_server_info(), "parallel_config": parallel}

    client, returns = client_of(Several())
    client._client.joined = True
    client.update_named_params(["metadata"], iter(["present"]))
    assert client.generate(["a"]) == [["present"], ["a"]]
    assert returns == []
    assert "close" not in client._client.log


def test_one_api_server_is_recognized_with_data_parallelism():
    class One(Server):
        def get_server_info(self):
            return {**super().get_server_info(), "parallel_config": {"_api_process_count": 1, "data_parallel_size": 2}}

    server = One()
    server.joined = True
    client, returns = client_of(server)
    client.update_named_params(["metadata"], iter(["present"]))
    server.restart()
    assert client.generate(["a"]) == [["present"], ["a"]]
    assert returns == [1]


def restarting_once(server):
    """`server.generate`, which restarts the server when it is called for the first time."""
    pending, plain = [server.restart], server.generate

    def generate(prompts):
        while pending:
            pending.pop()()
        return plain(prompts)

    return generate


def test_a_server_that_does_not_come_back(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    client, returns = client_of(Server(range(1, 100)))
    with pytest.raises(
        ConnectionError, match=r"came back 3 times without taking the present weights .* restart it, and this run"
    ):
        client.generate(["a"])
    server = Server({1})
    monkeypatch.setattr(server, "check_server", lambda timeout: (_ for _ in ()).throw(ConnectionError("after 7 s")))
    with pytest.raises(ConnectionError, match="after 7 s"):
        client_of(server)[0].generate(["a"])
    assert returns == []


def test_sharded_weights_cannot_be_sent_in_the_middle_of_a_step():
    client, _ = client_of(Server({1}), named_params=None)
    with pytest.raises(ConnectionError, match=r"sharded over processes .* Restart it, and then this run"):
        client.generate(["a"])


def test_a_mistake_in_a_request_is_not_repeated():
    class Strict(Server):
        def generate(self, prompts):
            self.requests += 1
            raise Exception("Request failed: 400, prompt too long")  # TRL's own type

    server = Strict()
    with pytest.raises(Exception, match="Request failed: 400"):
        client_of(server)[0].generate(["a"])
    assert server.requests == 1


@pytest.mark.parametrize(
    ("fields", "wraps"),
    [
        ({}, False),
        ({"vllm_reconnect": False}, False),
        ({"vllm_reconnect": True}, True),
        ({"vllm_reconnect": True, "vllm_mode": "colocate"}, False),
        ({"vllm_reconnect": True, "use_vllm": False}, False),
    ],
)
def test_the_client_is_trls_unless_it_is_asked_for(tmp_path, fields, wraps):
    trainer, client = make_trainer(tmp_path, "off"), Server()
    fields = {"use_vllm": True, "vllm_mode": "server", **fields}
    for name, value in fields.items():
        setattr(trainer.args, name, value)
    trainer.use_vllm, trainer.vllm_mode = fields["use_vllm"], fields["vllm_mode"]
    trainer.vllm_generation = SimpleNamespace(vllm_client=client, _iter_named_params=lambda: iter(["present"]))
    trainer._set_up_fault_tolerance(sharded=False)
    present = trainer.vllm_generation.vllm_client
    assert (present is client) is not wraps
    if wraps:
        assert type(present) is ReconnectingClient
        assert present.base_url == client.base_url
        client.gone, client.joined = {1}, True
        trainer._begin_run()
        assert present.generate(["a"]) == ["original", ["a"]]  # no weights were sent so far, so none are sent again
        assert trainer.collector.counters.values["server_returns"] == 1

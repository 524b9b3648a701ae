"""How processes meet."""

import pytest

from lowprec.train import distributed


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("environment", "interface"),
    [
        ({"MASTER_ADDR": "127.0.0.1"}, "lo"),
        ({"MASTER_ADDR": "localhost"}, "lo"),
        ({"MASTER_ADDR": "node-1"}, None),
        ({"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "eth7"}, "eth7"),
    ],
)
def test_processes_of_one_machine_need_no_host_name(monkeypatch, device, environment, interface):
    environment = dict(environment)
    monkeypatch.setattr(distributed.os, "environ", environment)
    monkeypatch.setattr(distributed, "DistributedRanks", lambda *given: given)
    assert distributed.join(device, 9.0) == (device, 9.0)
    assert environment.get("GLOO_SOCKET_IFNAME") == interface

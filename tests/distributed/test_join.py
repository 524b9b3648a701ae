"""How processes meet."""

import pytest

from lowprec.train import distributed


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("address", "interface"), [("127.0.0.1", "lo"), ("localhost", "lo"), ("node-1", None)]
)
def test_processes_of_one_machine_need_no_host_name(monkeypatch, device, address, interface):
    environment = {"MASTER_ADDR": address}
    monkeypatch.setattr(distributed.os, "environ", environment)
    monkeypatch.setattr(distributed, "DistributedRanks", lambda *given: given)
    assert distributed.join(device, 9.0) == (device, 9.0)
    assert environment.get("GLOO_SOCKET_IFNAME") == interface


def test_an_interface_that_is_named_stays(monkeypatch):
    environment = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "eth7"}
    monkeypatch.setattr(distributed.os, "environ", environment)
    monkeypatch.setattr(distributed, "DistributedRanks", lambda *given: given)
    distributed.join("cuda", 9.0)
    assert environment["GLOO_SOCKET_IFNAME"] == "eth7"

import socket
from collections.abc import Iterator

import pytest

from shoal.backend.engine_config import ConfigError
from shoal.client.cli.ports import PortUse, check_ports, port_faults


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_taken_port_is_named_with_its_flag(taken_port: int) -> None:
    use = PortUse("127.0.0.1", taken_port, "--grpc-port", "Triton gRPC")
    with pytest.raises(ConfigError) as error:
        check_ports([use])
    text = str(error.value)
    assert f"Port {taken_port} (Triton gRPC) is taken" in text
    assert "--grpc-port" in text


def test_every_taken_port_is_told(taken_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        uses = [
            PortUse("127.0.0.1", taken_port, "--a", "A"),
            PortUse("127.0.0.1", other.getsockname()[1], "--b", "B"),
        ]
        assert len(port_faults(uses)) == 2


def test_free_port_is_left_free() -> None:
    port = free_port()
    check_ports([PortUse("127.0.0.1", port, "--a", "A")])
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_one_port_for_two_uses_names_both_flags() -> None:
    port = free_port()
    uses = [PortUse("127.0.0.1", port, "--a", "A"), PortUse("127.0.0.1", port, "--b", "B")]
    with pytest.raises(ConfigError, match="given twice: --a and --b"):
        check_ports(uses)


def test_address_of_another_machine_is_refused() -> None:
    fault = port_faults([PortUse("192.0.2.1", free_port(), "--a", "A")])
    assert len(fault) == 1
    assert "Check --host and --a" in fault[0]

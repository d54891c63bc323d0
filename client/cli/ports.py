"""Finds out before anything starts whether the ports can be had."""

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.backend.engine_config import ConfigError


@dataclass(frozen=True, slots=True)
class PortUse:
    """A port that something of ours will listen on, and the flag that sets it."""

    host: str
    port: int
    flag: str
    purpose: str


def check_ports(uses: Sequence[PortUse]) -> None:
    """Raise ConfigError naming every port that cannot be had, with its flag."""
    faults = port_faults(uses)
    if faults:
        raise ConfigError("\n".join(faults))


def port_faults(uses: Sequence[PortUse]) -> list[str]:
    """One line for each port that is taken, given twice or not allowed."""
    faults = []
    owners: dict[int, PortUse] = {}
    for use in uses:
        if use.port in owners:
            faults.append(
                f"Port {use.port} is given twice: {owners[use.port].flag} and {use.flag}. "
                "Give each its own."
            )
            continue
        owners[use.port] = use
        fault = _bind_fault(use)
        if fault is not None:
            faults.append(fault)
    return faults


def _bind_fault(use: PortUse) -> str | None:
    family = socket.AF_INET6 if ":" in use.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do, so that connections in TIME_WAIT do not count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((use.host, use.port))
            probe.listen(1)
        except OSError as error:
            return _fault_text(use, error)
    return None


def _fault_text(use: PortUse, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"Port {use.port} ({use.purpose}) is taken{_owner(use.port)}. "
            f"Stop that process or choose another port with {use.flag}."
        )
    if error.errno == errno.EACCES:
        return (
            f"Port {use.port} ({use.purpose}) is not allowed for this user. "
            f"Choose one above 1023 with {use.flag}."
        )
    return (
        f"Cannot listen on {use.host}:{use.port} ({use.purpose}): "
        f"{error.strerror or error}. Check --host and {use.flag}."
    )


def _owner(port: int) -> str:
    import psutil

    try:
        for connection in psutil.net_connections(kind="tcp"):
            address = connection.laddr
            if connection.status == psutil.CONN_LISTEN and address and address.port == port:
                if connection.pid is None:
                    break
                return f" by process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        pass  # other users' processes are not visible everywhere
    return ""

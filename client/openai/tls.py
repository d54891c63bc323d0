"""TLS of the OpenAI endpoint: files checked before the start, and how this machine's own tools
reach the endpoint."""

import ssl
from pathlib import Path

from shoal.backend.engine_config import ConfigError


def check_tls(cert: Path | None, key: Path | None) -> None:
    """Raise ConfigError unless there are no files, or a certificate chain and its key."""
    if cert is None and key is None:
        return
    if cert is None or key is None:
        raise ConfigError("--tls-cert and --tls-key belong together: give both or none.")
    for flag, path in (("--tls-cert", cert), ("--tls-key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}.") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(cert, key, password=lambda: b"")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"--tls-cert {cert} and --tls-key {key} must be a PEM certificate chain and its PEM "
            "key, without a password."
        ) from error


def trusted_by(cert: Path | None) -> ssl.SSLContext | bool:
    """What a caller on this machine verifies by: the server's own certificate and no other, by
    whatever name or address it is called. True, the usual way, without one."""
    if cert is None:
        return True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cert)
    return context

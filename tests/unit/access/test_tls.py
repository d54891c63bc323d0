"""The endpoint over TLS."""

import ssl
from pathlib import Path

import httpx
import pytest
import trustme
from fake_triton import FakeTriton
from shim_thread import ShimThread

from shoal.backend.engine_config import ConfigError
from shoal.client.openai.tls import check_tls, trusted_by


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate chain and its key, for a name that no address of this machine has."""
    folder = tmp_path_factory.mktemp("tls")
    issued = trustme.CA().issue_cert("shoal.example")
    chain, key = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(key))
    return chain, key


def test_tls(triton: FakeTriton, certificate: tuple[Path, Path]) -> None:
    chain, key = certificate
    check_tls(chain, key)
    with ShimThread(triton.url, tls_cert=chain, tls_key=key) as shim:
        url = f"https://127.0.0.1:{shim.port}/health/live"
        with httpx.Client(verify=trusted_by(chain)) as client:
            assert client.get(url).json() == {"status": "live"}
        with pytest.raises(httpx.ConnectError, match="(?i)certificate"):
            httpx.get(url)
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http"))
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(httpx.ConnectError):
            httpx.get(url, verify=old)


def test_tls_files_are_checked_before_the_start(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    chain, key = certificate
    check_tls(None, None)
    with pytest.raises(ConfigError, match="both or none"):
        check_tls(chain, None)
    with pytest.raises(ConfigError, match="--tls-key .*none.pem cannot be read"):
        check_tls(chain, tmp_path / "none.pem")
    with pytest.raises(ConfigError, match="must be a PEM"):
        check_tls(chain, chain)
    other = tmp_path / "other.pem"
    trustme.CA().issue_cert("other").private_key_pem.write_to_path(str(other))
    with pytest.raises(ConfigError, match="must be a PEM"):
        check_tls(chain, other)

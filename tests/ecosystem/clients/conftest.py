"""Where the real server is, as ``tests/ecosystem/run.py`` tells, and what the checks share."""

import base64
import os
import struct
import zlib

import pytest

BASE_URL = os.environ["SHOAL_CHECK_URL"] + "/v1"
MODEL = os.environ["SHOAL_CHECK_MODEL"]
KEY = os.environ["SHOAL_CHECK_KEY"]
LIMITED_KEY = os.environ["SHOAL_CHECK_LIMITED_KEY"]  # one request in two seconds


@pytest.fixture(scope="session")
def base_url() -> str:
    return BASE_URL


@pytest.fixture(scope="session")
def model() -> str:
    return MODEL


@pytest.fixture(scope="session")
def key() -> str:
    return KEY


@pytest.fixture(scope="session")
def limited_key() -> str:
    return LIMITED_KEY


@pytest.fixture(scope="session")
def picture_model() -> str:
    """A model that takes images; its answers mean nothing."""
    return os.environ["SHOAL_CHECK_PICTURE_MODEL"]


@pytest.fixture(scope="session")
def picture() -> str:
    """A PNG as a data URL: 24 by 16 pixels, red."""
    rows = (b"\0" + b"\xff\x20\x20" * 24) * 16

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", 24, 16, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    png += chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()

"""Settings of the OpenAI shim."""

import os
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ShimSettings:
    """Where the shim listens, which Triton server it asks, and its limits."""

    triton_grpc: str = "127.0.0.1:8001"
    host: str = "127.0.0.1"
    port: int = 9000
    drain_timeout_s: float = 30.0  # how long open answers may go on after SIGTERM
    lost_after_s: float = 3.0  # without a heartbeat for so long, open answers end with an error
    discovery_interval_s: float = 1.0
    forget_after_s: float = 30.0  # an unloaded model is "unavailable" for so long, then "unknown"
    first_beat_timeout_s: float = 2.0
    body_timeout_s: float = 30.0
    send_timeout_s: float = 60.0  # a client that reads nothing for so long counts as gone
    max_body_bytes: int = 4 * MIB
    max_json_depth: int = 32
    max_prompts: int = 32
    max_embedding_inputs: int = 256
    max_choices: int = 128  # of all prompts of a request together
    # Responses that later ones may go on from, in the memory of this process.
    max_stored_responses: int = 1000
    max_stored_bytes: int = 64 * MIB
    stored_for_s: float = 3600.0
    max_head_bytes: int = 64 * 1024
    max_headers: int = 100
    keys_file: Path | None = None  # None: nobody needs a key
    keys_interval_s: float = 1.0  # how often the key file is looked at
    tls_cert: Path | None = None  # a PEM chain, and its key: both or none
    tls_key: Path | None = None
    cors_origins: tuple[str, ...] = ()  # whose pages browsers let call; none: only our own
    log_level: str = "info"
    num_workers: int = 1  # processes like this one that share the port, and the keys' limits
    shared_dir: Path | None = None  # where they keep what all must find; None: in memory
    # What opens Triton's repository calls, where `shoal serve` has closed them.
    control_key: str | None = field(
        default_factory=lambda: os.environ.get("SHOAL_CONTROL_KEY"), repr=False
    )

"""Engine settings of one served model: ``model.yaml`` beside it in the model repository."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from shoal.scheduler.errors import RequestError
from shoal.scheduler.policies import POLICY_NAMES
from shoal.scheduler.sampling_params import SamplingParams
from shoal.scheduler.tiers import DEFAULT_TIER, TenantTable, TierTable

DTYPES = ("auto", "float32", "bfloat16")
PREFIX_EVICTIONS = ("lru", "lfu", "reuse")
KV_DTYPES = ("auto", "float32", "bfloat16", "fp8", "int8")
KERNELS = ("auto", "reference", "native")
RUNNERS = ("auto", "custom", "transformers")
QUANTIZATIONS = ("none", "int8", "int4", "fp8")


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it, the allowed values and the fix."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Raises ConfigError, naming the field, on a bad value.

    ``weights`` is a name in the catalogue (see ``shoal models``), a GGUF file or a folder with
    ``config.json`` and safetensors. Lengths are in tokens, sizes in MiB, times in seconds.

    ``kernels`` chooses who computes. native: kernels compiled for this CPU, with which a text does
    not depend on what else runs; reference: torch, equal to transformers bit for bit; auto: native
    where that is possible, else the reference with a notice in the log.

    ``runner`` chooses what runs the model. custom: the families written here; transformers: any
    decoder-only model of that package, over our paged cache, slower; auto: custom where it can.

    ``quantization`` packs the weights of all products as they are loaded. int8: 8 bits, one scale
    an output feature, and each token's states quantised likewise; fp8: 8-bit floats; int4: 4 bits,
    groups of 128, the output projection in 8 bits; none: as the checkpoint has them.
    """

    weights: str
    dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    runner: str = "auto"
    self_test: int = 0  # prompts that are compared with transformers at start-up; 0: none
    quantization: str = "none"
    max_model_len: int | None = None  # None: the model's own context, or what the KV pool holds
    block_size: int = 16
    kv_dtype: str = "auto"  # of keys and values: the model's dtype; fp8 and int8 hold almost twice
    kv_cache_mib: int = 1024
    num_kv_blocks: int | None = None  # overrides kv_cache_mib
    host_kv_mib: int | None = None  # KV blocks beside the device's; None: none on a CPU
    kv_disk_dir: str | None = None  # where prefix blocks go that the host has no room for
    kv_disk_mib: int = 4096
    memory_ceiling_mib: int | None = None  # of the worker; None: what the device has left for it
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    decode_stretch: float = 1.8  # times as long prompts may make a step for those that decode
    max_queued_requests: int = 1024
    prefix_caching: bool = True  # keep computed blocks for requests that begin alike
    prefix_eviction: str = "reuse"  # which cached blocks go first: lru, lfu, or least reusable
    images: bool | None = None  # take them; None: where no native kernels are given up for it
    num_threads: int | None = None  # CPU threads of the worker; None: all cores
    # Sampling parameters of requests that do not name them, as the model's makers recommend.
    default_sampling: dict[str, Any] = field(default_factory=dict)
    step_log: str | None = None  # a file that gets one JSON line per engine step
    worker_start_timeout_s: float = 300.0
    worker_stall_timeout_s: float = 60.0  # a step longer than this counts as a hang
    max_queued_tokens: int | None = None  # prompts of queued requests; None: no limit
    max_request_seconds: float | None = None  # from submission to the last token; None: no cap
    policy: str = "fcfs"  # the order of the queue: fcfs, priority, wfq or vtc
    tiers: dict[str, Any] | None = None  # name -> weight, ttft_ms, tpot_ms; None: one tier
    default_tier: str | None = None  # of requests without slo_class; None: standard, or the first
    tenants: dict[str, Any] | None = None  # name, or "*" -> weight, max_requests, max_tokens
    max_preemptions: int = 2  # times a request makes way for one of a higher tier; 0: never
    min_run_s: float = 0.5  # that a request runs before it may have to

    def __post_init__(self) -> None:
        if not isinstance(self.weights, str) or not self.weights:
            raise ConfigError("weights must name a model, a GGUF file or a checkpoint folder.")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}.")
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_dtype must be one of {', '.join(KV_DTYPES)}.")
        if self.device not in ("auto", "cpu", "cuda", "mps"):
            raise ConfigError("device must be one of auto, cpu, cuda, mps.")
        if self.kernels not in KERNELS:
            raise ConfigError(f"kernels must be one of {', '.join(KERNELS)}.")
        if self.runner not in RUNNERS:
            raise ConfigError(f"runner must be one of {', '.join(RUNNERS)}.")
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(f"quantization must be one of {', '.join(QUANTIZATIONS)}.")
        if not isinstance(self.prefix_caching, bool):
            raise ConfigError("prefix_caching must be true or false.")
        if self.images not in (None, True, False):
            raise ConfigError("images must be true or false.")
        if self.prefix_eviction not in PREFIX_EVICTIONS:
            raise ConfigError(f"prefix_eviction must be one of {', '.join(PREFIX_EVICTIONS)}.")
        if self.step_log is not None and not isinstance(self.step_log, str):
            raise ConfigError("step_log must be a file name.")
        _check_range("max_model_len", self.max_model_len, 16, 2**24, optional=True)
        _check_range("self_test", self.self_test, 0, 64)
        _check_range("block_size", self.block_size, 1, 256)
        _check_range("kv_cache_mib", self.kv_cache_mib, 1, 2**24)
        _check_range("num_kv_blocks", self.num_kv_blocks, 2, 2**31, optional=True)
        _check_range("host_kv_mib", self.host_kv_mib, 0, 2**24, optional=True)
        _check_range("kv_disk_mib", self.kv_disk_mib, 1, 2**30)
        if self.kv_disk_dir is not None and (
            not isinstance(self.kv_disk_dir, str) or not self.kv_disk_dir
        ):
            raise ConfigError("kv_disk_dir must be a folder name.")
        if self.kv_disk_dir is not None and not (self.prefix_caching and self.host_kv_mib != 0):
            raise ConfigError("kv_disk_dir needs prefix_caching, and host_kv_mib above 0.")
        _check_range("memory_ceiling_mib", self.memory_ceiling_mib, 64, 2**24, optional=True)
        _check_range("max_num_seqs", self.max_num_seqs, 1, 4096)
        _check_range("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**20)
        _check_range("decode_stretch", self.decode_stretch, 1, 1000, whole=False)
        _check_range("max_queued_requests", self.max_queued_requests, 1, 2**20)
        _check_range("num_threads", self.num_threads, 1, 1024, optional=True)
        _check_range("worker_start_timeout_s", self.worker_start_timeout_s, 1, 86400, whole=False)
        _check_range("worker_stall_timeout_s", self.worker_stall_timeout_s, 1, 86400, whole=False)
        _check_default_sampling(self.default_sampling)
        _check_range("max_queued_tokens", self.max_queued_tokens, 1, 2**40, optional=True)
        most_seconds = self.max_request_seconds
        _check_range("max_request_seconds", most_seconds, 1, 86400, optional=True, whole=False)
        _check_range("max_preemptions", self.max_preemptions, 0, 100)
        _check_range("min_run_s", self.min_run_s, 0, 3600, whole=False)
        if self.policy not in POLICY_NAMES:
            raise ConfigError(f"policy must be one of {', '.join(POLICY_NAMES)}.")
        try:
            self.tier_table()
            self.tenant_table()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running sequence can decode in each step."
            )

    def tier_table(self) -> TierTable:
        """The service classes that a request's ``slo_class`` may name."""
        values = {DEFAULT_TIER: {}} if self.tiers is None else self.tiers
        return TierTable.from_dict(values, self.default_tier)

    def tenant_table(self) -> TenantTable:
        """Shares and limits of tenants."""
        return TenantTable.from_dict({} if self.tenants is None else self.tenants)

    @classmethod
    def from_dict(cls, values: Any) -> "EngineConfig":
        """Build from decoded YAML. Unknown keys raise ConfigError."""
        if not isinstance(values, dict):
            raise ConfigError("model.yaml must hold a mapping of setting names to values.")
        known = {field.name for field in fields(cls)}
        unknown = sorted(str(key) for key in set(values) - known)
        if unknown:
            raise ConfigError(
                f"unknown setting {unknown[0][:64]!r}. Allowed: {', '.join(sorted(known))}."
            )
        if "weights" not in values:
            raise ConfigError("weights is missing: name a model, a GGUF file or a folder.")
        return cls(**values)

    @classmethod
    def from_file(cls, path: Path) -> "EngineConfig":
        """Read ``model.yaml``. Raises ConfigError, naming the file."""
        values = read_yaml(path, path.name)
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{path.name}: {error}") from error


def read_yaml(path: Path, title: str) -> Any:
    """Decode a YAML file. Raises ConfigError, calling the file ``title``."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{title} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{title} is not UTF-8 text.") from error
    except RecursionError:
        raise ConfigError(f"{title} is not valid YAML: nested too deeply.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{title} is not valid YAML{where}.") from error
    except ValueError as error:  # a date or a number that cannot be one
        raise ConfigError(f"{title} is not valid YAML: {error}.") from error


def _check_default_sampling(values: Any) -> None:
    if not isinstance(values, dict):
        raise ConfigError("default_sampling must be a mapping of sampling parameters.")
    if "n" in values:  # clients count the choices that they asked for
        raise ConfigError("default_sampling must not set n: only a request does.")
    try:
        SamplingParams.from_dict(values)
    except RequestError as error:
        raise ConfigError(f"default_sampling: {error}") from error


def _check_range(
    name: str, value: Any, low: float, high: float, optional: bool = False, whole: bool = True
) -> None:
    if value is None and optional:
        return
    kind = "a whole number" if whole else "a number"
    allowed = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not low <= value <= high:
        raise ConfigError(f"{name} must be {kind} in [{low:g}, {high:g}].")

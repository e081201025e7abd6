"""Every knob in one typed place: flag > environment ``K3_*`` > config file > default.

A value that cannot be used is refused with the place it came from; an unknown ``K3_*`` variable or config key is
refused too, since a setting without effect misleads.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import platformdirs
from pydantic import ByteSize, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from deltafin import offline
from deltafin.errors import UsageError

ENV_PREFIX = "K3_"
MAX_CONFIG_BYTES = 1 << 20

# Read by other parts at import time or by tests; known here so that only misspelt variables are refused.
_OTHER_ENV = frozenset({"K3_CONFIG", "K3_ISA", "K3_TOKENIZER_DIR"})


class Settings(BaseSettings):
    """Effective settings; ``sources`` tells where each came from.

    Attributes:
        backend: what computes: ``auto`` (MLX on Apple Silicon, else PyTorch), ``torch`` or ``mlx``.
        precision: of activations: ``auto``, ``bf16`` or ``fp32``; PyTorch computes in fp32 only.
        home: folder for what Deltafin itself keeps (built-in model's install, manifests of in-place models).
        model: folder with released files, used where they are.
        store: folder of an install's manifest.
        ram: bytes for the whole process; None takes four fifths of the free memory.
        threads: compute threads; None takes the physical cores.
        context: positions for prompt and reply.
        depth: reads in flight per drive.
        draft: which draft proposes tokens; K3 alone decides them.
        draft_width: most proposals checked in one pass.
        draft_dir: folder with the subfolders ``dspark`` or ``qwen``.
        prefetch: whether experts are read ahead of their router.
        heat: whether a histogram of used experts is kept under ``home`` between runs.
        max_new: most tokens of a reply.
        reasoning_effort: K3's thinking effort in chats; ``none`` switches thinking off.
        state_ram: bytes for state points of earlier turns in RAM; None takes a sixteenth of the budget.
        state_disk: bytes for state points on disk, 0 for none; None takes a tenth of the free space, at most 64 GiB.
        host, port: where the server listens.
        api_key: what clients of the server must present.
        insecure_bind: whether the server may listen beyond this machine without a key.
        allow_host: host names, besides addresses and localhost, under which the server may be reached.
        cors_origin: origins of web pages that may call the server.
        max_tokens: most tokens of a reply of the server.
        max_request_bytes: most bytes of a request to the server.
        queue: generations that wait at the server while one runs.
        memo: whether the server answers identical requests from memory.
        resume: whether the server continues a reply that a crash cut, by the request's idempotency key.
        offline: never contact anything; also switched on by ``DELTAFIN_OFFLINE=1``.
        hub_hosts: further hosts, separated by commas, to which a hub may redirect downloads.
    """

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    home: Path = Field(default_factory=lambda: platformdirs.user_data_path("deltafin"))
    backend: Literal["auto", "torch", "mlx"] = "auto"
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    model: Path | None = None
    store: Path | None = None
    ram: ByteSize | None = Field(default=None, ge=1)
    threads: int | None = Field(default=None, ge=1, le=1024)
    context: int | None = Field(default=None, ge=16, le=1 << 24)
    depth: int | None = Field(default=None, ge=1, le=256)
    draft: Literal["auto", "off", "dspark", "qwen"] = "auto"
    draft_width: int | None = Field(default=None, ge=1, le=7)
    draft_dir: Path | None = None
    prefetch: bool = True
    heat: bool = True
    max_new: int = Field(default=512, ge=1, le=1 << 24)
    reasoning_effort: Literal["low", "high", "max", "none"] = "max"
    state_ram: ByteSize | None = Field(default=None, ge=0)
    state_disk: ByteSize | None = Field(default=None, ge=0)
    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=0, le=65535)
    api_key: SecretStr | None = Field(default=None, min_length=1)
    insecure_bind: bool = False
    allow_host: tuple[str, ...] = ()
    cors_origin: tuple[str, ...] = ()
    max_tokens: int = Field(default=1_000_000, ge=1, le=1 << 24)
    max_request_bytes: ByteSize = Field(default=ByteSize(128 << 20), ge=1024)
    queue: int = Field(default=0, ge=0, le=10_000)
    memo: bool = True
    resume: bool = False
    offline: bool = False
    hub_hosts: str = ""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _ConfigFile(settings_cls, _read_config_file())


class _ConfigFile(InitSettingsSource):
    """Values of the config file, below the environment."""


def config_path() -> Path:
    """The config file: ``K3_CONFIG``, else ``config.toml`` in the user's configuration folder."""
    named = os.environ.get("K3_CONFIG")
    return Path(named) if named else platformdirs.user_config_path("deltafin") / "config.toml"


def load_settings(flags: Mapping[str, Any]) -> tuple[Settings, dict[str, str]]:
    """Merges all sources.

    Args:
        flags: values from the command line; None means not given.

    Returns:
        (settings, name → "flag", "environment", "config file" or "default").

    Raises:
        UsageError: naming the setting, its value and where it came from.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if os.environ.get("DELTAFIN_OFFLINE", "").lower() not in ("", "0", "false", "no") or offline.forbidden():
        given["offline"] = True
    known = {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields} | _OTHER_ENV
    for name in os.environ:
        if name.startswith(ENV_PREFIX) and name not in known:
            raise UsageError(
                f"the environment variable {name} is not a setting of Deltafin",
                remedy=f"unset it; settings are {', '.join(sorted(known - _OTHER_ENV))}",
            )
    file_values = _read_config_file()
    sources = {}
    for name in Settings.model_fields:
        if name in given:
            sources[name] = "flag"
        elif f"{ENV_PREFIX}{name.upper()}" in os.environ:
            sources[name] = "environment"
        elif name in file_values:
            sources[name] = "config file"
        else:
            sources[name] = "default"
    try:
        settings = Settings(**given)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        where = sources.get(name, "config file")
        place = f" ({config_path()})" if where == "config file" else ""
        raise UsageError(
            f"{name} from the {where}{place}: {first['msg']} (found {str(first.get('input'))[:80]!r})",
            remedy=f"correct it; on the command line the flag is --{name.replace('_', '-')}",
        ) from None
    if settings.offline:
        offline.forbid()
    return settings, sources


def _read_config_file() -> dict[str, Any]:
    path = config_path()
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise UsageError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes", remedy="shorten or remove it")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if "K3_CONFIG" in os.environ:
            raise UsageError(
                f"K3_CONFIG names {path}, which does not exist", remedy="create it or unset K3_CONFIG"
            ) from None
        return {}
    except (OSError, ValueError) as e:
        raise UsageError(f"{path} cannot be read: {e}", remedy="correct or remove it") from None

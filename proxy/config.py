"""Settings of the proxy: flag > environment > default."""

import argparse
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import sparseety
from sparseety.errors import SparseetyError
from sparseety.segments import Rotation

PREFIX = "SPARSEETY_PROXY_"


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int  # 0: any free one

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    listen: Address = Address("127.0.0.1", 9000)
    admin: Address = Address("127.0.0.1", 9001)
    upstream: str = "http://127.0.0.1:8000"
    log_dir: Path = Path("logs")
    drain_seconds: float = 30.0
    allow_remote: bool = False
    exclusive: bool = False
    rotation: Rotation = field(default_factory=Rotation)


# Each parser raises ValueError with the words that follow `NAME="value" `.


def _address(value: str) -> Address:
    host, separator, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError("is not HOST:PORT; example: 127.0.0.1:9000")
    return Address(host, int(port))


def _url(value: str) -> str:
    try:
        url = urlsplit(value)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise ValueError("is not a URL; example: http://vllm:8000")
    if url.username is not None or url.password is not None:
        raise ValueError("holds credentials; clients bring their own, which pass through")
    if url.path not in ("", "/") or url.query or url.fragment:
        raise ValueError("has a path; give scheme, host and port, for the clients' paths pass through unchanged")
    return f"{url.scheme}://{url.netloc}"


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise ValueError("is not a number of seconds; example: 30")
    return seconds


def _switch(value: str) -> bool:
    if value.lower() in ("1", "true", "yes", "on"):
        return True
    if value.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("is neither true nor false; example: true")


@dataclass(frozen=True, slots=True)
class _Setting:
    parse: Callable[[str], Any]
    metavar: str | None  # None: a switch
    help: str


# The ports are part of addresses, and nothing here ends in _PORT: Kubernetes sets SPARSEETY_PROXY_PORT by itself, to a
# URL, wherever there is a service of the name sparseety-proxy.
_SETTINGS = {
    "listen": _Setting(_address, "HOST:PORT", "where clients connect (default: 127.0.0.1:9000)"),
    "admin": _Setting(_address, "HOST:PORT", "where /healthz, /readyz and /metrics are (default: 127.0.0.1:9001)"),
    "upstream": _Setting(_url, "URL", "the server to relay to (default: http://127.0.0.1:8000)"),
    "log_dir": _Setting(Path, "FOLDER", "where the capture log is written (default: logs)"),
    "drain_seconds": _Setting(_seconds, "SECONDS", "how long open requests may go on after a stop (default: 30)"),
    "allow_remote": _Setting(_switch, None, "allow addresses that other machines can reach"),
    "exclusive": _Setting(_switch, None, "state in the log that all requests of the upstream pass through this proxy"),
}


def read_config(argv: Sequence[str], environ: Mapping[str, str]) -> ProxyConfig:
    """Raises SparseetyError on a value that cannot be used, SystemExit on flags that do not exist, and for --help."""
    flags = vars(_parser().parse_args(argv))
    values: dict[str, Any] = {}
    for name, setting in _SETTINGS.items():
        flag, variable = _flag(name), PREFIX + name.upper()
        origin, value = (flag, flags[name]) if flags[name] is not None else (variable, environ.get(variable))
        if not value:
            continue  # an empty variable is one that is not set
        try:
            values[name] = setting.parse(value)
        except ValueError as error:
            raise SparseetyError(f'{origin}="{value}" {error}') from None
    config = ProxyConfig(**values)
    for name, address in (("listen", config.listen), ("admin", config.admin)):
        if not address.loopback and not config.allow_remote:
            raise SparseetyError(
                f"{_flag(name)} {address} can be reached from other machines, and no password is asked for there; "
                "add --allow-remote if that is meant"
            )
    return config


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparseety-proxy",
        description="Relay an OpenAI-compatible server byte for byte and record what its clients receive.",
        epilog=f"Each setting may also come from the environment, as {PREFIX}LISTEN and so on; flags come first.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sparseety-proxy {sparseety.__version__}")
    for name, setting in _SETTINGS.items():
        if setting.metavar is None:
            parser.add_argument(_flag(name), action="store_const", const="true", help=setting.help)
        else:
            parser.add_argument(_flag(name), metavar=setting.metavar, help=setting.help)
    return parser

"""How the values of settings are written: addresses, URLs, sizes, durations. Pure.

Each reader takes what stands in a flag, a variable or a file, and raises ValueError with the words that follow
`NAME="value" ` in the message to the user.
"""

import ipaddress
import math
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "b": 1} | {
    f"{letter}{end}": base**power
    for end, base in (("b", 1000), ("ib", 1024))
    for power, letter in enumerate("kmgt", start=1)
}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([a-z]*)", re.ASCII)


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


def read_address(value: Any) -> Any:
    if isinstance(value, Address | dict):
        return value
    host, separator, port = str(value).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError("is not HOST:PORT; example: 127.0.0.1:9000")
    return Address(host, int(port))


def read_url(value: Any) -> str:
    try:
        url = urlsplit(str(value))
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


def read_collector(value: Any) -> str | None:
    """Where spans go, or none. Without a path it is OTLP's own."""
    if value is None or value == "none":
        return None
    try:
        url = urlsplit(str(value))
        usable = url.scheme in ("http", "https") and bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:
        usable = False
    if not usable or url.query or url.fragment:
        raise ValueError("is not the URL of a collector; example: http://127.0.0.1:4318/v1/traces")
    if url.username is not None or url.password is not None:
        raise ValueError("holds credentials; give them in OTEL_EXPORTER_OTLP_HEADERS")
    return f"{url.scheme}://{url.netloc}{url.path if url.path.strip('/') else '/v1/traces'}"


def read_secret(value: Any) -> str:
    secret = str(value).strip()  # a file that it was read from ends in a newline
    if not secret:
        raise ValueError("is empty")
    return secret


def read_switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("1", "true", "yes", "on"):
        return True
    if str(value).lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("is neither true nor false; example: true")


def read_count(value: Any) -> int:
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 1024:
        raise ValueError("is not a whole number from 1 to 1024; example: 4")
    return int(text)


def read_number(value: Any) -> int:
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdigit()) or not 1 <= int(text) < 1 << 63:
        raise ValueError("is not a whole number above 0; example: 20000")
    return int(text)


def read_seconds(value: Any) -> float:
    """A duration; a bare number is seconds."""
    seconds = _amount(value, _SECONDS)
    if seconds is None or not seconds < 1e9:
        raise ValueError("is not a duration; examples: 30, 30s, 15min")
    return seconds


def read_some_seconds(value: Any) -> float:
    """A duration that is not nothing."""
    seconds = read_seconds(value)
    if not seconds:
        raise ValueError("leaves no time at all; example: 5s")
    return seconds


def read_limit(value: Any) -> float | None:
    """A duration, or none: without limit."""
    return None if value is None or value == "none" else read_some_seconds(value)


def read_bytes(value: Any) -> int:
    """A size; a bare number is bytes."""
    size = _amount(value, _BYTES)
    if size is None or size >= 1 << 63:
        raise ValueError("is not a size; examples: 268435456, 256MiB, 20GiB")
    return round(size)


def show(value: Any) -> str:
    """A value as it could be written in a flag."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def show_seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:g} s"


def show_bytes(value: int) -> str:
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        size = _BYTES[unit.lower()]
        if value >= size and value % size == 0:
            return f"{value // size} {unit}"
    return f"{value} bytes"


def _amount(value: Any, units: dict[str, Any]) -> float | None:
    """A number with one of these units; None: it is none, or negative."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if value >= 0 and math.isfinite(value) else None
    found = _AMOUNT.fullmatch(str(value).strip().lower())
    if not found or found[2] not in units:
        return None
    return float(found[1]) * float(units[found[2]])

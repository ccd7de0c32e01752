"""Settings of the proxy: flag > environment > sparseety.toml > default. Every value knows where it came from."""

import argparse
import difflib
import re
import stat
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, InitSettingsSource, SettingsConfigDict
from pydantic_settings.sources import PydanticBaseSettingsSource

import sparseety
from proxy import values
from proxy.catalogue import MODELS, series_bound
from proxy.values import Address
from sparseety.command import run_command
from sparseety.errors import SparseetyError

PREFIX = "SPARSEETY_PROXY_"
TABLE = "proxy"  # of sparseety.toml
DEFAULT_FILE = Path("sparseety.toml")

_Address = Annotated[Address, BeforeValidator(values.read_address)]
_Url = Annotated[str, BeforeValidator(values.read_url)]
_Switch = Annotated[bool, BeforeValidator(values.read_switch)]
_Count = Annotated[int, BeforeValidator(values.read_count)]
_Endpoint = Annotated[str | None, BeforeValidator(values.read_collector)]
_Number = Annotated[int, BeforeValidator(values.read_number)]
_Seconds = Annotated[float, BeforeValidator(values.read_seconds)]
_SomeSeconds = Annotated[float, BeforeValidator(values.read_some_seconds)]
_Limit = Annotated[float | None, BeforeValidator(values.read_limit)]
_Bytes = Annotated[int, BeforeValidator(values.read_bytes)]


def _setting(default: Any, metavar: str | None, text: str, *, secret: bool = False) -> Any:
    """metavar None: a switch. secret: no flag, for everyone on the machine can read those."""
    return Field(default=default, description=text, json_schema_extra={"metavar": metavar, "secret": secret})


class ProxyConfig(BaseModel):
    """All settings, checked one by one; `read_config` also checks what they are together.

    The ports are part of addresses, and nothing here ends in _port: Kubernetes sets SPARSEETY_PROXY_PORT by itself, to
    a URL, wherever there is a service of the name sparseety-proxy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: _Address = _setting(Address("127.0.0.1", 9000), "HOST:PORT", "where clients connect")
    admin: _Address = _setting(
        Address("127.0.0.1", 9001), "HOST:PORT", "where /healthz, /readyz, /metrics and /streams are"
    )
    upstream: _Url = _setting("http://127.0.0.1:8000", "URL", "the server to relay to")
    upstream_ca: Path | None = _setting(
        None, "FILE", "certificates (PEM) that an https upstream is checked against, instead of the system's"
    )
    workers: _Count = _setting(1, "N", "processes that relay; each writes a log file of its own")
    allow_remote: _Switch = _setting(False, None, "allow addresses that other machines can reach")
    admin_token: SecretStr | None = _setting(
        None, None, "what the admin port asks for; needed where other machines can reach it", secret=True
    )
    admin_token_file: Path | None = _setting(
        None, "FILE", "a file that holds the admin token; Prometheus can read the same one"
    )
    exclusive: _Switch = _setting(
        False, None, "state in the log that all requests of the upstream pass through this proxy"
    )

    timeout_connect: _SomeSeconds = _setting(5.0, "TIME", "for a connection to the upstream")
    timeout_write: _Limit = _setting(30.0, "TIME", "without the upstream taking a byte of a request")
    timeout_first_byte: _Limit = _setting(None, "TIME", "from the request to the head of its reply")
    timeout_idle: _Limit = _setting(None, "TIME", "between two reads of a reply")
    drain_delay: _Seconds = _setting(0.0, "TIME", "after a stop: how long to serve on, not ready, before closing")
    drain_seconds: _Seconds = _setting(30.0, "TIME", "after that: how long open requests may go on")

    log_dir: Path = _setting(Path("logs"), "FOLDER", "where the capture log is written")
    capture: _Switch = _setting(True, None, "record what passes; --no-capture: relay only")
    log_segment_bytes: _Bytes = _setting(256 << 20, "SIZE", "of a log file, after which a new one begins")
    log_segment_seconds: _SomeSeconds = _setting(900.0, "TIME", "of a log file, after which a new one begins")
    log_total_bytes: _Bytes = _setting(20 << 30, "SIZE", "of all log files; the oldest closed ones go first")
    log_min_free_bytes: _Bytes = _setting(5 << 30, "SIZE", "left free on the disk: below it nothing is recorded")
    log_compress: _Switch = _setting(True, None, "compress closed log files, where zstandard is installed")
    capture_body_bytes: _Bytes = _setting(32 << 20, "SIZE", "of a body that is copied; what is relayed has no limit")
    capture_event_bytes: _Bytes = _setting(1 << 20, "SIZE", "of one stream event that is read")
    metrics_models: _Count = _setting(
        MODELS, "N", "names of models that get series of their own on /metrics; the others are counted together"
    )
    max_series: _Number = _setting(
        20_000, "N", "that /metrics may come to; with more possible the proxy does not start"
    )
    otlp_endpoint: _Endpoint = _setting(
        None, "URL", "an OpenTelemetry collector that gets a span for each request, over HTTP; needs the extra otel"
    )
    otlp_content: _Switch = _setting(False, None, "put the text of replies into the spans")
    protect: _Switch = _setting(True, None, "pause the capture while its own cost delays the relay")
    protect_lag: _SomeSeconds = _setting(0.02, "TIME", "a delay by the capture that is too much")
    protect_after: _Seconds = _setting(30.0, "TIME", "how long it may last before the capture pauses")

    @field_validator("admin_token")
    @classmethod
    def _without_newline(cls, token: SecretStr | None) -> SecretStr | None:
        return token and SecretStr(values.read_secret(token.get_secret_value()))

    # The settings of other parts, by the names of those parts' own parameters.

    def timeouts(self) -> dict[str, float | None]:
        return {name: getattr(self, f"timeout_{name}") for name in ("connect", "write", "first_byte", "idle")}

    def rotation(self) -> dict[str, Any]:
        names = ("segment_bytes", "segment_seconds", "total_bytes", "min_free_bytes", "compress")
        return {name: getattr(self, f"log_{name}") for name in names}

    def limits(self) -> dict[str, int]:
        return {"body_bytes": self.capture_body_bytes, "event_bytes": self.capture_event_bytes}


@dataclass(frozen=True, slots=True)
class Loaded:
    config: ProxyConfig
    origins: dict[str, str]  # setting -> flag, variable, or file:line; absent: the default
    file: Path | None  # what was read


class _Settings(ProxyConfig, BaseSettings):
    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=PREFIX,
        env_ignore_empty=True,  # an empty variable is one that is not set
        enable_decoding=False,  # a value is what it says, not JSON
    )


def read_config(argv: Sequence[str]) -> ProxyConfig:
    return load_config(argv).config


def load_config(argv: Sequence[str]) -> Loaded:
    """Raises SparseetyError on what cannot be used, SystemExit on flags that do not exist, and for --help."""
    flags = {name: value for name, value in vars(_parser().parse_args(argv)).items() if value is not None}
    file = _file(flags.pop("config", None))
    table, lines = _read_file(file) if file else ({}, {})
    sources: list[tuple[PydanticBaseSettingsSource, dict[str, str]]] = [
        (InitSettingsSource(_Settings, flags), {name: _flag(name, value) for name, value in flags.items()}),
        (EnvSettingsSource(_Settings), {name: PREFIX + name.upper() for name in ProxyConfig.model_fields}),
        (InitSettingsSource(_Settings, table), {name: f"{file}:{line}" for name, line in lines.items()}),
    ]
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source, names in sources:
        for name, value in source().items():
            if name not in merged:
                merged[name], origins[name] = value, names[name]
    try:
        config = ProxyConfig.model_validate(merged)
    except ValidationError as error:
        raise SparseetyError(_words(error, origins)) from None
    if config.admin_token_file:
        config = _with_token(config, config.admin_token_file, origins)
    _check_together(config, origins)
    return Loaded(config, origins, file)


_USERINFO = re.compile(r"//[^/@]*@")


def _words(error: ValidationError, origins: dict[str, str]) -> str:
    first = error.errors()[0]
    name = str(first["loc"][0])
    reason = str(first.get("ctx", {}).get("error") or f"cannot be used: {first['msg']}")
    if _extra(name, "secret"):
        return f"{origins[name]} {reason}"
    in_file = f": {name}" if ":" in origins[name] else ""
    shown = _USERINFO.sub("//…@", values.show(first["input"]))  # a password in a URL is not for a screen or a log
    return f'{origins[name]}{in_file}="{shown}" {reason}'


def _with_token(config: ProxyConfig, file: Path, origins: dict[str, str]) -> ProxyConfig:
    """The same, with the admin token that a file holds. Raises SparseetyError."""
    origin = origins["admin_token_file"]
    if config.admin_token:
        raise SparseetyError(f"{origin}: the token is given by {origins['admin_token']} too; leave one of them away")
    try:
        token = values.read_secret(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SparseetyError(f"{origin}: {file}: {error.strerror}") from None
    except ValueError:  # not UTF-8, or empty; neither is quoted
        raise SparseetyError(f"{origin}: {file} holds no token; write one line of text into it") from None
    origins["admin_token"] = str(file)
    return config.model_copy(update={"admin_token": SecretStr(token)})


def _check_together(config: ProxyConfig, origins: dict[str, str]) -> None:
    for name, address in (("listen", config.listen), ("admin", config.admin)):
        if not address.loopback and not config.allow_remote:
            raise SparseetyError(
                f"{origins[name]}: {address} can be reached from other machines, and "
                + ("no password is asked for there; " if name == "listen" else "tells them what the proxy does; ")
                + "add --allow-remote if that is meant"
            )
    if not config.admin.loopback and not config.admin_token:
        raise SparseetyError(
            f"{origins['admin']}: {config.admin} can be reached from other machines and needs a token; "
            f"set {PREFIX}ADMIN_TOKEN to one that only your monitoring knows, or --admin-token-file to a file with it"
        )
    if (most := series_bound(config.metrics_models)) > config.max_series:
        raise SparseetyError(
            f"{origins.get('metrics_models', 'metrics_models')}: {config.metrics_models} names of models make up to "
            f"{most} series on /metrics, more than max_series ({config.max_series}); lower the one or raise the other"
        )
    if config.upstream_ca and not config.upstream.startswith("https:"):
        raise SparseetyError(f"{origins['upstream_ca']}: certificates, but the upstream {config.upstream} is not https")


# ----------------------------------------------------------------------------------------------------- the file


def _file(given: str | None) -> Path | None:
    if given is not None:
        return Path(given)
    try:
        return DEFAULT_FILE if stat.S_ISREG(DEFAULT_FILE.stat().st_mode) else None
    except PermissionError:  # a folder that this user may not enter: whether there are settings is not known
        return DEFAULT_FILE
    except OSError:
        return None


def _read_file(file: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The table of the proxy, and the line of each of its keys. Raises SparseetyError."""
    try:
        text = file.read_text(encoding="utf-8")
        whole = tomllib.loads(text)
    except OSError as error:
        raise SparseetyError(f"{file}: {error.strerror}; --config names the file with the settings") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SparseetyError(f"{file}: not TOML: {error}") from None
    _refuse_unknown(whole, [TABLE], "table", lambda name: f"{file}:{_lines(text, ()).get(name, 1)}")
    table = whole.get(TABLE, {})
    if not isinstance(table, dict):
        raise SparseetyError(f"{file}: {TABLE} is no table; write [{TABLE}] and the settings below it")
    lines = _lines(text, (TABLE,))
    _refuse_unknown(table, list(ProxyConfig.model_fields), "setting", lambda name: f"{file}:{lines[name]}")
    return table, lines


def _refuse_unknown(found: Iterable[str], known: list[str], kind: str, where: Callable[[str], str]) -> None:
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(name.replace("-", "_"), known, 1)
            hint = f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(known)}"
            raise SparseetyError(f'{where(name)}: no {kind} "{name}"; {hint}')


def _lines(text: str, path: tuple[str, ...]) -> dict[str, int]:
    """The line, from 1, on which each key of a table begins: where the text up to there first parses with it."""
    found: dict[str, int] = {}
    begin = 1
    whole = text.split("\n")
    for number in range(1, len(whole) + 1):
        try:
            table: Any = tomllib.loads("\n".join(whole[:number]))
        except tomllib.TOMLDecodeError:
            continue  # inside a value of several lines
        for name in path:
            table = table.get(name, {})
        for key in table:
            found.setdefault(key, begin)
        begin = number + 1
    return found


# ---------------------------------------------------------------------------------------------------- the flags


def _flag(name: str, value: object = None) -> str:
    return ("--no-" if value is False else "--") + name.replace("_", "-")


def _extra(name: str, what: str) -> Any:
    extra = ProxyConfig.model_fields[name].json_schema_extra
    assert isinstance(extra, dict)
    return extra[what]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparseety-proxy",
        description="Relay an OpenAI-compatible server byte for byte and record what its clients receive.",
        epilog=f"Each setting may also come from the environment, as {PREFIX}LISTEN and so on, or from the table "
        f"[{TABLE}] of {DEFAULT_FILE}, as listen and so on; flags come first, then the environment. `sparseety config "
        "show` tells what holds. Times: 30, 30s, 15min, none. Sizes: 1048576, 256MiB, 20GiB.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sparseety-proxy {sparseety.__version__}")
    parser.add_argument("--config", metavar="FILE", help=f"settings (default: {DEFAULT_FILE}, if it is there)")
    for name, field in ProxyConfig.model_fields.items():
        metavar, text = _extra(name, "metavar"), f"{field.description} (default: {show_value(name, field.default)})"
        if _extra(name, "secret"):
            continue
        if metavar is None:
            parser.add_argument(_flag(name), action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            parser.add_argument(_flag(name), metavar=metavar, help=text)
    return parser


def show_value(name: str, value: Any) -> str:
    """A value for people: no secret is among them."""
    if _extra(name, "secret"):
        return "(set)" if value else "none"
    match _extra(name, "metavar"):
        case "TIME":
            return values.show_seconds(value)
        case "SIZE":
            return values.show_bytes(value)
    return values.show(value)


def show_config(argv: list[str] | None = None) -> int:
    """The command `sparseety config`."""
    return run_command(lambda: _show_config(sys.argv[1:] if argv is None else argv))


def _show_config(argv: list[str]) -> int:
    if argv[:1] != ["show"]:
        print("usage: sparseety config show [--config FILE] [FLAGS OF sparseety-proxy]", file=sys.stderr)
        return 0 if argv[:1] in (["-h"], ["--help"]) else 2
    loaded = load_config(argv[1:])
    rows = [
        (name, show_value(name, getattr(loaded.config, name)), loaded.origins.get(name, "default"))
        for name in ProxyConfig.model_fields
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, origin in rows:
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}")
    return 0

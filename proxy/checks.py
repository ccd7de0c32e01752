"""What `sparseety doctor` looks at of the proxy: its settings, whether it runs, is ready, and publishes."""

import json
from collections.abc import Iterator
from pathlib import Path

from proxy.config import ProxyConfig, load_config
from sparseety.asking import Answer, NoAnswer, ask
from sparseety.checks import Part, Result, Subject, fail, ok, unknown, warn
from sparseety.errors import SparseetyError


def _settle(subject: Subject) -> Iterator[Result]:
    """What the settings say is what is looked at, where nobody says otherwise."""
    try:
        loaded = load_config(["--config", str(subject.config)] if subject.config else [])
    except SparseetyError as error:
        yield fail("proxy.settings", str(error), "sparseety config show")
        loaded = None
    config = loaded.config if loaded else ProxyConfig()
    subject.log_dirs = subject.log_dirs or [config.log_dir]
    subject.upstream = subject.upstream or config.upstream
    subject.upstream_ca = subject.upstream_ca or config.upstream_ca
    subject.min_free_bytes = config.log_min_free_bytes
    if subject.admin is None:
        subject.admin = f"http://{_near(config)}"
    if config.admin_token:
        subject.admin_token = config.admin_token.get_secret_value()
    if loaded:
        where = str(loaded.file or "no file; flags, variables and defaults")
        yield ok("proxy.settings", f"{where}: {config.upstream} behind it, logs in {config.log_dir}")
        if not config.capture:
            yield warn("proxy.capture", "capture is off: nothing is recorded, so nothing is verified", "capture = true")


def _near(config: ProxyConfig) -> str:
    """Where the admin port is reached from this machine."""
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
    address = config.admin
    return f"{everywhere[address.host]}:{address.port}" if address.host in everywhere else str(address)


def _check(subject: Subject) -> Iterator[Result]:
    inside = [log for log in subject.newest("proxy") if log.opening.scope.mounting == "middleware"]
    if inside:
        yield ok("proxy.alive", f"the capture is mounted in the server itself: {inside[0].path}")
        yield _writes(subject)
        return
    try:
        alive = ask(f"{subject.admin}/healthz", seconds=subject.seconds)
    except NoAnswer as error:
        fix = f"sparseety-proxy --upstream {subject.upstream}; or name its admin port: --admin URL"
        yield fail("proxy.alive", f"no proxy at {subject.admin}: {error}", fix)
        return
    if alive.status != 200:
        yield fail("proxy.alive", f"{subject.admin}/healthz says {alive.status}", "is that the proxy's admin port?")
        return
    yield ok("proxy.alive", f"a proxy answers at {subject.admin}")
    yield _ready(subject)
    yield _metrics(subject)
    yield _writes(subject)


def _asked(subject: Subject, path: str) -> Answer:
    return ask(f"{subject.admin}{path}", seconds=subject.seconds, token=subject.admin_token)


def _ready(subject: Subject) -> Result:
    try:
        answer = _asked(subject, "/readyz")
        told = json.loads(answer.text)
    except (NoAnswer, ValueError) as error:
        return fail("proxy.ready", f"{subject.admin}/readyz: {error}", "see the proxy's output")
    if answer.status == 200:
        return ok("proxy.ready", "it takes requests")
    given = told.get("reasons") if isinstance(told, dict) else None
    reasons = "; ".join(map(str, given if isinstance(given, list) else [])) or "it tells why to who has the admin token"
    return fail("proxy.ready", f"it takes no requests: {reasons}", "docs/operations.md#health-checks")


def _metrics(subject: Subject) -> Result:
    name, url = "proxy.metrics", f"{subject.admin}/metrics"
    try:
        answer = _asked(subject, "/metrics")
    except NoAnswer as error:
        return fail(name, f"{url}: {error}", "see the proxy's output")
    if answer.status == 401:
        has = "another than the one here" if subject.admin_token else "and none is set here"
        fix = "SPARSEETY_PROXY_ADMIN_TOKEN or SPARSEETY_PROXY_ADMIN_TOKEN_FILE, as for the proxy"
        return unknown(name, f"{url} asks for the admin token, {has}", fix)
    if answer.status != 200 or "sparseety_build_info" not in answer.text:
        return fail(name, f"{url} says {answer.status} and has no metrics of the proxy", "is it another server?")
    return ok(name, f"{url} has the proxy's metrics")


def _writes(subject: Subject) -> Result:
    """Does what it records come to the folder that is looked at?"""
    logs = subject.newest("proxy")
    folders = ", ".join(map(str, subject.log_dirs))
    if not logs and subject.unread:
        return unknown("proxy.log", f"no log of a proxy in {folders} that can be read", "see logs.readable")
    if not logs:
        fix = "name the proxy's folder: --log-dir FOLDER; with --no-capture it writes none"
        return fail("proxy.log", f"no log of a proxy in {folders}", fix)
    log = logs[0]
    if log.alive:
        return ok("proxy.log", _written(log.path, log.age))
    if log.alive is None:
        return unknown("proxy.log", f"{log.path} is of another machine: whether it is written cannot be told from here")
    fix = "is its folder another one? Name it: --log-dir FOLDER"
    return fail("proxy.log", f"nobody writes {log.path} any more", fix)


def _written(path: Path, age: float) -> str:
    return f"{path}, last written {age:.0f} s ago"


PART = Part(check=_check, settle=_settle)

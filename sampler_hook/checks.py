"""What `sparseety doctor` looks at of the plugin: is this vLLM one it knows, does it write, is all attached."""

import os
import re
from collections import Counter
from collections.abc import Iterator

from sampler_hook import adapters
from sampler_hook.catalogue import HOOKS
from sampler_hook.settings import HookSettings
from sparseety.checks import FoundLog, Part, Result, Subject, count_of, fail, ok, unknown, warn
from sparseety.errors import SparseetyError

_TESTED = ", ".join(f"{release}.x" for release in adapters.TESTED)
_PART_OF = {f"{owner}.{name}": part for (_, owner), points in adapters.POINTS.items() for name, part in points}
_INSTALL = (
    "pip install sparseety in vLLM's own environment, start it with SPARSEETY_HOOK_DIR, and have sparseety in "
    "VLLM_PLUGINS where that is set; vLLM's output says in a line that begins with sparseety what became of it"
)


def _settle(subject: Subject) -> Iterator[Result]:
    """In vLLM's own environment the folder is known from here."""
    try:
        settings = HookSettings.from_env(os.environ)
    except SparseetyError as error:
        yield fail("plugin.settings", str(error), "docs/vllm-plugin.md#settings")
        return
    if settings and settings.folder not in [folder.absolute() for folder in subject.log_dirs]:
        subject.log_dirs.append(settings.folder)


def _check(subject: Subject) -> Iterator[Result]:
    logs = subject.newest("engine")
    published = _published(subject.upstream_metrics or "")
    yield from _version(subject, alive=any(log.alive for log in logs))
    yield from _alive(subject, logs, published)
    for log in logs:
        if log.engine and log.alive is not False:
            yield _hooks(str(log.path), log.engine.hooks_expected, log.engine.hooks_attached)
    methods = {site: counts for site, counts in published.items() if site in _PART_OF}
    if methods and not any(log.engine and log.alive is not False for log in logs):
        attached = [site for site, counts in methods.items() if counts["attached"]]
        yield _hooks(f"{subject.upstream}/metrics", list(methods), attached)
    for site in published.keys() - methods.keys():  # in the model, counted by module; no engine's log knows of them
        yield _in_model(site, published[site]["expected"], published[site]["attached"])


def _version(subject: Subject, *, alive: bool) -> Iterator[Result]:
    name, version = "plugin.version", subject.upstream_version
    if version is None:
        yield unknown(name, f"which vLLM serves is not known, so not whether the plugin knows it ({_TESTED})")
        return
    try:
        adapters.check_version(version, untested=False)
    except SparseetyError:
        text = f"vLLM {version} is not one that the plugin was tested with ({_TESTED})"
        if alive:
            yield warn(name, f"{text}; it works with it because it was told to", "compare replies with and without it")
        else:
            yield fail(name, f"{text}, and it refuses others", "another vLLM, or SPARSEETY_HOOK_UNTESTED=1")
        return
    yield ok(name, f"vLLM {version} is in the range that the plugin is tested with: {_TESTED}")


def _alive(subject: Subject, logs: list[FoundLog], published: dict[str, Counter[str]]) -> Iterator[Result]:
    name = "plugin.alive"
    folders = ", ".join(map(str, subject.log_dirs)) or "no folder"
    if not logs and subject.unread:
        yield unknown(name, f"no log of an engine in {folders} that can be read", "see logs.readable")
    elif not logs:
        if published:
            text = f"the plugin is in the vLLM at {subject.upstream}, and no log of it is in {folders}"
            yield fail(name, text, "name the folder that SPARSEETY_HOOK_DIR names: --log-dir FOLDER")
        elif subject.upstream_metrics is None:
            yield fail(name, f"no log of an engine in {folders}", _INSTALL)
        else:
            text = f"no log of an engine in {folders}, and no metric of the plugin at {subject.upstream}/metrics"
            yield fail(name, text, _INSTALL)
    for log in logs:
        text = f"{log.path}, last written {log.age:.0f} s ago"
        if log.alive:
            yield ok(name, text)
        elif log.alive is None:
            text = f"{text}, by another machine: whether it still is cannot be told from here"
            yield (
                ok(name, f"{text}; its metrics are there") if published else unknown(name, text, "look on that machine")
            )
        else:
            fix = "vLLM runs without the plugin now, or writes elsewhere (--log-dir FOLDER), or was switched off: "
            yield fail(name, f"{text}: nobody writes it any more", fix + _INSTALL)


def _hooks(where: str, expected: list[str], attached: list[str]) -> Result:
    name = "plugin.hooks"
    lacking = [hook for hook in expected if hook not in attached]
    if not expected:
        return unknown(name, f"{where} does not say what was to be attached")
    counts = f"{len(expected)} hooks expected, {len(expected) - len(lacking)} attached ({where})"
    if not lacking:
        return ok(name, counts)
    fix = "vLLM's output says why; docs/vllm-plugin.md#supported-versions"
    if len(lacking) == len(expected) or any(_PART_OF.get(hook) == "tokens" for hook in lacking):
        return fail(name, f"{counts}; lacking: {', '.join(lacking)}", fix)
    return warn(name, f"{counts}; lacking: {', '.join(lacking)}: their part is not recorded", fix)


def _in_model(site: str, expected: int, attached: int) -> Result:
    counts = f"{expected} hooks expected in the model ({site}), {attached} attached"
    if attached == expected:
        return ok("plugin.hooks", counts)
    fix = "vLLM's output says which and why; docs/sparsity.md"
    return (warn if attached else fail)("plugin.hooks", f"{counts}: of the others nothing is counted", fix)


def _published(page: str) -> dict[str, Counter[str]]:
    """By site, how many hooks are expected, attached, fired. Empty: the plugin is not in there."""
    found: dict[str, Counter[str]] = {}
    for labels, value in re.findall(rf"^{HOOKS.name}{{([^}}]*)}} (\S+)", page, re.M):
        told = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if "site" in told and "state" in told:
            found.setdefault(told["site"], Counter())[told["state"]] += count_of(value)
    return {site: counts for site, counts in found.items() if counts["expected"]}


PART = Part(check=_check, settle=_settle)

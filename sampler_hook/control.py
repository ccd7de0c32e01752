"""What changes while vLLM runs: one small JSON file, looked at once a second.

    {"on": true, "capture": ["tokens", "kv"], "sample": 0.001, "force": ["chatcmpl-81c0"], "near_zero": 1e-6}

Every field may be left out; then what the environment says holds. So it does while there is no file.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from sampler_hook.settings import KINDS, HookSettings
from sparseety.errors import SparseetyError
from sparseety.sampling import chosen, join_key, threshold

_MAX_BYTES = 1 << 20


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    on: bool = True
    capture: list[str] | None = None
    sample: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    force: list[str] = []
    near_zero: Annotated[float, msgspec.Meta(ge=0)] | None = None


class Control(msgspec.Struct, frozen=True):
    """What holds now."""

    on: bool
    capture: frozenset[str]
    sample: float
    force: frozenset[str]  # ids that are recorded whatever the rate: the reply's, or the X-Request-Id in it
    near_zero: float

    def wants(self, key: bytes, external_id: str) -> str:
        """Whether a request is recorded: captured, forced or skipped."""
        if self.sample >= 1.0:
            return "captured"
        reply_id = join_key(external_id)
        if self.force and (reply_id in self.force or reply_id.partition("-")[2] in self.force):
            return "forced"
        return "captured" if chosen(key, reply_id, threshold(self.sample)) else "skipped"


def from_settings(settings: HookSettings) -> Control:
    return Control(True, settings.capture, settings.sample, frozenset(), settings.near_zero)


class ControlFile:
    """Tells when the file says something new."""

    def __init__(self, settings: HookSettings) -> None:
        self._path, self._default = settings.control, from_settings(settings)
        self._seen: tuple[int, int, int] | None = None
        self.now = self._default

    def changed(self) -> bool:
        """Look at the file; True where `now` is another than before.

        Raises SparseetyError, once for each content, where it cannot be used; `now` stays as it was.
        """
        if self._path is None:
            return False
        try:
            stat = self._path.stat()
        except OSError:
            seen, wanted = None, self._default
        else:
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if seen == self._seen:
                return False
            self._seen = seen
            wanted = self._read(self._path)
        self._seen = seen
        before, self.now = self.now, wanted
        return before != wanted

    def _read(self, path: Path) -> Control:
        try:
            with path.open("rb") as file:
                content = msgspec.json.decode(file.read(_MAX_BYTES), type=_File)
            capture = self._default.capture if content.capture is None else frozenset(content.capture) | {"tokens"}
            if unknown := capture - KINDS:
                raise ValueError(
                    f"{', '.join(sorted(unknown))} is not one of {', '.join(sorted(KINDS))} - at `$.capture`"
                )
        except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise SparseetyError(f"{path}: {error}; what held before holds on") from None
        return Control(
            content.on,
            capture,
            self._default.sample if content.sample is None else content.sample,
            frozenset(content.force),
            self._default.near_zero if content.near_zero is None else content.near_zero,
        )

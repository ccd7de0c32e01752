"""HTTP as a monitor asks: one GET, no redirect, no proxy of the environment, bounded in time and size."""

import http.client
import queue
import ssl
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO

_MAX_BYTES = 32 << 20


class NoAnswer(Exception):
    """Nobody answers there. The message says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    text: str


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        """A token is for the one it was meant for."""


def ask(
    url: str, *, seconds: float, token: str | None = None, accept: str = "*/*", certificates: Path | None = None
) -> Answer:
    """Raises NoAnswer, after `seconds` at the latest.

    A socket's own limit is for one read of it: who sends a byte now and then would hold us up for ever. Hence a thread,
    which is left behind where it takes longer.
    """
    come: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()

    def wait_for_it() -> None:
        try:
            come.put(_asked(url, seconds, token, accept, certificates))
        except Exception as error:  # noqa: BLE001 -- it is raised where it was asked for
            come.put(error)

    threading.Thread(target=wait_for_it, name=f"ask {url}", daemon=True).start()
    try:
        answer = come.get(timeout=seconds)
    except queue.Empty:
        raise NoAnswer(_words(TimeoutError())) from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _asked(url: str, seconds: float, token: str | None, accept: str, certificates: Path | None) -> Answer:
    headers = {"Accept": accept} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        context = ssl.create_default_context(cafile=certificates)
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), _NoRedirect()
        )
        try:
            with opener.open(urllib.request.Request(url, headers=headers), timeout=seconds) as reply:
                return Answer(reply.status, _read(reply))
        except urllib.error.HTTPError as error:  # a status that is no success; its body may break off like any other
            with error:
                return Answer(error.code, _read(error))
    except urllib.error.URLError as error:
        raise NoAnswer(_words(error.reason)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoAnswer(_words(error)) from None


def _read(reply: IO[bytes]) -> str:
    return reply.read(_MAX_BYTES).decode("utf-8", "replace")


def _words(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__

"""HTTP as a monitor asks: one GET, no redirect, no proxy of the environment, bounded in time and size."""

import http.client
import ssl
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
    """Raises NoAnswer."""
    headers = {"Accept": accept} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        context = ssl.create_default_context(cafile=certificates)
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), _NoRedirect()
        )
        with opener.open(urllib.request.Request(url, headers=headers), timeout=seconds) as reply:
            return Answer(reply.status, _read(reply))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, _read(error))
    except urllib.error.URLError as error:
        raise NoAnswer(_words(error.reason)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoAnswer(_words(error)) from None


def _read(reply: IO[bytes]) -> str:
    try:
        return reply.read(_MAX_BYTES).decode("utf-8", "replace")
    except http.client.HTTPException as error:
        raise NoAnswer(_words(error)) from None


def _words(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__

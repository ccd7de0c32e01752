"""What the process says on stderr holds nothing of what passes through it, at no level.

The text of an exception may quote a header or a URL, and a credential with it; libraries log whole messages when they
are asked to be talkative. So: types and places of errors, not their words; no library's account of the traffic.
"""

import logging
import traceback

_OURS_AND_BELOW = ("sparseety.proxy", "uvicorn.error", "asyncio")
_TALKATIVE = ("httpcore", "httpx", "uvicorn.asgi", "uvicorn.access")


def keep_contents_out() -> None:
    """Call it once before serving; calling it again does no harm."""
    for name in _OURS_AND_BELOW:
        logging.getLogger(name).addFilter(_without_words)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)


def _without_words(record: logging.LogRecord) -> bool:
    if record.name == "asyncio":  # its further lines show tasks and their exceptions by repr()
        record.msg, record.args = record.getMessage().partition("\n")[0], None
    if record.exc_info and record.exc_info[1]:
        record.exc_text, record.exc_info = _trace(record.exc_info[1]), None
    return True


def _trace(error: BaseException) -> str:
    """A traceback without the words of the errors in it."""
    parts = []
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        frames = "".join(traceback.format_tb(link.__traceback__))
        parts.append(f"Traceback (most recent call last):\n{frames}{type(link).__qualname__} (its text is left out)")
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return "\n\nThe above exception led to:\n\n".join(reversed(parts))

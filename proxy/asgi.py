"""The ASGI 3 types that this package uses, so that its core depends on no framework."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

RECEIVED = "sparseety.received"  # in a scope's state: when its request's last byte came, by the monotonic clock

"""The ASGI 3 types that this package uses, so that its core depends on no framework."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CLIENT = "sparseety.client"  # in a scope's state: its ClientState


class ClientState:
    """What ASGI has no place for, from the front to the relay."""

    __slots__ = ("left", "on_leave", "received")

    def __init__(self) -> None:
        self.received: float | None = None  # when the request's last byte came, by the monotonic clock
        self.left = False  # before its reply was complete
        self.on_leave: Callable[[], object] | None = None  # called when it does

    def leave(self) -> None:
        self.left = True
        if self.on_leave is not None:
            self.on_leave()

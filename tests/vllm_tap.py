"""An ASGI middleware for `vllm serve --middleware`: hashes each reply's body where vLLM sends it.

One JSON line a reply goes to the file that SPARSEETY_TEST_TAP names. Standard library only: it runs inside vLLM.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any


class HashBodies:
    def __init__(self, app: Any) -> None:
        self._app = app
        self._file = Path(os.environ["SPARSEETY_TEST_TAP"])

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode().lower(): value.decode("latin-1") for name, value in scope["headers"]}
        digest, size = hashlib.sha256(), 0

        async def tapped(message: Any) -> None:
            nonlocal size
            if message["type"] == "http.response.body":
                digest.update(message.get("body", b""))
                size += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, tapped)
        finally:
            line = {"request_id": headers.get("x-request-id"), "sha256": digest.hexdigest(), "bytes": size}
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")

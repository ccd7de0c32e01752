"""What the proxy answers in the upstream's stead: OpenAI's error form, and a header that says whose answer it is."""

import json
from dataclasses import dataclass
from http import HTTPStatus


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    code: str
    message: str

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.code, "param": None, "code": self.status}
        return json.dumps({"error": error}).encode()

    def headers(self, body: bytes) -> list[tuple[bytes, bytes]]:
        return [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-sparseety-error", self.code.encode()),
        ]

    def reply(self) -> bytes:
        """The whole reply, after which the connection is closed."""
        body = self.body()
        lines = [b"HTTP/1.1 %d %b" % (self.status, HTTPStatus(self.status).phrase.encode())]
        lines += [name + b": " + value for name, value in self.headers(body)]
        return b"\r\n".join([*lines, b"connection: close", b"", body])


INTERNAL = Refusal(500, "internal_error", "the proxy failed on this request")

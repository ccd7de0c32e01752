"""One raw request and what came of it, at both ends: what the upstream received, and what the client got."""

from dataclasses import dataclass

from proxy.headers import HOP_BY_HOP
from tests.raw_upstream import RawClient

Headers = list[tuple[bytes, bytes]]


@dataclass
class Message:
    """A request or a reply: its first line, its headers as they stand, its body without its framing."""

    line: bytes
    headers: Headers
    body: bytes = b""

    def comparable(self) -> "Message":
        """Less what docs/transparency.md lists for all messages: case and whitespace, hop-by-hop headers, reason."""
        headers = [(name.lower(), value.strip(b" \t")) for name, value in self.headers]
        named = {
            option.strip().lower() for name, value in headers if name == b"connection" for option in value.split(b",")
        }
        dropped = HOP_BY_HOP | (named - {b"content-length", b"host"})
        line = self.line
        if line.startswith(b"HTTP/"):
            line = line.split()[1]
        return Message(line, [header for header in headers if header[0] not in dropped], self.body)


def parse_head(head: bytes) -> Message:
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    return Message(first, [(name, value.removeprefix(b" ")) for name, _, value in (x.partition(b":") for x in lines)])


def read_reply(client: RawClient, method: bytes = b"GET") -> Message:
    """The next final reply, whatever its framing. Fails where it is cut off."""
    reply = parse_head(client.read_until(b"\r\n\r\n"))
    status = int(reply.line.split()[1])
    if status < 200:
        return read_reply(client, method)
    headers = {name.lower(): value.strip(b" \t") for name, value in reply.headers}
    if method == b"HEAD" or status in (204, 304):
        pass
    elif headers.get(b"transfer-encoding") == b"chunked":
        reply.body = _dechunked(client)
    elif b"content-length" in headers:
        reply.body = client.read_exactly(int(headers[b"content-length"]))
    else:
        reply.body = client.read_to_end()
    return reply


def _dechunked(client: RawClient) -> bytes:
    body = b""
    while size := int(client.read_until(b"\r\n").partition(b";")[0], 16):
        body += client.read_exactly(size + 2)[:-2]
    while client.read_until(b"\r\n") != b"\r\n":
        pass  # trailers
    return body

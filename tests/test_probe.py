"""The health check of the images."""

import pytest

from sparseety import probe
from tests.raw_upstream import reply, running_upstream


@pytest.mark.parametrize(("status", "code"), [(b"200 OK", 0), (b"503 Service Unavailable", 1), (b"204 No Content", 1)])
def test_only_200_is_healthy(status, code, monkeypatch, capsys):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # which is for the way out
    with running_upstream(reply(b"", b"connection: close", status=status)) as upstream:
        assert probe.main([f"{upstream.url}/readyz"]) == code
        assert upstream.next_request().request_line == b"GET /readyz HTTP/1.1"
    assert ("503" in capsys.readouterr().err) == status.startswith(b"503")


def test_nobody_there_is_unhealthy_and_says_so(capsys):
    assert probe.main(["http://127.0.0.1:1/healthz"]) == 1
    assert "refused" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["healthz"], ["http://a/", "http://b/"]])
def test_wrong_use_is_2(arguments):
    assert probe.main(arguments) == 2

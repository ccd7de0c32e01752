"""The capture pauses while its own cost delays the relay, and resumes by itself."""

import os
import threading
import time

import pytest

from proxy.capture import RequestCapture
from proxy.protect import CALM_SECONDS, LONGEST_HOLD, Guard, Thresholds
from sparseety.records import Gap, RequestStart, Response, StreamDone
from tests.raw_upstream import (
    EVENT_STREAM,
    LAST_CHUNK,
    WAIT,
    chunk,
    chunked,
    post,
    records,
    running_proxy,
    running_upstream,
)

LOOK = 0.1


def looks(guard: Guard, seconds: float, *, lag: float = 0.0, spent: float | None = None, fill: float = 0.0) -> float:
    """Look at the same state for so long, or until the guard changes its mind; returns the seconds that took."""
    passed = 0.0
    while passed < seconds - 1e-9:
        guard.spent = lag if spent is None else spent
        passed += LOOK
        if guard.look(LOOK, lag, fill):
            break
    return passed


def paused_guard() -> Guard:
    guard = Guard(Thresholds())
    assert looks(guard, 60, lag=0.05) < 60
    assert guard.paused == "latency"
    return guard


def test_a_delay_by_the_capture_that_lasts_pauses_it():
    guard = Guard(Thresholds(lag=0.02, after=30))
    assert looks(guard, 60, lag=0.021) == pytest.approx(30, abs=2 * LOOK)
    assert guard.paused == "latency"


def test_a_delay_that_is_not_the_captures_doing_is_none_of_its_business():
    guard = Guard(Thresholds(lag=0.02, after=30))
    assert looks(guard, 600, lag=1.0, spent=0.019) == pytest.approx(600)
    assert guard.paused is None


def test_work_of_the_capture_that_delays_nobody_is_no_trouble():
    guard = Guard(Thresholds(lag=0.02, after=30))
    assert looks(guard, 600, lag=0.001, spent=0.09) == pytest.approx(600)


def test_delays_that_come_and_go_within_a_second_are_one_bad_time():
    guard = Guard(Thresholds(lag=0.02, after=30))
    for _ in range(29):
        looks(guard, LOOK, lag=0.05)
        looks(guard, CALM_SECONDS - 2 * LOOK)
    assert guard.paused is None
    for _ in range(20):
        looks(guard, LOOK, lag=0.05)
        if guard.paused:
            break
        looks(guard, CALM_SECONDS - 2 * LOOK)
    assert guard.paused == "latency"


def test_a_bad_time_that_ends_is_forgotten():
    guard = Guard(Thresholds(lag=0.02, after=30))
    for _ in range(50):
        looks(guard, 25, lag=0.05)
        looks(guard, CALM_SECONDS + LOOK)
    assert guard.paused is None


def test_a_queue_that_stays_full_pauses_the_capture_until_it_is_half_empty():
    guard = Guard(Thresholds(fill=0.9, after=30))
    looks(guard, 60, fill=0.95)
    assert guard.paused == "disk"
    looks(guard, 600, fill=0.5)
    assert guard.paused == "disk"
    looks(guard, 60, fill=0.4)
    assert guard.paused is None


def test_it_resumes_when_the_whole_loop_has_been_well_for_as_long():
    guard = paused_guard()
    looks(guard, 300, lag=0.011, spent=0.0)  # above half the threshold: to resume would bring the trouble back
    assert guard.paused
    looks(guard, 29, lag=0.001)
    looks(guard, LOOK, lag=0.5)  # one relapse, and the waiting begins anew
    looks(guard, 29, lag=0.001)
    assert guard.paused
    looks(guard, 2, lag=0.001)
    assert guard.paused is None


def test_trouble_that_comes_back_at_once_makes_each_pause_twice_as_long_up_to_a_limit():
    guard = paused_guard()
    pauses = []
    for _ in range(8):
        pauses.append(looks(guard, 2 * LONGEST_HOLD))
        assert guard.paused is None
        looks(guard, 60, lag=0.05)
        assert guard.paused
    assert pauses == pytest.approx([30, 60, 120, 240, 480, 600, 600, 600], abs=2 * LOOK)


def test_after_a_long_good_time_a_pause_is_short_again():
    guard = paused_guard()
    for _ in range(3):
        looks(guard, 2 * LONGEST_HOLD)
        looks(guard, 60, lag=0.05)
    looks(guard, 2 * LONGEST_HOLD)
    looks(guard, 10_000)
    looks(guard, 60, lag=0.05)
    assert looks(guard, 2 * LONGEST_HOLD) == pytest.approx(30, abs=2 * LOOK)


EVENT = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


SHORT = (chunked(EVENT_STREAM), chunk(EVENT), chunk(DONE), LAST_CHUNK)


@pytest.fixture
def slow(monkeypatch):
    """While it is set, the capture takes its time over every read."""
    slow, read = threading.Event(), RequestCapture.reply_body
    slow.set()

    def reply_body(*args):
        if slow.is_set():
            time.sleep(0.03)
        return read(*args)

    monkeypatch.setattr(RequestCapture, "reply_body", reply_body)
    return slow


def ask(proxy, name: bytes) -> None:
    with proxy.client() as client:
        client.send(post(b"{}", b"x-request-id: " + name))
        assert client.read_reply() == (200, EVENT + DONE)


def is_paused(proxy) -> bool:
    return bool(proxy.metric("sparseety_capture_paused", reason="latency"))


def until(true, meanwhile=lambda: time.sleep(0.02)) -> None:
    deadline = time.monotonic() + WAIT
    while not true():
        assert time.monotonic() < deadline
        meanwhile()


def test_a_slow_capture_is_paused_said_counted_and_recorded_while_every_byte_arrives(tmp_path, slow, caplog):
    go_on, end = threading.Event(), threading.Event()
    long = (chunked(EVENT_STREAM), chunk(EVENT), go_on, chunk(EVENT), end, chunk(DONE), LAST_CHUNK)
    settings = {"protect_lag": 0.01, "protect_after": 0.3}
    with running_upstream(*long) as upstream, running_proxy(tmp_path, upstream.url, **settings) as proxy:
        upstream.scripts.append(SHORT)
        with proxy.client() as client:
            client.send(post(b"{}", b"x-request-id: open"))
            until(lambda: is_paused(proxy), lambda: ask(proxy, b"before"))
            assert b'sparseety_capture_paused{reason="latency",source="proxy"} 1.0' in proxy.admin("/metrics")[1]
            assert proxy.admin("/readyz")[0] == 200  # it serves, which is what it pauses for
            go_on.set()
            client.read_until(EVENT)
            client.read_until(EVENT)
            ask(proxy, b"while")
            slow.clear()
            until(lambda: not is_paused(proxy))
            ask(proxy, b"after")
            end.set()
            client.read_until(chunk(DONE) + LAST_CHUNK)
        assert proxy.metric("sparseety_capture_pauses_total") == 1
        assert proxy.metric("sparseety_capture_sampled_requests_total", decision="paused") >= 2
    assert [record.message for record in caplog.records] == [
        "capture paused, serving goes on: its own work delays the relay (--protect-lag, --protect-after)",
        "capture resumed",
    ]
    found = records(proxy.log_dir)
    number = {record.x_request_id: record.capture for record in found if isinstance(record, RequestStart)}
    gaps = {record.captures[0]: record.reason for record in found if isinstance(record, Gap)}
    unread = {record.capture: record for record in found if isinstance(record, Response)}
    for name, size in (("open", 2 * len(EVENT) + len(DONE)), ("while", len(EVENT) + len(DONE))):
        assert gaps[number[name]] == "capture paused (latency)"
        ending = unread[number[name]]
        assert (ending.outcome, ending.status, ending.bytes) == ("complete", 200, size)
        assert ending.unread == "capture paused"
    done = {record.capture: record for record in found if isinstance(record, StreamDone)}
    assert number["after"] in done
    assert unread.keys() == gaps.keys()
    assert not unread.keys() & done.keys()  # each request is read to its end, or has a gap


def test_with_protection_off_a_slow_capture_goes_on(tmp_path, slow):
    settings = {"protect_lag": 0.001, "protect_after": 0.0, "protect": False}
    with running_upstream(*SHORT) as upstream, running_proxy(tmp_path, upstream.url, **settings) as proxy:
        for _ in range(10):
            ask(proxy, b"any")
    found = records(proxy.log_dir)
    assert not any(isinstance(record, Gap) for record in found)
    assert sum(isinstance(record, StreamDone) for record in found) == 10


def test_a_disk_that_hangs_keeps_neither_a_client_waiting_nor_the_proxy_from_ending(tmp_path, slow, monkeypatch):
    slow.clear()
    monkeypatch.setattr("proxy.worker.LOG_CLOSING_SECONDS", 0.3)
    written, hanging, free = os.write, threading.Event(), threading.Event()

    def write(*args):
        if threading.current_thread().name.startswith("sparseety-log"):
            hanging.set()
            free.wait(WAIT)
        return written(*args)

    with running_upstream(*SHORT) as upstream:
        with running_proxy(tmp_path, upstream.url) as proxy:
            monkeypatch.setattr(os, "write", write)
            ask(proxy, b"first")
            assert hanging.wait(WAIT)
            ask(proxy, b"second")
        assert proxy.summary.log_closed is False
        free.set()
        for thread in threading.enumerate():
            if thread.name.startswith("sparseety-log"):
                thread.join(WAIT)
    assert sum(isinstance(record, StreamDone) for record in records(proxy.log_dir)) == 2

"""Requests that come faster than a batch at a time is recorded."""

import asyncio

from proxy.capture import RequestHead
from proxy.catalogue import RECORDS
from proxy.counters import Counters
from proxy.recording import Recorder
from sparseety.clock import monotonic_clock
from sparseety.logwriter import LogWriter
from sparseety.records import Scope

HEAD = RequestHead("POST", "/v1/chat/completions", [])
REPLY = b'{"id":"c","object":"chat.completion","choices":[{"index":0,"message":{"content":"hi"}}]}'
AT_ONCE = 32  # requests between two looks of the event loop at its sockets


def short_request(recorder: Recorder) -> None:
    recording = recorder.begin(HEAD)
    recording.request_body(b"{}")
    recording.request_ended()
    recording.reply_head(200, [(b"content-type", b"application/json")], recorder.clock())
    recording.reply_body(REPLY, recorder.clock())
    recording.ended("complete", None)


def test_a_worker_that_is_never_idle_records_as_fast_as_requests_come_and_never_stops_to_catch_up(tmp_path):
    async def busy() -> tuple[int, int]:
        most_waiting = most_at_once = recorded = 0
        for turn in range(1, 401):
            for _ in range(AT_ONCE):
                short_request(recorder)
            await asyncio.sleep(0)
            before, recorded = recorded, recorder.counters.total(RECORDS) // 2  # a request_start, a response
            most_waiting = max(most_waiting, turn * AT_ONCE - recorded)
            most_at_once = max(most_at_once, recorded - before)
        await recorder.caught_up()
        assert recorder.counters.total(RECORDS) == 2 * 400 * AT_ONCE
        return most_waiting, most_at_once

    clock = monotonic_clock()
    writer = LogWriter(tmp_path, "proxy", Scope(), clock=clock)
    recorder = Recorder(writer, clock, Counters())
    most_waiting, most_at_once = asyncio.run(busy())
    writer.close()
    assert most_waiting <= 10 * AT_ONCE
    assert most_at_once <= 2 * AT_ONCE

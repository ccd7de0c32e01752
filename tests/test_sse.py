"""The SSE splitter: every byte comes back, and events do not depend on how the network sliced them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseety.sse import EventTooLarge, SseEvent, SseSplitter, read_fields

MIXED = (
    b"data: one\n\n"
    b": ping\r\n\r\n"
    b"event: x\rdata: two\r\r"
    b"data: \xe4\xbd\xa0\xe5\xa5\xbd\r\ndata:three\r\n\n"
    b'data: {"text":"\xe2\x80\xa8 is payload, not a line end"}\n\n'
    b"data: [DONE]\n\n"
)


def split(*slices: bytes) -> list[SseEvent]:
    splitter = SseSplitter()
    return [event for data in slices for event in splitter.feed(data)] + splitter.close()


@pytest.mark.parametrize("cut", range(len(MIXED) + 1))
def test_events_do_not_depend_on_how_the_network_sliced_them(cut):
    assert split(MIXED[:cut], MIXED[cut:]) == split(MIXED)


def test_byte_by_byte_gives_the_same_events():
    assert split(*(bytes([byte]) for byte in MIXED)) == split(MIXED)


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=6))
def test_joining_the_raw_events_gives_any_input_back(data, cuts):
    borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    events = split(*(data[a:b] for a, b in pairwise(borders)))
    assert b"".join(event.raw for event in events) == data
    assert all(event.complete for event in events[:-1])


def test_mixed_line_ends_cut_into_the_events_a_browser_sees():
    seen = [read_fields(event) for event in split(MIXED)]
    assert [fields.data for fields in seen] == [
        b"one",
        None,
        b"two",
        b"\xe4\xbd\xa0\xe5\xa5\xbd\nthree",
        b'{"text":"\xe2\x80\xa8 is payload, not a line end"}',
        b"[DONE]",
    ]
    assert seen[1].comments == 1
    assert seen[2].name == b"x"


def test_an_event_cut_off_by_the_end_of_the_stream_is_incomplete():
    *whole, last = split(b'data: a\n\ndata: {"id":')
    assert [event.complete for event in whole] == [True]
    assert (last.raw, last.complete) == (b'data: {"id":', False)


def test_a_final_lone_cr_ends_its_event_when_the_stream_ends():
    [event] = split(b"data: a\r\r")
    assert (event.complete, read_fields(event).data) == (True, b"a")


def test_a_byte_order_mark_is_dropped_from_the_first_event_only():
    first, second = split(b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n")
    assert read_fields(first).data == b"a"
    assert read_fields(second).data is None


def test_an_endless_event_is_refused_instead_of_kept():
    splitter = SseSplitter(max_event_bytes=100)
    for _ in range(6):
        splitter.feed(b"data: xxxxxxxxxx")
    with pytest.raises(EventTooLarge, match="more than 100 bytes"):
        splitter.feed(b"data: xxxxxxxxxx")

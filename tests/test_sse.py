"""The SSE splitter: every byte comes back, and events do not depend on how the network sliced them."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sparseety.sse import SseEvent, SseSplitter, read_fields

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


def unified(data: bytes) -> bytes:
    """The same with one kind of line end."""
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def meant(events: list[SseEvent]) -> list[object]:
    return [(unified(event.raw), event.complete, event.dropped, read_fields(event)) for event in events]


@pytest.mark.parametrize("cut", range(len(MIXED) + 1))
def test_events_do_not_depend_on_how_the_network_sliced_them(cut):
    assert meant(split(MIXED[:cut], MIXED[cut:])) == meant(split(MIXED))


def test_byte_by_byte_gives_the_same_events():
    assert meant(split(*(bytes([byte]) for byte in MIXED))) == meant(split(MIXED))


_alphabet = st.lists(
    st.sampled_from([b"\r", b"\n", b"\r\n", b"data: a", b": c", b"x", b"\0", b"\xff", b"\xef\xbb\xbf"])
)


@example(b"\n\n\n", [1])
@example(b"data: a\r\n\r\n\n", [10])  # the LF that is left out stood between a CR and an LF
@given(_alphabet.map(b"".join) | st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=6))
def test_joining_the_raw_events_gives_any_input_back_but_for_the_kind_of_line_end(data, cuts):
    borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    events = split(*(data[a:b] for a, b in pairwise(borders)))
    assert b"".join(unified(event.raw) for event in events) == unified(data)
    assert all(event.complete for event in events[:-1])
    assert meant(events) == meant(split(data))


def test_one_read_gives_its_input_back_to_the_byte():
    assert b"".join(event.raw for event in split(MIXED)) == MIXED


def test_a_stream_of_lone_crs_is_never_one_event_late():
    splitter = SseSplitter()
    assert [event.raw for event in splitter.feed(b"data: a\r\rdata: b\r\r")] == [b"data: a\r\r", b"data: b\r\r"]
    assert [event.raw for event in splitter.feed(b"data: c\r\r")] == [b"data: c\r\r"]
    assert splitter.close() == []


def test_an_lf_that_comes_after_its_cr_makes_no_line_of_its_own():
    splitter = SseSplitter()
    assert len(splitter.feed(b"data: a\r\n\r")) == 1
    assert splitter.feed(b"") == []
    assert splitter.feed(b"\n") == []
    assert [read_fields(event).data for event in splitter.feed(b"data: b\r\n\r\n")] == [b"b"]
    assert splitter.close() == []


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


def test_a_final_lone_cr_ends_its_event():
    [event] = split(b"data: a\r\r")
    assert (event.complete, read_fields(event).data) == (True, b"a")


def test_a_byte_order_mark_is_dropped_from_the_first_event_only():
    first, second = split(b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n")
    assert read_fields(first).data == b"a"
    assert read_fields(second).data is None


@pytest.mark.parametrize("step", [1, 2, 3, 7, 50, 1000])
def test_an_event_that_is_too_long_is_dropped_and_those_around_it_are_not(step):
    long = b"data: " + b"x" * 200 + b"\r\n\r\n"
    stream = b"data: a\n\n" + long + b"data: b\n\n" + long + long + b"data: c\n\n"
    splitter = SseSplitter(max_event_bytes=100)
    events = []
    for at in range(0, len(stream), step):
        events += splitter.feed(stream[at : at + step])
        assert len(splitter._buffer) <= 100
    assert splitter.close() == []
    assert [read_fields(event).data for event in events] == [b"a", None, b"b", None, None, b"c"]
    dropped = [event.dropped for event in events if event.dropped]
    assert len(dropped) == 3
    assert all(len(long) - 1 <= size <= len(long) for size in dropped)  # less an LF that came late


def test_a_stream_that_ends_inside_an_event_that_is_too_long_says_so():
    splitter = SseSplitter(max_event_bytes=100)
    for _ in range(20):
        assert splitter.feed(b"data: xxxxxxxxxx") == []
    (event,) = splitter.close()
    assert (event.raw, event.complete, event.dropped) == (b"", False, 320)


def test_thousands_of_tiny_events_in_one_read_are_cut_in_one_pass():
    assert len(split(b":\n\n" * 50_000)) == 50_000
    assert len(split(b":\r\r" * 50_000)) == 50_000

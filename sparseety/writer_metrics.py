"""What each program that writes a log publishes about its writers, defined once. The numbers: written.Written."""

from typing import NamedTuple

from sparseety.metrics import FLUSH_SECONDS, Label, Metric

DROP_REASONS = ("queue_full", "serialize_error", "write_error", "disk_low", "shutdown")
SEGMENT_EVENTS = ("opened", "closed", "packed", "deleted")


class WriterMetrics(NamedTuple):
    written: Metric
    dropped: Metric
    bytes: Metric
    queue: Metric
    queue_limit: Metric
    flush: Metric
    last_write: Metric
    disk_free: Metric
    segments: Metric
    failing: Metric


def writer_metrics(source: str, *, absent: str = "") -> WriterMetrics:
    """source: whose logs they are, a value of the label of that name. absent: when there are none."""
    ours = Label("source", (source,))

    def counter(name: str, text: str, *labels: Label, unit: str = "1") -> Metric:
        return Metric(f"sparseety_capture_{name}", "counter", text, unit, (ours, *labels), layer="capture")

    def gauge(name: str, text: str, *labels: Label, unit: str = "1", before: str = "") -> Metric:
        when = "; ".join(filter(None, (absent, before)))
        return Metric(f"sparseety_capture_{name}", "gauge", text, unit, labels, layer="capture", absent=when)

    return WriterMetrics(
        written=counter(
            "records_written", "Records in the logs, the writers' own included (log_open, log_close, gap)."
        ),
        dropped=counter(
            "records_dropped",
            "Records that never reached the log. Any increase means that it is not complete; it says so in gaps, and "
            "each request concerned is incomplete. queue_full: the disk did not keep up; disk_low: less free than has "
            "to be left; write_error: the disk refused them; shutdown: it did not take the rest in time.",
            Label("reason", DROP_REASONS),
        ),
        bytes=counter("written_bytes", "Bytes appended to the logs, before compression.", unit="bytes"),
        queue=gauge(
            "queue_bytes",
            "Memory taken by records that wait to be written, in the process with the fullest queue.",
            ours,
            unit="bytes",
        ),
        queue_limit=gauge("queue_limit_bytes", "Bound of one process's queue.", ours, unit="bytes"),
        flush=Metric(
            "sparseety_capture_flush_duration_seconds",
            "histogram",
            "Time of one write of all that waited to the log's file, whether or not the disk took it.",
            "seconds",
            (ours,),
            FLUSH_SECONDS,
            "capture",
        ),
        last_write=gauge(
            "last_write_timestamp_seconds",
            "Unix time of the last write that the disk took, of the process where it is latest.",
            ours,
            unit="seconds",
            before="before the first write",
        ),
        disk_free=gauge(
            "disk_free_bytes",
            "Free for this user on the log's disk, looked at every 5 s.",
            unit="bytes",
            before="before the first look at the disk",
        ),
        segments=counter(
            "segments",
            "Files of the logs: opened, closed (in order), packed, deleted (the oldest ones, beyond the cap).",
            Label("event", SEGMENT_EVENTS),
        ),
        failing=Metric(
            "sparseety_capture_logs_failing",
            "gauge",
            "Processes whose log cannot be written now.",
            labels=(ours,),
            layer="capture",
        ),
    )

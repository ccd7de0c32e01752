"""Capture health: how complete the logs are, and what watching costs."""

from deploy.grafana.asking import per_second, quantiles
from deploy.grafana.overview import WATCHED
from deploy.grafana.panels import Dashboard, Panel, Row

COMPLETE = Row(
    "Is the capture complete?",
    (
        Panel(
            "Who answers",
            "states",
            "short",
            "prometheus",
            "Whether Prometheus reaches each of the programs.",
            (('min by (job, instance) (up{job=~"sparseety-.+|vllm"})', "{{job}} {{instance}}"),),
            12,
            words=((0, "down"), (1, "up")),
            good_above=1,
        ),
        Panel(
            "Requests by what became of their capture",
            "stacked",
            "reqps",
            "capture",
            "captured and forced ones are in the log in full; the others are counted only.",
            per_second("sparseety_capture_sampled_requests_total", "{S}", "source, decision"),
            12,
        ),
        Panel(
            "Records lost/s",
            "stacked",
            "short",
            "capture",
            "Any: the log says so in gaps, and each request concerned is judged incomplete.",
            per_second("sparseety_capture_records_dropped_total", "{S}", "source, reason"),
        ),
        Panel(
            "Capture paused",
            "states",
            "short",
            "capture",
            "By the proxy, to protect serving; by the plugin, on the operator's word or after a fault of its own.",
            (("max by (source, reason) (sparseety_capture_paused{S})", "{{source}}: {{reason}}"),),
            words=((0, "no"),),
            bad_above=1,
        ),
        Panel(
            "Disorder (1 h)",
            "stat",
            "short",
            "verifier",
            "Requests whose chunks or records are not in order, as the verifier finds them.",
            (("sum by (kind) (increase(sparseety_capture_sequence_errors_total{M}[1h]))", "{{kind}}"),),
            bad_above=1e-9,
        ),
        Panel(
            "Who knows of a request",
            "shares",
            "short",
            "verifier",
            "Of requests that both logs should know: in both, or in one only.",
            per_second("sparseety_join_requests_total", "{S}", "result"),
        ),
    ),
)

COST = Row(
    "What does watching cost?",
    (
        Panel(
            "Added by the proxy to a piece of a reply",
            "lines",
            "s",
            "proxy",
            "From a read of the reply to its bytes handed on, on one read in 16.",
            quantiles("sparseety_proxy_overhead_seconds", '{S, stage="chunk"}', 0.5, 0.99),
            8,
        ),
        Panel(
            "Added by the plugin to an engine's step",
            "lines",
            "s",
            "plugin",
            "Time that the engine's thread is held up.",
            quantiles("sparseety_plugin_step_overhead_seconds", "{S}", 0.5, 0.99),
            8,
        ),
        Panel(
            "Pauses of the proxy's capture (1 h)",
            "stat",
            "short",
            "proxy",
            "Times that it was paused, by reason.",
            (("sum by (reason) (increase(sparseety_capture_pauses_total{S}[1h]))", "{{reason}}"),),
            8,
            bad_above=1e-9,
        ),
    ),
)

WRITER = Row(
    "The logs",
    (
        Panel(
            "Queue",
            "lines",
            "percentunit",
            "capture",
            "Memory taken by records that wait, of its bound; in the process where it is fullest.",
            (
                (
                    "max by (instance, source)"
                    " (sparseety_capture_queue_bytes{S} / sparseety_capture_queue_limit_bytes{S})",
                    "{{instance}} {{source}}",
                ),
            ),
        ),
        Panel(
            "Written/s",
            "lines",
            "Bps",
            "capture",
            "Before compression.",
            per_second("sparseety_capture_written_bytes_total", "{S}", "source"),
        ),
        Panel(
            "Records/s by event",
            "stacked",
            "short",
            "capture",
            "Handed to the writers.",
            per_second("sparseety_capture_records_total", "{S}", "source, kind"),
        ),
        Panel(
            "Time of a write (p99)",
            "lines",
            "s",
            "capture",
            "Of all that waited, in one go.",
            quantiles("sparseety_capture_flush_duration_seconds", "{S}", 0.99, by="source"),
        ),
        Panel(
            "Disk free",
            "lines",
            "bytes",
            "capture",
            "On the log's disk. Below log_min_free_bytes (5 GiB) nothing is recorded.",
            (("min by (instance) (sparseety_capture_disk_free_bytes{S})", "{{instance}}"),),
        ),
        Panel(
            "Disk full in",
            "stat",
            "s",
            "capture",
            "At the rate of the last hour. The logs keep to a cap of their own.",
            (
                (
                    "min(clamp_max(sparseety_capture_disk_free_bytes{S}"
                    " / clamp_min(-deriv(sparseety_capture_disk_free_bytes{S}[1h]), 1), 864000))",
                    "",
                ),
            ),
            words=((864_000, "in 10 days or later, if ever"),),
        ),
        Panel(
            "Since the last write",
            "lines",
            "s",
            "capture",
            "Grows while there is nothing to record.",
            (
                (
                    "time() - max by (instance, source) (sparseety_capture_last_write_timestamp_seconds{S})",
                    "{{instance}} {{source}}",
                ),
            ),
        ),
        Panel(
            "Files of the log (1 h)",
            "stat",
            "short",
            "capture",
            "Opened, closed, packed, and deleted to keep within the cap.",
            (("sum by (event) (increase(sparseety_capture_segments_total{S}[1h]))", "{{event}}"),),
        ),
        Panel(
            "Logs that cannot be written",
            "stat",
            "short",
            "capture",
            "Processes that cannot write their log now; of a proxy's, /readyz says so too.",
            (("sum(sparseety_capture_logs_failing{S})", ""),),
            bad_above=1,
        ),
        Panel(
            "Spans/s (OpenTelemetry)",
            "stacked",
            "short",
            "proxy",
            "By what became of them; all 0 where no collector is named.",
            per_second("sparseety_otlp_spans_total", "{S}", "result"),
        ),
        Panel(
            "Workers of the proxies",
            "lines",
            "short",
            "proxy",
            "Those that should run, that run, and that say nothing.",
            (
                ("sum(sparseety_proxy_workers{S})", "should run"),
                ("sum(sparseety_proxy_workers_alive{S})", "run"),
                ("sum(sparseety_proxy_workers_silent{S})", "silent"),
            ),
        ),
    ),
)

PLUGIN = Row(
    "The plugin",
    (
        Panel(
            "Hooks",
            "table",
            "short",
            "plugin",
            "Expected, attached, and fired at least once.",
            (("sum by (engine, site, state) (sparseety_plugin_hooks{S})", ""),),
            8,
        ),
        Panel(
            "Hooks missing",
            "stat",
            "short",
            "plugin",
            "Expected and not attached.",
            (
                (
                    'sum(sparseety_plugin_hooks{S, state="expected"})'
                    ' - sum(sparseety_plugin_hooks{S, state="attached"})',
                    "",
                ),
            ),
            4,
            bad_above=1,
        ),
        Panel(
            "Faults of the plugin (24 h)",
            "stat",
            "short",
            "plugin",
            "Each ended a part of it; serving went on.",
            (("sum by (engine, site) (increase(sparseety_plugin_errors_total{S}[24h]))", "{{engine}} {{site}}"),),
            4,
            bad_above=1e-9,
        ),
        Panel(
            "Since the last step recorded",
            "stat",
            "s",
            "plugin",
            "Grows while the engine has nothing to do.",
            (("time() - max by (instance, engine) (sparseety_plugin_last_event_timestamp_seconds{S})", "{{engine}}"),),
            4,
        ),
        Panel(
            "Events of the engine (24 h)",
            "stat",
            "short",
            "plugin",
            "Sleep, wake, new weights, cache resets, settings changed.",
            (("sum by (kind) (increase(sparseety_plugin_events_total{S}[24h]))", "{{kind}}"),),
            4,
        ),
    ),
)

CAPTURE_HEALTH = Dashboard(
    "sparseety-capture",
    "Capture health",
    "How complete the logs are, hence how far the other pages can be trusted, and what watching costs.",
    (WATCHED, COMPLETE, COST, WRITER, PLUGIN),
    ("job", "instance", "model_name"),
)

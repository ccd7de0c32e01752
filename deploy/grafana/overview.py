"""Overview: the three layers on one page, and whether the page can be trusted."""

from deploy.grafana.panels import Dashboard, Link, Panel, Row

WHERE_TIME_GOES = Link("Where does the time go?", "sparseety-tokens")
BY_LAYER = Link("Which layer of the model?", "sparseety-sparsity")
CAPTURE = Link("How complete is the capture?", "sparseety-capture")
VERDICTS = Link("Which findings?", "sparseety-verification")

_SEEN = ((0, "not seen"),)


def _seen(title: str, says: str, query: str) -> Panel:
    """How many there are; none is said in words, since then whole rows below have nothing to show."""
    return Panel(
        title, "stat", "short", "up", says, ((f"{query} or vector(0)", ""),), words=_SEEN, good_above=1, link=CAPTURE
    )


WATCHED = Row(
    "Who is watching? (what is not seen here is not observed below)",
    (
        _seen("Proxies", "Proxies that answer: layers 1 and 2.", 'sum(up{job="sparseety-proxy"} == 1)'),
        _seen("vLLM", "Servers whose own /metrics is scraped: the engine's view.", 'sum(up{job="vllm"} == 1)'),
        _seen(
            "Plugin",
            "Engines that the plugin is in: layer 3. Without it, nothing on this page says what the sampler chose.",
            "count(count by (instance, engine) (sparseety_plugin_last_event_timestamp_seconds))",
        ),
        _seen("Verifier", "Verifiers on watch: whether the text is right.", 'sum(up{job="sparseety-verifier"} == 1)'),
    ),
)

SERVICE = Row(
    "Is the service well? (layer 1: service)",
    (
        Panel(
            "Requests/s by outcome",
            "stacked",
            "reqps",
            "proxy",
            "Requests that ended, by how.",
            (("sum by (outcome) (rate(sparseety_proxy_requests_total{M}[R]))", "{{outcome}}"),),
            8,
        ),
        Panel(
            "Complete",
            "stat",
            "percentunit",
            "proxy",
            "Share of the requests whose reply went to its end, whatever its status.",
            (
                (
                    'sum(rate(sparseety_proxy_requests_total{M, outcome="complete"}[R]))'
                    " / sum(rate(sparseety_proxy_requests_total{M}[R]))",
                    "",
                ),
            ),
            4,
            good_above=0.95,
        ),
        Panel(
            "Requests in flight",
            "lines",
            "short",
            "proxy",
            "Accepted and not ended.",
            (("sum by (endpoint) (sparseety_proxy_requests_in_flight{S})", "{{endpoint}}"),),
        ),
        Panel(
            "Upstream",
            "states",
            "bool",
            "proxy",
            "Whether the server behind each proxy answers its readiness probe.",
            (("min by (instance, upstream) (sparseety_upstream_up{S})", "{{instance}} {{upstream}}"),),
            words=((0, "down"), (1, "up")),
            good_above=1,
        ),
        Panel(
            "Request duration",
            "lines",
            "s",
            "proxy",
            "From the request's last byte to the reply's last byte.",
            tuple(
                (
                    f"histogram_quantile({q}, sum by (le) (rate(sparseety_proxy_request_duration_seconds_bucket{{M}}[R])))",
                    f"p{q * 100:.0f}",
                )
                for q in (0.5, 0.95, 0.99)
            ),
            12,
            link=WHERE_TIME_GOES,
        ),
        Panel(
            "Queue and running in the engine",
            "lines",
            "short",
            "vllm",
            "vLLM's own: requests that it computes, and that wait for it.",
            (
                ("sum(vllm:num_requests_running{E})", "running"),
                ("sum(vllm:num_requests_waiting{E})", "waiting"),
            ),
            12,
            link=WHERE_TIME_GOES,
        ),
    ),
)

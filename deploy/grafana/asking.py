"""PromQL that many panels share. Selectors are the shorthand of panels.py: {M}, {E, phase="decode"}, [R]."""

Queries = tuple[tuple[str, str], ...]


def quantiles(histogram: str, which: str, *of: float, before: str = "", by: str = "") -> Queries:
    """p50 and the like of a histogram; NaN, so a gap, where nothing was observed. before: of the legend."""
    labels = f"le, {by}" if by else "le"
    legend = before + (f"{{{{{by}}}}} " if by else "")
    return tuple(
        (f"histogram_quantile({q}, sum by ({labels}) (rate({histogram}_bucket{which}[R])))", f"{legend}p{100 * q:g}")
        for q in of
    )


def mean(histogram: str, which: str, legend: str) -> Queries:
    return ((f"sum(rate({histogram}_sum{which}[R])) / sum(rate({histogram}_count{which}[R]))", legend),)


def per_second(counter: str, which: str, by: str) -> Queries:
    return ((f"sum by ({by}) (rate({counter}{which}[R]))", " ".join(f"{{{{{each}}}}}" for each in by.split(", "))),)


def share(part: str, whole: str, by: str = "", legend: str = "", of_all: bool = False) -> Queries:
    """Of rates. Without traffic 0/0, which is NaN; without a series nothing: the two are told apart on the panel.

    of_all: each of `by` as a share of the sum, where `whole` has no such label.
    """
    grouped = f"sum by ({by}) " if by else "sum"
    below = f"on () group_left () sum(rate({whole}[R]))" if of_all else f"{grouped}(rate({whole}[R]))"
    return ((f"{grouped}(rate({part}[R])) / {below}", legend),)


def grown(counter: str, which: str, window: str, by: str = "") -> str:
    return (f"sum by ({by}) " if by else "sum") + f"(increase({counter}{which}[{window}]))"

"""What the statistics of a stability run come to: plain structures, and so JSON. No text of any model."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

SCHEMA = 1  # rises with any change of these structures that a reader can notice

Contract = Literal["bitwise", "same-model", "bounded-change"]
Decision = Literal["accept", "reject", "inconclusive"]
Kind = Literal["EXACT_TIE", "NEAR_TIE", "HARD", "LENGTH", "UNKNOWN"]
"""A first difference. LENGTH: one output is a beginning of the other. UNKNOWN: no log probabilities came."""
CauseName = Literal["sampling path", "KV loss", "batch", "numeric path", "unknown"]
Reading = Literal["less", "as much", "more", "not told apart"]

Count = Annotated[int, Meta(ge=1)]
Logit = Annotated[float, Meta(ge=1, le=1e6)]
Error = Annotated[float, Meta(gt=0, lt=0.5)]
Risk = Annotated[float, Meta(gt=0, lt=1)]
Part = Annotated[float, Meta(ge=0, le=1)]
Times = Annotated[float, Meta(ge=1, le=1000)]
Precision = Literal["bfloat16", "float16", "float32", "float64"]

EXIT_CODES: dict[Decision, int] = {"accept": 0, "reject": 1, "inconclusive": 3}


class GateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What may be set. Rates are per prompt, shares in 0..1, confidence is that of all intervals."""

    p0: Risk = 0.02  # share of prompts with a hard first difference that is still the same model
    p1: Risk = 0.06  # ... that is another one
    alpha: Error = 0.05  # a same model is rejected at most this often
    beta: Error = 0.05  # another model is accepted at most this often
    truncate: Count = 600  # prompts after which the sequential test ends by the Wilson bound
    confidence: Risk = 0.95
    budget: Count | None = None  # positions that the candidate's attention keeps; None: no budget to exceed
    min_beyond_budget: Part = 0.5  # share of generated tokens whose context must exceed it
    max_failed: Part = 0.02  # share of planned requests that may have failed or be missing
    dtype: Precision | None = None  # what the arms compute in; None: as the run's facts say, else bfloat16 is assumed
    largest_logit: Logit = 32.0  # of the model, for one unit in its last place; log probabilities do not show it
    noise_differences: Count = 200  # first differences of the noise arm from which on it gives the tie band
    soft_ratio: Annotated[float, Meta(gt=1, le=1000)] = (
        1.5  # hazard of ties in units of the noise arm's, beyond which there is a warning
    )
    hard_rate: Risk | None = 0.06  # bounded-change without a yardstick: at most; None: not asked
    hazard_ratio: Times | None = 1.5  # bounded-change: first differences a token in units of the yardstick's or noise's
    forced_disagreement: Risk | None = 0.03  # bounded-change without a yardstick: share of positions, teacher-forced
    hard_margin: Part = 0.04  # bounded-change with a yardstick: its hard rate may be exceeded by this
    forced_ratio: Times | None = 1.5  # bounded-change with a yardstick: its disagreement, times this
    yardstick: str | None = None  # the arm that bounded-change measures by; None: the only one there is, else bounds
    seed: int = 0  # of the resampling of prompts
    resamples: Annotated[int, Meta(ge=100)] = 2000

    def __post_init__(self) -> None:
        if self.p0 >= self.p1:
            raise ValueError(f"p0 ({self.p0:g}) must be below p1 ({self.p1:g})")


class ArmFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the run knows of one server. None or absent: not known."""

    model: str | None = None
    tokenizer: str | None = None  # sha256 of its files
    dtype: str | None = None
    engine: str | None = None  # name and version
    parameters: dict[str, str] = {}  # effective sampling parameters: equal between arms, or nothing is compared
    flags: dict[str, str] = {}  # of the server; arms may differ here, that is the point


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the run knows besides its requests."""

    run: str = ""  # its name
    planned: int | None = None  # requests; None: as many as there are outputs
    order: list[int] = []  # prompts in the plan's order, which the sequential test follows; empty: order of the outputs
    arms: dict[str, ArmFacts] = {}
    notes: list[str] = []  # anything else a reader should know


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One condition of validity. ok None: could not be checked, which is said and does not end the run."""

    name: str
    ok: bool | None
    detail: str


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """hits of `of`, with an interval. share None: of is 0."""

    hits: int
    of: int
    share: float | None
    low: float
    high: float
    method: str


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Events per position at risk. rate None: nothing was at risk."""

    events: int
    at_risk: int
    rate: float | None
    low: float
    high: float | None  # None: no upper bound
    method: str


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A number with an interval; low or high None: unbounded on that side."""

    value: float | None
    low: float | None
    high: float | None
    method: str


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """Up to where a first difference counts as a tie, in nats, and where that comes from."""

    margin: float  # where only one side has log probabilities
    shift: float  # where both have
    source: Literal["noise arm", "precision"]
    detail: str


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Where two outputs of a prompt part."""

    prompt: int
    repeat: int
    load: int  # of the second output
    cache: str
    index: int  # of the first differing token, from 0
    context: int | None  # positions before it, the prompt's included
    kind: Kind
    hard: bool  # counts as one for the gate: HARD, and LENGTH that no tie explains
    first: str  # request ids
    second: str
    first_id: int | None  # None: that output had ended
    second_id: int | None
    first_margin: float | None  # nats by which its token led the other's, at least; below 0: it did not lead
    second_margin: float | None
    shift: float | None  # |first_margin| + |second_margin|
    bounded: bool  # the other's token was not among those logged, so a margin is only a lower bound
    second_choice: bool | None  # the second's token is the first's runner-up


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    index: int  # tokens
    share: float  # of pairs still identical after the token at this index
    at_risk: int


class Survival(msgspec.Struct, frozen=True, kw_only=True):
    points: list[CurvePoint]  # a step each
    longest: int  # tokens of the longest pair: nothing is known beyond
    median: int | None  # index at which half the pairs have parted; None: not reached
    quartiles: list[int]  # of the index of first differences; empty: there are none


class LogRank(msgspec.Struct, frozen=True, kw_only=True):
    """Two curves. z > 0: the second parts sooner than expected."""

    z: float
    two_sided: float
    one_sided: float  # probability of at least this z by chance
    ratio: float | None  # hazards, second over first, as (observed/expected) / (observed/expected)
    events: int
    needed: int  # events for 90 % power at the ratio asked for


class LengthBin(msgspec.Struct, frozen=True, kw_only=True):
    """Positions whose context (prompt and output before them) is in first..last."""

    first: int
    last: int | None
    differences: Rate
    hard: int


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All that is said of two arms."""

    name: str  # noise, candidate, or the yardstick's name
    first: str  # arms
    second: str
    prompts: int
    pairs: int
    unpaired: int  # outputs of either arm without a counterpart
    identical: Share  # prompts all of whose pairs are identical
    identical_pairs: Share | None  # pairs, with an interval from resampled prompts; None: one pair a prompt
    hazard: Rate
    survival: Survival
    kinds: dict[str, int]  # pairs by kind of their first difference
    hard: Share  # prompts with a hard first difference
    hard_margin_median: float | None  # nats, of the hard differences
    hard_shift_median: float | None
    hard_index_quartile: int | None  # first quartile of the index of hard differences
    early: int  # first differences at index 0 to 4
    by_length: list[LengthBin]
    differences: list[Difference]
    soft: LogRank | None  # ties against the noise arm's; None: of the noise arm itself, or without one
    cause: "Cause | None"  # None: nothing differs


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """The likely cause of first differences, and what speaks for it. Never without evidence: unknown then."""

    name: CauseName
    evidence: list[str]


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """A place where repeats of a prompt part."""

    index: int
    ids: list[int]  # -1: ended there
    margin: float | None  # the least lead that one of them had there, nats


class Leaf(msgspec.Struct, frozen=True, kw_only=True):
    """Outputs that are token for token the same."""

    requests: list[str]
    tokens: int
    finish: str | None


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """The outputs of one arm to one prompt."""

    prompt: int
    outputs: int
    leaves: list[Leaf]  # most outputs first
    forks: list[Fork]
    largest: float  # share of the largest leaf
    entropy: float  # nats; 0: all the same


class Factor(msgspec.Struct, frozen=True, kw_only=True):
    """Whether outputs that differ go by one of the conditions they ran under."""

    name: str  # load, cache, reused, preempted, epoch
    explains: int  # prompts whose distinct outputs are told apart by it alone
    of: int  # prompts with several outputs and several values
    chance: float  # prompts that luck would explain


class Repeats(msgspec.Struct, frozen=True, kw_only=True):
    """Repeats within one arm."""

    arm: str
    prompts: int  # with at least two outputs
    stable: Share  # of them with one distinct output
    distinct_mean: float | None
    largest_mean: float | None
    entropy_mean: float | None
    tie_forks: int  # within the band
    hard_forks: int
    unknown_forks: int
    factors: list[Factor]
    trees: list[Tree]  # of prompts with more than one distinct output


class ArmResult(msgspec.Struct, frozen=True, kw_only=True):
    """Cost and sparsity of one arm. None: nothing says it."""

    arm: str
    requests: int
    failed: int
    tokens: int
    verified: dict[str, int]  # requests by the verdict of verify-tokens; "not verified" too
    ttft: float | None  # median seconds
    tpot: float | None
    ttft_ratio: Estimate | None  # to a1: median over prompts of their ratios
    tpot_ratio: Estimate | None
    same_conditions: bool | None  # the ratios are of requests under equal load and cache; None: no ratios
    logged: int  # requests that the engine's log holds
    zero_share: float | None  # exact zeros of elements counted
    evicted_share: float | None  # KV slots given up, of prompt positions
    skipped_share: float | None  # positions that attention did not read, of those that full attention would
    reused_share: float | None  # of prompt positions
    recomputed: int | None
    preemptions: int | None
    accepted_share: float | None  # of draft tokens


class MarginBin(msgspec.Struct, frozen=True, kw_only=True):
    """Positions at which the reference led by up to `last` nats, and more than the bin before."""

    last: float | None
    positions: int
    disagree: int


class ForcedResult(msgspec.Struct, frozen=True, kw_only=True):
    """Teacher forcing of one arm. Prefill path only: says nothing of what is sparse in decode alone."""

    arm: str
    path: Literal["prefill path only"] = "prefill path only"
    reference: Literal["a1, forced", "the output itself"] = "the output itself"  # whose margins the bins are of
    prompts: int
    failed: int
    positions: int
    disagree: Estimate  # share of positions with another argmax; interval from resampled prompts
    disagreements: int
    hard: int  # of them beyond the band
    hard_prompts: Share
    bins: list[MarginBin]
    delta_median: float | None  # nats, of |difference of the margins|
    delta_p90: float | None
    delta_max: float | None


class YardstickReading(msgspec.Struct, frozen=True, kw_only=True):
    """Does the candidate move less, as much or more than a change known to be acceptable?"""

    arm: str
    reading: Reading
    prompts: int  # compared on both
    hazard_ratio: Estimate  # candidate over yardstick
    hard_candidate_only: int  # prompts, paired
    hard_yardstick_only: int
    hard_p: float  # exact McNemar, two-sided
    hard_difference: Estimate
    forced_ratio: Estimate | None


class Sprt(msgspec.Struct, frozen=True, kw_only=True):
    """The sequential test on hard first differences."""

    prompts: int  # looked at until it was decided, or all
    hard: int
    log_ratio: float
    accept_below: float
    reject_above: float
    decided: bool
    truncated: bool  # decided by the Wilson bound
    decision: Decision


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """One condition of bounded-change."""

    name: str
    estimate: Estimate  # one-sided limits at the confidence asked for
    bound: float
    decision: Decision
    detail: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    contract: Contract
    decision: Decision
    exit_code: int
    reasons: list[str]
    warnings: list[str]
    sprt: Sprt | None
    bounds: list[Bound]


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a stability run."""

    schema: int = SCHEMA
    facts: Facts
    settings: GateSettings
    checks: list[Check]
    valid: bool
    band: Band
    prompts: int
    arms: list[ArmResult]
    repeats: list[Repeats]
    comparisons: list[Comparison]  # noise, candidate, yardsticks: those there are
    yardsticks: list[YardstickReading]
    forced: list[ForcedResult]
    verdict: Verdict

    def comparison(self, name: str) -> Comparison | None:
        return next((each for each in self.comparisons if each.name == name), None)

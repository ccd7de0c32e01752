"""Judge packed requests, in whatever process. Pure, but for the tokenizers that a process loads once."""

import pickle
import time

from verifier.findings import Finding, RequestVerdict, Severity, Verdict
from verifier.judge import judge
from verifier.logs import Log
from verifier.options import AS_A_RULE, JudgeOptions
from verifier.packed import Case
from verifier.tokenizer import NoTokenizer, Tokenizer, TokenizerShelf


class Tokenizers:
    """The tokenizer of each engine, found once."""

    def __init__(self, shelf: TokenizerShelf) -> None:
        self._shelf = shelf
        self._found: dict[tuple[str, str | None, tuple[str, ...]], Tokenizer | NoTokenizer] = {}

    def of_model(self, model: str | None) -> Tokenizer | None:
        """As TokenizerShelf.of_model."""
        return self._shelf.of_model(model)

    def of(self, log: Log) -> Tokenizer:
        """Raises NoTokenizer."""
        identity = log.engine.tokenizer if log.engine else None
        if identity is None and not self._shelf.given:
            raise NoTokenizer("its engine_start record is lost, and with it which tokenizer was served")
        models = (*log.engine.served_names, log.engine.model) if log.engine else ()
        name, sha256 = (identity.name, identity.files.get("tokenizer.json")) if identity else ("", None)
        key = (name, sha256, models)
        if key not in self._found:
            try:
                self._found[key] = self._shelf.find(name, sha256, models)
            except NoTokenizer as error:
                self._found[key] = error
        found = self._found[key]
        if isinstance(found, NoTokenizer):
            raise found
        return found


_of_this_process: dict[bytes, Tokenizers] = {}


def tokenizers(shelf: TokenizerShelf) -> Tokenizers:
    """Those of this process, whichever copy of the shelf it was given."""
    key = pickle.dumps(shelf)
    if key not in _of_this_process:
        _of_this_process[key] = Tokenizers(shelf)
    return _of_this_process[key]


def judge_cases(
    cases: list[Case], engine_logs: list[Log], shelf: TokenizerShelf, options: JudgeOptions = AS_A_RULE
) -> list[RequestVerdict]:
    """Judge each. A bug that one brings out costs that one its verdict, and no other."""
    found = tokenizers(shelf)
    return [_judge(case, engine_logs, found, options) for case in cases]


def _judge(case: Case, engine_logs: list[Log], found: Tokenizers, options: JudgeOptions) -> RequestVerdict:
    begin = time.perf_counter()
    try:
        verdict = judge(*case.unpack(), engine_logs, found.of, options=options, tokenizer_for=found.of_model)
        verdict.seconds = time.perf_counter() - begin
        return verdict
    except Exception as error:  # noqa: BLE001 -- whatever it is, the others are to be judged
        return not_judged(case, f"a bug in this program ({type(error).__name__}); please report it")


def not_judged(case: Case, why: str) -> RequestVerdict:
    """The verdict on a request that no judge came back from."""
    capture = case.capture
    begin = capture.begin
    name = capture.id or (begin.uuid if begin else f"capture {capture.number}")
    verdict = RequestVerdict(name, Verdict.INCOMPLETE)
    if begin:
        verdict.endpoint, verdict.model, verdict.uuid, verdict.ts = begin.endpoint, begin.model, begin.uuid, begin.ts
    place = capture.log.place(capture.line)
    verdict.findings.append(Finding("UNVERIFIABLE", "log", Severity.UNKNOWN, why, places=(place,)))
    return verdict

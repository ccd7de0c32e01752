"""Judge one choice: the text that came against the ids that were sampled, and the ids in the stream. Pure."""

import hashlib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

from sparseety.records import RequestAdded, RequestParameters
from verifier.channels import Parsers, Sent, prompt_opens
from verifier.classify import Difference
from verifier.compare import Comparison, Ending, compare
from verifier.concerned import concerned
from verifier.detokenizer import TooManyHeld
from verifier.drift import retokenize
from verifier.endings import counts, finish_mismatch, stops_inside
from verifier.expect import Expected, TextRules, from_replay, from_table
from verifier.findings import Axis, Finding, RequestVerdict, Severity
from verifier.holding import held_back
from verifier.logs import Log
from verifier.options import AS_A_RULE, JudgeOptions
from verifier.parsed import compare_channels
from verifier.parsers import MADE_FOR
from verifier.requests import Capture, Delivered, EngineRequest
from verifier.tokenizer import NoTokenizer, Tokenizer

TokenizerOf = Callable[[Log], Tokenizer]
"""The tokenizer that the engine behind a log served with. Raises NoTokenizer."""

INFO_DETAILS = {
    "TRIMMED_STOP": "the text is cut at the stop string",
    "INCOMPLETE_UTF8_TAIL": "the last ids only begin a character, which the server rightly held back",
    "ABORTED_PREFIX": "the stream was broken off; what came is the beginning of the text of the ids",
    "LEADING_SPACE": "the tokenizer drops one space at a text's start",
    "REPLAY_ONLY": "equal by vLLM's own detokenizer; the bytes alone do not decide",
    "SPECIAL_SKIPPED": "special tokens were sampled, and left out as asked",
    "PARSED": "parsers laid the text into channels; end to end, with their markers, it is the text of the ids",
    "PARSED_SEMANTIC": "the same, but tool-call arguments were written anew: they are equal after reading the JSON",
    "HIDDEN": "text was left out as asked (the reasoning, or all of it); the rest was checked",
    "PARSER_DROPPED": "a parser threw text away by its own rule (beside tool calls, or before the reasoning)",
}

_MODES = frozenset({"auto", "hf", "fast"})  # vLLM's tokenizer modes that decode by tokenizer.json
_ID_LIMIT = 1 << 31  # no vocabulary is as large


@dataclass(slots=True)
class ChoiceJudge:
    """Adds what it finds to `result`."""

    result: RequestVerdict
    capture: Capture
    choice: int
    engine: EngineRequest
    damaged: bool  # the proxy's log lost something of this request
    options: JudgeOptions = AS_A_RULE
    delivered: Delivered = field(init=False)
    added: RequestAdded = field(init=False)

    def __post_init__(self) -> None:
        self.delivered = self.capture.choices.get(self.choice) or Delivered()
        assert self.engine.added is not None  # the join goes by it
        self.added = self.engine.added

    def judge(self, tokenizer_of: TokenizerOf) -> tuple[int, int] | None:
        """Returns (ids up to the stop string, ids in all), or None where they are not all known."""
        engine = self.engine
        self.result.choices += 1
        self.result.tokens += len(engine.ids)
        if blocked := self._blocked():
            self._find(*blocked)
            return None
        try:
            tokenizer = tokenizer_of(engine.log)
        except NoTokenizer as error:
            self._find("UNVERIFIABLE", "ids", Severity.UNKNOWN, str(error))
            return None
        if foreign := self._foreign_ids(tokenizer):
            self._find("ID_OUT_OF_VOCAB", "ids", *foreign)
            return None
        if not engine.complete:
            detail = f"the engine's log ends before this request does ({len(engine.ids)} ids are known)"
            self._find("BACKEND_LOG_INVALID", "log", Severity.UNKNOWN, detail)
        came, problem = self._generated_text()
        if problem:
            self._find("UNVERIFIABLE", "text", Severity.UNKNOWN, problem)
            return None
        ending = self._ending()
        if not self.added.detokenize and not came:
            comparison = self._no_text()
        else:
            comparison = compare(tokenizer, engine.ids, self._rules(), came, ending, self._chunk_ends())
            comparison = self._with_parsers(tokenizer, comparison, ending)
            self._text(tokenizer, comparison)
            if self.options.drift and "EXACT" in comparison.codes:
                self._drift(tokenizer, came)
            if comparison.codes and comparison.difference is None:
                self._held_back(tokenizer)
                self._missed_stop(tokenizer, came, comparison, ending)
        self._prompt(tokenizer)
        self._stream_ids(comparison, ending)
        self._finish()
        if not engine.complete:
            return None
        return self._kept(comparison), len(engine.ids)

    def _find(self, code: str, axis: Axis, severity: Severity, detail: str) -> None:
        places = (self.capture.place, self.engine.place)
        self.result.findings.append(Finding(code, axis, severity, detail, choice=self.choice, places=places))

    # ------------------------------------------------------------------------------------ what there is to compare

    def _blocked(self) -> tuple[str, Axis, Severity, str] | None:
        """Reasons not even to try."""
        engine, unknown = self.engine, Severity.UNKNOWN
        if engine.contradiction:
            return "BACKEND_LOG_INVALID", "log", unknown, engine.contradiction
        if engine.log.silent:
            return "HOOK_SILENT", "log", unknown, f"vLLM never called {engine.log.silent}, so its log may miss anything"
        if gaps := engine.losses:
            lost = sum(gap.count for gap in gaps) or "some"
            return "LOST_RECORDS", "log", unknown, f"the engine's log lost {lost} records ({gaps[0].reason})"
        if any(not 0 <= token_id < _ID_LIMIT for token_id in self.added.prompt_tail):
            return "BACKEND_LOG_INVALID", "log", unknown, "the prompt has ids that no tokenizer can have"
        mode = engine.log.engine.tokenizer.mode if engine.log.engine else "auto"
        if mode not in _MODES:
            return (
                "UNVERIFIABLE",
                "ids",
                unknown,
                f'the engine decodes in tokenizer mode "{mode}", which is not judged yet',
            )
        parameters = self.capture.start.parameters if self.capture.start else None
        if parameters is not None and parameters.use_beam_search:
            return "NOT_SUPPORTED", "protocol", unknown, "beam search: the join cannot follow it"
        return None

    def _foreign_ids(self, tokenizer: Tokenizer) -> tuple[Severity, str] | None:
        """Ids that the model cannot have sampled."""
        ids, start = self.engine.ids, self.engine.log.engine
        size = start.tokenizer.vocab_size if start else None
        limit = size if size is not None else _ID_LIMIT
        if ids and (min(ids) < 0 or max(ids) >= limit):
            index = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < limit)
            return Severity.FAULT, f"token {index} has an id that is not below {limit}"
        unknown = None if size is not None else next((i for i, t in enumerate(ids) if not tokenizer.knows(t)), None)
        if unknown is not None:
            detail = f"the tokenizer has no id of token {unknown}, and the model's vocabulary size is not known"
            return Severity.UNKNOWN, detail
        return None

    def _generated_text(self) -> tuple[str, str | None]:
        """What came, less an echoed prompt; or why that cannot be told apart."""
        text, start = self.delivered.text, self.capture.start
        parameters = start.parameters if start else None
        if start is None or parameters is None or not parameters.echo:
            return text, None
        if start.endpoint != "completions" or parameters.prompts != 1 or parameters.prompt_chars is None:
            return text, "the prompt is echoed, and its length in characters is not known"
        prompt, generated = text[: parameters.prompt_chars], text[parameters.prompt_chars :]
        cut = len(prompt) < parameters.prompt_chars  # the stream broke off within it
        if not cut and hashlib.sha256(prompt.encode()).hexdigest() != parameters.prompt_sha256:
            return text, "what was echoed is not the prompt of the request"
        return generated, None

    def _chunk_ends(self) -> list[int]:
        return list(accumulate(map(len, self.delivered.pieces)))

    def _rules(self) -> TextRules:
        return TextRules(
            skip_special_tokens=self.added.skip_special_tokens,
            spaces_between_special_tokens=self.added.spaces_between_special_tokens,
            include_stop_str_in_output=self.added.include_stop_str_in_output,
            prompt_len=self.added.prompt_len,
            prompt_tail=self.added.prompt_tail,
        )

    def _ending(self) -> Ending:
        request_end = self.capture.ending
        assert request_end is not None
        engine, delivered = self.engine, self.delivered
        stop = delivered.stop_reason if isinstance(delivered.stop_reason, str) else None
        if stop is not None and stop not in self._stop_strings():
            detail = "the reply names a stop string that nobody asked for"
            self._find("STOP_NOT_IN_IDS", "protocol", Severity.FAULT, detail)
            stop = None
        whole = request_end.outcome == "complete" and not self.capture.error_events
        broken_off = delivered.finish_reason is None and not whole
        if stop is not None or broken_off:
            by_token = False
        elif engine.finished is not None:  # the engine itself stops by tokens only; strings are the front end's
            by_token = engine.finished.finish_reason == "stop"
        else:
            by_token = bool(engine.ids) and engine.ids[-1] in {*self.added.eos_ids, *self.added.stop_token_ids}
        return Ending(by_token, stop, self.added.min_tokens, broken_off, not engine.complete)

    def _stop_strings(self) -> set[str]:
        parameters = self.capture.start.parameters if self.capture.start else None
        return {*self.added.stop, *(parameters.stop if parameters else ())}

    # ------------------------------------------------------------------------------------------- what came of it

    def _no_text(self) -> Comparison:
        """The request asked for ids alone: what there is to check is whether they came."""
        if self.delivered.token_ids is None:
            detail = "no text was asked for, and the reply holds no ids"
            self._find("UNVERIFIABLE", "text", Severity.UNKNOWN, detail)
            return Comparison(0)
        self._find("HIDDEN", "text", Severity.INFO, INFO_DETAILS["HIDDEN"])
        self.result.checked += len(self.engine.ids)
        return Comparison(len(self.engine.ids))

    def _finish(self) -> None:
        """The client was told how it ended, and the engine says how it ended it."""
        engine, told = self.engine, self.delivered
        if engine.finished is None or not engine.complete or self.damaged:
            return
        detail = finish_mismatch(
            told.finish_reason, told.stop_reason, engine.ids, self.added, engine.finished, engine.log.engine
        )
        if detail is not None:
            self._find("FINISH_MISMATCH", "protocol", Severity.FAULT, detail)

    def _missed_stop(self, tokenizer: Tokenizer, came: str, comparison: Comparison, ending: Ending) -> None:
        """A stop string stands in right text that went on past it."""
        start, told = self.capture.start, self.delivered
        if self.damaged or isinstance(told.stop_reason, str) or start is None:
            return
        if start.endpoint not in ("chat", "completions", "messages"):
            return  # the Responses API does not stop at strings
        parsed = bool(told.kinds - {"text"})
        if parsed and ending.broken_off:
            return
        texts = told.runs() if parsed else [came]
        may_end = self.added.include_stop_str_in_output and (ending.broken_off or told.finish_reason == "stop")
        expected = None
        for stop, end in stops_inside(texts, self._stop_strings(), may_end_with_one=may_end):
            expected = expected or self._expected(tokenizer)
            if counts(stop, end, expected, came, self.added.min_tokens):
                detail = "a stop string that was asked for stands in the text, which went on past it"
                self._find("STOP_MISSED", "protocol", Severity.FAULT, detail)
                return

    def _expected(self, tokenizer: Tokenizer) -> Expected:
        ids, rules = self.engine.ids, self._rules()
        return from_table(tokenizer, ids, rules) or from_replay(tokenizer, ids, rules)

    def _held_back(self, tokenizer: Tokenizer) -> None:
        """Events without text, and then the text of several ids at once: no loss, though it looks like one."""
        if self.delivered.held and (chunks := held_back(self.delivered, self._expected(tokenizer))):
            detail = f"{chunks} chunk{'s' if chunks > 1 else ''} came late, with the text of several tokens"
            self._find("HELD_BACK", "text", Severity.INFO, detail)

    def _prompt(self, tokenizer: Tokenizer) -> None:
        head = self.added.prompt_head or (
            self.added.prompt_tail[:2] if self.added.prompt_len == len(self.added.prompt_tail) else []
        )
        if len(head) == 2 and head[0] == head[1] and head[0] == tokenizer.bos():
            detail = "the prompt begins with the beginning-of-sequence token twice"
            self._find("DOUBLE_BOS", "ids", Severity.INFO, detail)

    def _text(self, tokenizer: Tokenizer, comparison: Comparison) -> None:
        difference = comparison.difference
        wrong = difference is not None or comparison.stop_missing
        if wrong and (excuse := self._excuse()):
            self.result.checked += comparison.tokens
            self._find("UNVERIFIABLE", "text", Severity.UNKNOWN, excuse)
            return
        self.result.checked += len(self.engine.ids) if wrong else comparison.tokens
        if "ABORTED_PREFIX" in comparison.codes:  # what was never sent could not be checked
            self.result.tokens -= len(self.engine.ids) - comparison.tokens
        if comparison.undecided:
            detail = f"it would have to be known: {comparison.undecided}"
            self._find("UNVERIFIABLE", "text", Severity.UNKNOWN, detail)
        if comparison.stop_missing:
            detail = "the stop string that is said to have ended it is not in the text of the ids"
            self._find("STOP_NOT_IN_IDS", "protocol", Severity.FAULT, detail)
            self.result.altered += len(self.engine.ids)
        for code in [*comparison.codes, *(["PARSER_DROPPED"] if comparison.left_out else [])]:
            if code != "EXACT":
                self._find(code, "text", Severity.INFO, INFO_DETAILS[code])
        if difference is not None:
            self._difference(difference, comparison.token_index or 0, comparison.piece)
            count = concerned(tokenizer, self.engine.ids[comparison.token_index or 0 :], difference)
            self.result.missing += count.missing
            self.result.altered += count.altered
            self.result.extra += count.extra

    def _excuse(self) -> str | None:
        """Why a difference is no fault here: something known may explain it."""
        if self.damaged:
            return "the difference may lie in what the proxy's log lost"
        start, engine = self.capture.start, self.engine.log.engine
        parameters = start.parameters if start else None
        if start is None or parameters is None or start.endpoint in ("chat", "completions"):
            return None
        if start.endpoint == "responses" and parameters.stop:
            return "the Responses API does not say which stop string ended a text"
        if self.delivered.kinds - {"text"} or parameters.tools or (engine and engine.reasoning_parser):
            return f"a parser may have laid the text into channels, which is not judged for {start.endpoint} yet"
        return None

    def _with_parsers(self, tokenizer: Tokenizer, comparison: Comparison, ending: Ending) -> Comparison:
        """The same where a reasoning or tool-call parser may have laid the text into channels."""
        start, delivered = self.capture.start, self.delivered
        parameters = (start.parameters if start else None) or RequestParameters()
        parsers = self._parsers(tokenizer, parameters)
        needed = bool(delivered.kinds - {"text"}) or parameters.tools or bool(parsers.reasoning)
        if start is None or start.endpoint != "chat" or not needed:
            return comparison
        if comparison.codes and not parsers.reasoning:
            return comparison  # all of the text came; which channel it belongs to is not known
        sent = Sent(
            list(zip(delivered.piece_kinds, delivered.pieces, strict=True)),
            [delivered.calls[index] for index in sorted(delivered.calls)],
            parameters.include_reasoning,
        )
        streamed = self.capture.response is None
        try:
            ids, rules = self.engine.ids, self._rules()
            return compare_channels(tokenizer, ids, rules, sent, ending, parsers, streamed=streamed) or comparison
        except TooManyHeld:
            return comparison  # which says so

    def _parsers(self, tokenizer: Tokenizer, parameters: RequestParameters) -> Parsers:
        """Which parsers were on. Another vLLM than the table was made for: not known."""
        engine, added = self.engine.log.engine, self.added
        name = None
        if engine is not None:
            name = engine.reasoning_parser if engine.reasoning_parser and engine.vllm.startswith(MADE_FOR) else None
            if not engine.reasoning_parser and "reasoning" not in self.delivered.kinds:
                name = ""
        opened = prompt_opens(tokenizer.text(added.prompt_tail, skip_special=False), name)
        same_release = engine is not None and engine.vllm.startswith(MADE_FOR)
        return Parsers(name, self.options.tool_parser if same_release else None, opened, parameters.tools)

    def _difference(self, difference: Difference, token: int, piece: int | None) -> None:
        """A fault of the text, at the chunk and the engine step where it shows first."""
        engine, delivered, capture = self.engine, self.delivered, self.capture
        chunk = bisect_right(self._chunk_ends(), difference.offset) if piece is None else piece
        chunk = min(chunk, max(0, len(delivered.pieces) - 1))
        chunk_line = delivered.piece_lines[chunk] if delivered.pieces else capture.line
        row = max(0, bisect_right(engine.row_starts, token) - 1)
        row_line = engine.row_lines[row] if engine.row_lines else engine.line
        for code in (difference.code, *(["BROKEN_UTF8"] if difference.broken_utf8 else [])):
            self.result.findings.append(
                Finding(
                    code,
                    "text",
                    Severity.FAULT,
                    f"at code point {difference.offset} of the text",
                    choice=self.choice,
                    token_index=token,
                    token_id=engine.ids[token] if token < len(engine.ids) else None,
                    chunk_index=chunk + 1,
                    due=difference.due,
                    came=difference.came,
                    places=(capture.log.place(chunk_line), engine.log.place(row_line)),
                )
            )

    def _kept(self, comparison: Comparison) -> int:
        return len(self.engine.ids) if comparison.kept is None else comparison.kept

    def _stream_ids(self, comparison: Comparison, ending: Ending) -> None:
        """The ids in the stream (return_token_ids) against the engine's; and ids past the stop string."""
        ids, sent = self.engine.ids, self.delivered.token_ids
        kept = self._kept(comparison)
        if kept < len(ids):
            detail = f"{len(ids) - kept} ids were sampled past the stop string"
            self._find("BACKEND_OVERRUN", "ids", Severity.INFO, detail)
        if sent is None or not self.engine.complete or self.damaged:
            return
        if sent in (ids, ids[:kept]) or (ending.broken_off and sent == ids[: len(sent)]):
            return
        if self.delivered.kinds - {"text"}:
            detail = f"{len(sent)} of {len(ids)} ids stand in the stream; parsers leave ids out"
            self._find("IDS_LEFT_OUT", "ids", Severity.INFO, detail)
            return
        index = next((i for i, (one, other) in enumerate(zip(sent, ids, strict=False)) if one != other), None)
        where = f"differ at token {index}" if index is not None else f"are {len(sent)}, the engine sampled {kept}"
        self._find("ID_MISMATCH", "ids", Severity.FAULT, f"the ids in the stream {where}")

    def _drift(self, tokenizer: Tokenizer, came: str) -> None:
        """Does the text, tokenized anew, give other ids? Information, never a fault."""
        end_ids = frozenset({*self.added.eos_ids, *self.added.stop_token_ids})
        found = retokenize(tokenizer, self.engine.ids, end_ids, came)
        self.result.retokenized += found.compared
        self.result.drifted += found.drifted
        if found.code:
            self._find(found.code, "ids", Severity.INFO, found.detail)

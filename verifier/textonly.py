"""What a stream alone gives away, where no engine's log is there to judge it by. Pure.

Rules that cannot be wrong, each with what it needs to be there. Nothing found is no pass: a character changed for
another leaves no trace, as a rule.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from verifier.classify import Difference
from verifier.compare import Comparison, Ending, compare
from verifier.endings import stops_inside
from verifier.expect import REPLACEMENT, TextRules
from verifier.findings import Axis, Finding, Severity
from verifier.parsers import CALL_SIGN, REASONING
from verifier.requests import Capture, Delivered
from verifier.tokenizer import Tokenizer

COUNTS, RUNNING, SHORTEST = "counts in the stream", "running usage", "shortest spelling"
IDS, STOPS = "ids in the stream", "stop strings"


@dataclass(slots=True)
class StreamAlone:
    """Judges one reply by itself. `rules`: those that ran, in their order."""

    capture: Capture
    tokenizer: Tokenizer | None = None  # the operator's word for it: nothing here can prove it
    rules: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def judge(self) -> "StreamAlone":
        capture, start, ending = self.capture, self.capture.start, self.capture.ending
        parameters = start.parameters if start else None
        if start is None or parameters is None or ending is None or capture.error_events:
            return self
        if start.endpoint not in ("chat", "completions") or parameters.echo or parameters.use_beam_search:
            return self
        whole = ending.outcome == "complete"
        plain = not parameters.tools and parameters.include_reasoning and self._plain()
        if plain and whole and self._counts() and self.tokenizer is not None and parameters.detokenize:
            self._ids(self.tokenizer)
        if plain and not self.findings:  # one fault is told once
            self._running()
        if plain and not self.findings and whole and self.tokenizer is not None and parameters.skip_special_tokens:
            self._shortest(self.tokenizer)
        if plain and parameters.stop and not parameters.min_tokens:
            self._stops(whole)
        return self

    def sentence(self) -> str:
        """What ran, for people."""
        if not self.rules:
            return "no rule for the stream alone applies to it"
        found = "found a fault" if self.findings else "found nothing wrong"
        broken = sum(choice.text.count(REPLACEMENT) for choice in self.capture.choices.values())
        warning = f"; U+FFFD stands in it {broken} times" if broken else ""
        return f"the rules for the stream alone ({', '.join(self.rules)}) {found}{warning}"

    def _plain(self) -> bool:
        """No parser has been at work, which leaves ids out of the stream and markers out of the text."""
        return bool(self.capture.choices) and all(each.kinds <= {"text"} for each in self.capture.choices.values())

    def _choices(self) -> Iterator[tuple[int, Delivered]]:
        return iter(sorted(self.capture.choices.items()))

    def _find(self, code: str, axis: Axis, detail: str, choice: int | None = None, piece: int | None = None) -> None:
        place, chunk = self.capture.place, None
        if choice is not None and piece is not None:
            place, chunk = self.capture.log.place(self.capture.choices[choice].piece_lines[piece]), piece + 1
            detail = f"{detail} (chunk {chunk})"
        finding = Finding(code, axis, Severity.FAULT, detail, choice=choice, places=(place,))
        self.findings.append(replace(finding, chunk_index=chunk))

    def _total(self) -> int | None:
        return self.capture.usage.completion_tokens if self.capture.usage else None

    # ------------------------------------------------------------------------------------------------------ the rules

    def _counts(self) -> bool:
        """Ids, or else log probabilities, one a token: as many as the usage says. Returns whether the ids are all."""
        total, choices = self._total(), self.capture.choices.values()
        for what, counted in (
            ("ids", [None if each.token_ids is None else len(each.token_ids) for each in choices]),
            ("log probabilities", [each.logprobs for each in choices]),
        ):
            known = [count for count in counted if count is not None]
            if total is None or len(known) < len(counted) or not known:
                continue
            self.rules.append(COUNTS)
            if sum(known) != total:
                self._find("COUNT_MISMATCH", "ids", f"usage says {total} completion tokens, {sum(known)} {what} came")
            return what == "ids" and sum(known) == total
        return False

    def _ids(self, tokenizer: Tokenizer) -> None:
        """The ids in the stream must give its text. What of the prompt decides the text's beginning is not known."""
        self.rules.append(IDS)
        for number, choice in self._choices():
            difference = self._difference(tokenizer, choice)
            if difference is None:
                continue
            self._find(difference.code, "text", "the ids in the stream give another text", number)

    def _difference(self, tokenizer: Tokenizer, choice: Delivered) -> Difference | None:
        """None where the ids explain the text, or where it is not certain that they do not."""
        start = self.capture.start
        assert start is not None
        assert start.parameters is not None
        parameters, ids = start.parameters, choice.token_ids or []
        rules = TextRules(
            parameters.skip_special_tokens,
            parameters.spaces_between_special_tokens,
            parameters.include_stop_str_in_output,
            prompt_len=1,  # at least, and which is not known
        )
        stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        found: list[Comparison] = []
        for by_token in (True, False):
            ending = Ending(by_token and stop is None, stop, parameters.min_tokens)
            found.append(compare(tokenizer, ids, rules, choice.text, ending))
        if any(one.codes or one.undecided or one.stop_missing for one in found) or not all(map(tokenizer.knows, ids)):
            return None
        due = tokenizer.text(ids, skip_special=False)
        broken = REPLACEMENT in due + choice.text
        return None if broken or _may_be_parsed(due) else found[0].difference

    def _running(self) -> None:
        """Usage in every event grows with each that has text, and suffices to spell the text so far."""
        for number, choice in self._choices():
            if not choice.running:
                continue
            if RUNNING not in self.rules:
                self.rules.append(RUNNING)
            before = 0
            for piece, count in choice.running:
                if count <= before:
                    again = piece > 0 and choice.pieces[piece] in choice.pieces[:piece]
                    code = "REORDERED" if count < before else "DUPLICATED_TEXT" if again else "EXTRA_TEXT"
                    detail = f"its event counts {count} tokens, as many as were counted before it or fewer"
                    self._find(code, "text", detail, number, piece)
                    break
                before = count
            else:
                if self.tokenizer is not None:
                    self._spelled_so_far(self.tokenizer, number, choice)

    def _spelled_so_far(self, tokenizer: Tokenizer, number: int, choice: Delivered) -> None:
        fewest = fewest_tokens(tokenizer, choice.text)
        end = 0
        ends = [end := end + len(piece.encode()) for piece in choice.pieces]
        for piece, count in choice.running:
            if fewest and (least := fewest[ends[piece]]) > count:
                detail = f"it takes {least} tokens at least to spell the text so far, its event counts {count}"
                self._find("EXTRA_TEXT", "text", detail, number, piece)
                return

    def _shortest(self, tokenizer: Tokenizer) -> None:
        """All the text takes more tokens to spell than were counted, the end tokens aside, which have no text."""
        total = self._total()
        if total is None:
            return
        least = ends = 0
        for _, choice in self._choices():
            fewest = fewest_tokens(tokenizer, choice.text)
            if not fewest:
                return
            least += fewest[-1]
            ends += self._ended_by_token(choice)
        self.rules.append(SHORTEST)
        if least > total - ends:
            counted = f"usage says {total}, {ends} of them end tokens" if ends else f"usage says {total}"
            self._find("EXTRA_TEXT", "text", f"it takes {least} tokens at least to spell the text, {counted}")

    def _ended_by_token(self, choice: Delivered) -> bool:
        start = self.capture.start
        parameters = start.parameters if start else None
        if parameters is None or parameters.stop or parameters.include_stop_str_in_output:
            return False
        return choice.finish_reason == "stop" and not isinstance(choice.stop_reason, str)

    def _stops(self, whole: bool) -> None:
        """A stop string inside text that went on past it."""
        start = self.capture.start
        assert start is not None
        assert start.parameters is not None
        self.rules.append(STOPS)
        for number, choice in self._choices():
            if isinstance(choice.stop_reason, str):
                continue
            may_end = start.parameters.include_stop_str_in_output and (not whole or choice.finish_reason == "stop")
            if any(stops_inside(choice.runs(), start.parameters.stop, may_end_with_one=may_end)):
                detail = "a stop string that was asked for stands in the text, which went on past it"
                self._find("STOP_MISSED", "protocol", detail, number)


def _may_be_parsed(text: str) -> bool:
    """Does it hold what some parser would take out, so that not all of it is due?"""
    markers = {marker for rules in REASONING.values() for marker in (rules.start, rules.end) if marker}
    return any(marker in text for marker in markers) or bool(CALL_SIGN.search(text))


def fewest_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """For each number of bytes of `text`: how many tokens it takes at least to spell so much, the last one perhaps cut.

    Empty where that cannot be told: broken characters, a decoder of unknown family, or a text that it cannot spell.
    """
    if REPLACEMENT in text or (vocabulary := tokenizer.spellings()) is None:
        return []
    data = text.encode()
    begun = _spell(data, *vocabulary)
    if tokenizer.strips:  # the text's first space may have been dropped
        other = _spell(b" " + data, *vocabulary)[1:]
        begun = [min(one, another) for one, another in zip(begun, other, strict=True)]
    return [] if begun[-1] > len(data) + 1 else begun


def _spell(data: bytes, tokens: frozenset[bytes], beginnings: frozenset[bytes]) -> list[int]:
    """As fewest_tokens; len(data) + 2 where it cannot be spelled."""
    never = len(data) + 2
    whole = [never] * (len(data) + 1)  # fewest that end exactly here
    begun = whole.copy()  # fewest of which the last may go on
    whole[0] = begun[0] = 0
    for start in range(len(data)):
        count = whole[start] + 1
        if count > never:
            continue
        end = start + 1
        while end <= len(data) and (piece := data[start:end]) in beginnings:
            begun[end] = min(begun[end], count)
            if piece in tokens:
                whole[end] = min(whole[end], count)
            end += 1
    return begun

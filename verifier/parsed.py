"""The text axis of a choice whose text parsers lay into channels, over each text its ids may have. Pure."""

from collections.abc import Sequence

from verifier.channels import Account, Parsers, Sent, explain, output_of
from verifier.compare import Comparison, Due, Ending, dues
from verifier.expect import TextRules
from verifier.tokenizer import Tokenizer


def compare_channels(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    rules: TextRules,
    sent: Sent,
    ending: Ending,
    parsers: Parsers,
    *,
    streamed: bool,
) -> Comparison | None:
    """As compare(), with what parsers do taken into account. None: the ids give no text to begin with.

    Raises TooManyHeld.
    """
    prompt_tail = tokenizer.text(rules.prompt_tail)
    tried: list[tuple[Due, Account]] = []
    for due in dues(tokenizer, ids, rules, ending):
        output = output_of(tokenizer, due.ids, due.expected, due.text, streamed=streamed)
        account = explain(output, sent, parsers, whole=not ending.broken_off, prompt_tail=prompt_tail)
        if account.codes:
            return _proven(due, account, len(ids), ending)
        tried.append((due, account))
    if not tried:
        return None
    due, account = max(tried, key=lambda pair: pair[1].difference.offset if pair[1].difference else len(pair[0].text))
    if account.difference is None or ending.engine_open:
        undecided = account.undecided or "the ids sampled after the end of the engine's log"
        return Comparison(0, undecided=undecided)
    token = due.expected.token_at(account.difference.offset)
    return Comparison(token, difference=account.difference, token_index=token, piece=account.piece)


def _proven(due: Due, account: Account, total: int, ending: Ending) -> Comparison:
    plain = account.codes == ["PLAIN"]
    codes = [*due.codes, *([] if plain else account.codes)] or ["EXACT"]
    tokens = due.expected.token_at(account.reached) if ending.broken_off else total
    return Comparison(tokens, codes, due.kept, left_out=account.left_out)

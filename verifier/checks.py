"""What `sparseety doctor` looks at of the verifier: has it the engine's tokenizer, does it watch."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from sparseety.asking import NoAnswer, ask
from sparseety.checks import Part, Result, Subject, count_of, fail, ok, unknown
from sparseety.errors import SparseetyError
from sparseety.records import EngineStart
from verifier.tokenizer import THREE_WAYS, NoTokenizer, OtherTokenizer, TokenizerShelf

_VERDICTS = re.compile(r'^sparseety_verify_requests_total\{[^}]*verdict="(\w+)"[^}]*\} (\S+)', re.M)


def _check(subject: Subject) -> Iterator[Result]:
    yield from _tokenizers(subject)
    if subject.verifier is not None:
        yield _watch(subject, subject.verifier)


def _tokenizers(subject: Subject) -> Iterator[Result]:
    given = subject.tokenizers or [Path(path) for path in [os.environ.get("SPARSEETY_VERIFY_TOKENIZER")] if path]
    shelf = TokenizerShelf(given, subject.model_map)
    engines = [log.engine for log in subject.newest("engine") if log.engine]
    if not engines:
        yield unknown("verifier.tokenizer", "no engine's log says with which tokenizer it decodes")
    for engine in engines:
        yield _tokenizer(shelf, engine)


def _tokenizer(shelf: TokenizerShelf, engine: EngineStart) -> Result:
    name, identity = "verifier.tokenizer", engine.tokenizer
    sha256 = identity.files.get("tokenizer.json")
    models = engine.served_names
    try:
        tokenizer = shelf.find(identity.name, sha256, models)
    except NoTokenizer as error:
        # Another one is a fault of this set-up: no request could be judged. None at all may be meant, here.
        judged = fail if isinstance(error, OtherTokenizer) else unknown
        return judged(name, str(error).removesuffix(THREE_WAYS).rstrip(";: "), THREE_WAYS)
    except SparseetyError as error:
        return fail(name, str(error), THREE_WAYS)
    if sha256 is None:
        text = f"{tokenizer.path} would be used for {identity.name}; the engine's log does not say which file it has"
        return unknown(name, text, "its tokenizer has no tokenizer.json; see that the two are the same")
    return ok(name, f"{tokenizer.path} is the engine's: sha256 {sha256[:12]} on both sides ({', '.join(models)})")


def _watch(subject: Subject, url: str) -> Result:
    name = "verifier.watch"
    try:
        answer = ask(f"{url}/metrics", seconds=subject.seconds)
    except NoAnswer as error:
        fix = "verify-tokens --watch LOGS --metrics-port PORT; from elsewhere also --metrics-host"
        return fail(name, f"no watch at {url}: {error}", fix)
    counts: dict[str, int] = {}
    for verdict, value in _VERDICTS.findall(answer.text):
        counts[verdict] = counts.get(verdict, 0) + count_of(value)
    if answer.status != 200 or "sparseety_verify_" not in answer.text:
        return fail(name, f"{url}/metrics says {answer.status} and has no verdicts", "is it another server?")
    told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())) or "nothing judged yet"
    return ok(name, f"a watch answers at {url}: {told}")


PART = Part(check=_check)

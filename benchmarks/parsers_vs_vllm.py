"""Run vLLM's own parser classes over thousands of outputs and hold verifier/channels.py against what they deliver.

    VLLM_PYTHON benchmarks/parsers_vs_vllm.py --tokenizer FOLDER [--count 2000] [--parsers qwen3,hermes] [--record DIR]

Run by the Python of an environment that has vLLM (no server, no model); FOLDER holds a tokenizer.json that
transformers loads. For each parser of verifier/parsers.py it makes outputs (plain, unfinished, nested, without markers,
markers only, spelled markers, odd whitespace, Unicode, junk), feeds them through Parser.parse_delta as the chat
endpoint does (one id at a time, several, all at once; with a stop string's hold-back) and through Parser.parse, and
asserts that the account says "explained" for each; then it damages what was delivered and counts what is found.
Exit status 1: a false alarm.
"""

import argparse
import json
import logging
import os
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

from sparseety.records import ToolCall
from verifier.channels import Account, Parsers, Sent, explain, output_of, prompt_opens
from verifier.expect import TextRules, from_table
from verifier.parsers import REASONING, TOOLS, Reasoning, Tools
from verifier.script import Output
from verifier.tokenizer import Tokenizer, load_tokenizer

WORDS = "the answer is 42 so let me think About it: café 漢字 😀 naïve x<y a>b [1, 2] {} -> it's".split()  # noqa: SIM905
SPACES = [" ", " ", " ", "\n", "\n\n", "  ", "\t", " \n "]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}


@dataclass(frozen=True)
class Case:
    """One output, and how it is served."""

    ids: list[int]
    prompt: list[int]
    streamed: bool = True
    groups: list[int] = field(default_factory=list)  # ids in each delta
    hold_back: int = 0  # characters held back for a stop string
    reasoning: str | None = None
    tools: str | None = None
    choice: Any = None  # tool_choice; None: no tools are offered
    asked: bool = True  # include_reasoning
    template: dict[str, Any] = field(default_factory=dict)  # chat_template_kwargs


class Server:
    """vLLM's parsers over one tokenizer, called as vLLM's chat endpoint calls them."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        self.hf = AutoTokenizer.from_pretrained(folder)
        markers = {marker for rules in REASONING.values() for marker in (rules.start, rules.end, *rules.openers)}
        markers |= {"<assistant>", "<tool_call>", "</tool_call>"}
        self.hf.add_tokens(sorted(marker for marker in markers if marker))
        self._home = tempfile.TemporaryDirectory()
        self.hf.save_pretrained(self._home.name)
        vocabulary = self.hf.get_vocab()
        self.hf.get_vocab = lambda: vocabulary  # each parser asks for it, and it is made anew each time
        self.tokenizer: Tokenizer = load_tokenizer(Path(self._home.name))

    def request(self, case: Case) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": case.streamed}
        body["include_reasoning"] = case.asked
        if case.choice is not None:
            body |= {"tools": [TOOL], "tool_choice": case.choice}
        return ChatCompletionRequest.model_validate(body)

    def serve(self, case: Case) -> tuple[Sent, list[int], bool]:
        """(what the client gets, how many pieces after each delta, skip_special_tokens of the engine)."""
        from vllm.parser.parser_manager import ParserManager

        cls = ParserManager.get_parser(case.tools, case.reasoning, enable_auto_tools=True)
        assert cls is not None
        request = self.request(case)
        if cls.tool_parser_cls is not None:  # as VLLM_ENFORCE_STRICT_TOOL_CALLING=0 has it
            cls.tool_parser_cls.supports_required_and_named = case.choice not in ("auto", None)
        parser = cls(self.hf, request.tools, chat_template_kwargs=dict(case.template))
        request = parser.adjust_request(request)
        skip = request.skip_special_tokens
        texts = self.tokenizer.replay(case.prompt, case.ids, skip_special=skip, spaces_between_special=True)
        if not case.streamed:
            return _whole(parser, "".join(texts), request, case), [], skip
        pieces: list[tuple[str, str]] = []
        calls: dict[int, ToolCall] = {}
        done, text, emitted = 0, "", 0
        after: list[int] = []
        for number, size in enumerate(case.groups):
            ids = case.ids[done : done + size]
            text += "".join(texts[done : done + size])
            done += size
            finished = number == len(case.groups) - 1
            until = len(text) if finished else max(emitted, len(text) - case.hold_back)
            delta, emitted = text[emitted:until], until
            message = parser.parse_delta(delta, ids, request, prompt_token_ids=case.prompt, finished=finished)
            if message is not None:
                _collect(message, pieces, calls)
            after.append(len(pieces))
        return Sent(pieces, list(calls.values()), case.asked), after, skip


def _collect(message: Any, pieces: list[tuple[str, str]], calls: dict[int, ToolCall]) -> None:
    for kind, text in (("reasoning", message.reasoning), ("text", message.content)):
        if text:
            pieces.append((kind, text))
    for call in message.tool_calls or []:
        function = call.function
        get = function.get if isinstance(function, dict) else lambda key, function=function: getattr(function, key)
        known = calls.get(call.index, ToolCall(index=call.index))
        arguments = get("arguments") or ""
        calls[call.index] = ToolCall(
            index=call.index, name=known.name or get("name"), arguments=known.arguments + arguments
        )
        if arguments:
            pieces.append(("tool_call", arguments))


def _whole(parser: Any, text: str, request: Any, case: Case) -> Sent:
    reasoning, content, tool_calls = parser.parse(
        text, request, enable_auto_tools=True, model_output_token_ids=case.ids
    )
    if case.tools is None or request.tool_choice in (None, "none"):
        tool_calls = None
    pieces = [("reasoning", reasoning if case.asked else None), ("text", content)]
    calls = [ToolCall(index=n, name=c.name, arguments=c.arguments) for n, c in enumerate(tool_calls or [])]
    pieces += [("tool_call", call.arguments) for call in calls]
    return Sent([(kind, text) for kind, text in pieces if text], calls, case.asked)


# -------------------------------------------------------------------------------------------------- making outputs


class Maker:
    def __init__(self, server: Server, rng: random.Random) -> None:
        self.server, self.rng = server, rng

    def encode(self, text: str) -> list[int]:
        return self.server.tokenizer.encode(text)

    def prose(self, most: int = 8) -> str:
        rng = self.rng
        return "".join(rng.choice(WORDS) + rng.choice(SPACES) for _ in range(rng.randint(0, most)))

    def spelled(self, marker: str) -> list[int]:
        cut = self.rng.randint(1, len(marker) - 1)
        return self.encode(marker[:cut]) + self.encode(marker[cut:])

    def call(self, tools: Tools) -> str:
        rng = self.rng
        arguments: Any = rng.choice(
            [
                {},
                {"city": self.prose(2)},
                {"city": "Zürich", "days": 3},
                {"a": {"b": [1, 2.5, None, True]}},
                "text",
                [1],
            ]
        )
        name = rng.choice(["get_weather", "find", "x.y"])
        inner = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=rng.random() < 0.5)
        roll = rng.random()
        if roll < 0.08:
            inner = inner[: rng.randint(0, len(inner))]
        elif roll < 0.14:
            inner = json.dumps({"arguments": arguments, "name": name})
        elif roll < 0.18:
            inner = inner.replace("}", "} ").replace("{", "{ ")
        elif roll < 0.21:
            inner += rng.choice([" junk", "}", "\n}", ","])
        elif roll < 0.24:
            inner = self.prose(3)
        space = rng.choice(["\n", "", " ", "\n\n"])
        return f"{tools.start}{space}{inner}{space}{tools.end}"

    def content(self, tools: Tools | None) -> str:
        rng = self.rng
        if tools is None or rng.random() < 0.25:
            return self.prose()
        text = rng.choice(["", "\n\n", self.prose()])
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            text += self.call(tools) + rng.choice(["", "\n", "\n", self.prose(3)])
        if rng.random() < 0.12:
            text = text[: rng.randint(0, len(text))]
        return text

    def ids(self, reasoning: str | None, tools: str | None) -> tuple[list[int], bool]:
        """(the ids, each marker comes once at most)."""
        rng = self.rng
        rules = REASONING[reasoning] if reasoning else None
        tool_rules = TOOLS[tools] if tools else None
        if rules is None:
            return self.encode(self.content(tool_rules))[:160], True
        kind = rng.choices(
            ["normal", "bare", "unfinished", "none", "markers", "nested", "spelled", "opener", "junk", "special"],
            [30, 25, 12, 6, 4, 6, 6, 5, 3, 3],
        )[0]
        think, content = self.prose(), self.content(tool_rules)
        return self._ids(kind, rules, think, content), kind in ("normal", "bare", "unfinished", "none")

    def _ids(self, kind: str, rules: Reasoning, think: str, content: str) -> list[int]:
        rng, start, end = self.rng, rules.start or "", rules.end
        match kind:
            case "normal":
                return self.encode(
                    start + rng.choice(["", "\n"]) + think + end + rng.choice(["", "\n", "\n\n"]) + content
                )
            case "bare":
                return self.encode(think + end + rng.choice(["", "\n\n"]) + content)
            case "unfinished":
                return self.encode(rng.choice([start, ""]) + think)
            case "none":
                return self.encode(content)
            case "markers":
                return self.encode(rng.choice([start + end, end, start, end + start, start + end + end]))
            case "nested":
                return self.encode(
                    start + think + start + self.prose(3) + end + content + rng.choice([end, start]) + self.prose(3)
                )
            case "spelled":
                before = [*self.encode(start + think), *self.spelled(end), *self.encode(self.prose(2))]
                return before + self.encode(end + content)
            case "opener":
                return self.encode(
                    think
                    + rng.choice([*rules.openers, *rules.spellings, "<tool_call>"])
                    + content
                    + end
                    + self.prose(2)
                )
            case "special":
                special = rng.choice(sorted(self.server.tokenizer.special))
                return [*self.encode(think), special, *self.encode(end + content), special]
            case _:
                pool = [start, end, "<", "</", "think", ">", "\n", " ", "a", *rules.openers, "</think", "<thi"]
                return [i for _ in range(rng.randint(1, 14)) for i in self.encode(rng.choice(pool))]

    def forced(self, reasoning: str | None) -> tuple[Any, list[int]]:
        """(tool_choice, ids) of a request that must call; their text is constrained to JSON."""
        rng = self.rng
        text = self.prose() + REASONING[reasoning].end + rng.choice(["", "\n\n"]) if reasoning else ""
        values: list[Any] = [{}, {"city": self.prose(2)}, {"a": [{"b": '}"'}, 1.5, None]}]
        if rng.random() < 0.4:
            choice: Any = {"type": "function", "function": {"name": "get_weather"}}
            text += rng.choice(["", " "]) + json.dumps(rng.choice(values), ensure_ascii=False)
        else:
            choice = "required"
            calls = [{"name": "get_weather", "parameters": rng.choice(values)} for _ in range(rng.randint(1, 3))]
            text += json.dumps(calls, ensure_ascii=False, indent=rng.choice([None, None, 1]))
        if rng.random() < 0.15:
            text = text[: rng.randint(0, len(text))]
        return choice, self.encode(text)

    def groups(self, size: int) -> list[int]:
        rng = self.rng
        how = rng.choice(["one", "one", "some", "many", "all"])
        if how == "one":
            groups = [1] * size
        elif how == "all":
            groups = [size]
        else:
            groups, left = [], size
            while left:
                groups.append(min(left, rng.randint(1, 4 if how == "some" else 12)))
                left -= groups[-1]
        return [*groups, 0] if rng.random() < 0.3 or not groups else groups  # a last delta without ids

    def prompt(self, reasoning: str | None) -> list[int]:
        """Ids that end in an open, a closed or no reasoning."""
        rules = REASONING[reasoning] if reasoning else None
        text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        if rules is not None:
            start = rules.start or ""
            text += self.rng.choice([start + "\n", "", "", start + "\n\n" + rules.end + "\n\n" if start else ""])
        return self.encode(text)

    def case(self, reasoning: str | None, tools: str | None, whole_share: float = 0.25) -> Case:
        rng = self.rng
        ids, plain = self.ids(reasoning, tools)
        ids = ids or self.encode("x")
        case = Case(ids, self.prompt(reasoning), reasoning=reasoning, tools=tools)
        if reasoning and REASONING[reasoning].can_be_off and rng.random() < 0.75:
            case = replace(case, template={"thinking": True})
        if tools is not None:
            case = replace(case, choice=rng.choice(["auto", "auto", "auto", None]))
            if rng.random() < 0.2:
                choice, ids = self.forced(reasoning)
                ids, plain = ids or self.encode("["), True
                # The text is constrained once the reasoning ends, so with a closed prompt it holds none.
                case = replace(case, choice=choice, ids=ids, prompt=self.encode("<|im_start|>assistant\n"))
        if rng.random() < whole_share:
            return replace(case, streamed=False)
        # With a stop string text lags behind ids. Classes that go by ids then lose text, and the engine repeats some
        # where markers repeat: real faults of vLLM 0.32, which docs/parsers.md names.
        fit = plain and (reasoning is None or (REASONING[reasoning].engine and tools is None))
        hold = rng.choice([0, 0, 0, 3]) if fit else 0
        return replace(case, groups=self.groups(len(ids)), hold_back=hold, asked=rng.random() > 0.05)


# ------------------------------------------------------------------------------------------------------ the account


def due(server: Server, case: Case, skip: bool) -> tuple[Output, bool | None]:
    """The output as the verifier sees it, and whether the prompt opened the reasoning, if that is known."""
    expected = from_table(server.tokenizer, case.ids, TextRules(skip_special_tokens=skip))
    assert expected is not None
    output = output_of(server.tokenizer, case.ids, expected, expected.text, streamed=case.streamed)
    prompt = server.tokenizer.text(case.prompt[-16:], skip_special=False)
    return output, prompt_opens(prompt, case.reasoning)


def account_of(server: Server, case: Case, sent: Sent, skip: bool, whole: bool = True) -> Account:
    output, opened = due(server, case, skip)
    known = Parsers(case.reasoning or "", case.tools or "", opened, case.choice is not None)
    return explain(output, sent, known, whole=whole)


def damage(sent: Sent, rng: random.Random) -> tuple[str, Sent] | None:
    """The same with one fault in it; None: nothing here to damage in the way that was drawn."""
    pieces, calls = list(sent.pieces), list(sent.calls)
    markers = {m for rules in REASONING.values() for m in (rules.start, rules.end, *rules.openers)}
    texts = [
        n
        for n, (kind, text) in enumerate(pieces)
        if kind != "tool_call" and text.strip() and text.strip() not in markers and not text.strip().startswith("<|")
    ]
    how = rng.choice(["drop", "duplicate", "alter", "move", "call dropped", "call altered"])
    if how.startswith("call"):
        if not calls:
            return None
        at = rng.randrange(len(calls))
        if how == "call dropped":
            del calls[at]
        elif not calls[at].arguments:
            return None
        else:
            text = calls[at].arguments
            place = rng.randrange(len(text))
            calls[at] = ToolCall(
                index=at, name=calls[at].name, arguments=text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :]
            )
            if _meaning(text) == _meaning(calls[at].arguments):
                return None
        return how, replace(sent, calls=calls)
    if not texts:
        return None
    at = rng.choice(texts)
    kind, text = pieces[at]
    if how == "drop":
        del pieces[at]
    elif how == "duplicate":
        pieces.insert(at, pieces[at])
    elif how == "alter":
        place = next(i for i, letter in enumerate(text) if not letter.isspace())
        pieces[at] = (kind, text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :])
    else:
        pieces[at] = ("text" if kind == "reasoning" else "reasoning", text)
    return how, replace(sent, pieces=pieces)


def _meaning(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return text


# ------------------------------------------------------------------------------------------------------- the report


def check(server: Server, reasoning: str | None, tools: str | None, count: int, seed: int, show: int) -> Counter[str]:
    rng = random.Random(f"{reasoning}/{tools}/{seed}")
    maker = Maker(server, rng)
    figures: Counter[str] = Counter()
    for _ in range(count):
        case = maker.case(reasoning, tools)
        sent, after, skip = server.serve(case)
        figures["outputs"] += 1
        if fault := own_fault(case, sent, server.tokenizer.text(case.ids, skip_special=False)):
            figures[f"vLLM's own fault: {fault}"] += 1
            continue
        account = account_of(server, case, sent, skip)
        for code in account.codes:
            figures[code] += 1
        if not account.codes:
            figures["FALSE ALARM" if account.difference else "undecided"] += 1
            if figures["FALSE ALARM"] + figures["undecided"] <= show:
                _show(server, case, sent, account)
            continue
        broken = _prefix(case, sent, after, rng)
        if broken is not None:
            figures["broken off"] += 1
            if not account_of(server, case, broken, skip, whole=False).codes:
                figures["FALSE ALARM (broken off)"] += 1
                if figures["FALSE ALARM (broken off)"] <= show:
                    _show(server, case, broken, account_of(server, case, broken, skip, whole=False))
        damage_done = damage(sent, rng)
        if damage_done is None:
            continue
        how, damaged = damage_done
        verdict = account_of(server, case, damaged, skip)
        outcome = "found" if verdict.difference else "undecided" if verdict.undecided else "missed"
        if outcome == "missed" and how == "move" and len({kind for kind, _ in damaged.pieces} - {"tool_call"}) == 1:
            outcome = "no marker tells"
        figures[f"{how}: {outcome}"] += 1
        if outcome == "missed" and sum(n for key, n in figures.items() if key.endswith("missed")) <= show:
            print("missed", how)
            _show(server, case, damaged, verdict)
    return figures


def own_fault(case: Case, sent: Sent, text: str) -> str | None:
    """A fault of vLLM 0.32 itself, which the verifier rightly reports: told by what came, not by the account."""
    if any(
        call.arguments.endswith("{}") and call.arguments not in text and call.arguments[:-2] in text
        for call in sent.calls
        if len(call.arguments) > 2
    ):
        return "the arguments {} of a call without a name are appended to the call before"
    return None


def _prefix(case: Case, sent: Sent, after: list[int], rng: random.Random) -> Sent | None:
    """What a client has that leaves after some deltas. (Calls: only where the cut falls before them.)"""
    if not case.streamed or not sent.pieces:
        return None
    keep = rng.choice(after)
    pieces = sent.pieces[:keep]
    if any(kind == "tool_call" for kind, _ in sent.pieces[: keep + 1]):
        return None
    return replace(sent, pieces=pieces, calls=())


def _show(server: Server, case: Case, sent: Sent, account: Account) -> None:
    print("  text   ", repr(server.tokenizer.text(case.ids, skip_special=False)))
    print("  prompt ", repr(server.tokenizer.text(case.prompt[-6:], skip_special=False)))
    print(
        "  served ",
        "streamed" if case.streamed else "whole",
        case.groups,
        case.hold_back,
        case.tools,
        case.choice,
        case.asked,
    )
    print("  pieces ", sent.pieces)
    print("  calls  ", [(call.name, call.arguments) for call in sent.calls])
    print("  account", account, flush=True)


def record(server: Server, folder: Path, pairs: list[tuple[str | None, str | None]], seed: int, each: int) -> None:
    """Write small cases with what the parsers delivered, for tests that run without vLLM."""
    folder.mkdir(parents=True, exist_ok=True)
    for reasoning, tools in pairs:
        maker = Maker(server, random.Random(f"{reasoning}/{tools}/{seed}/record"))
        rows: list[dict[str, Any]] = []
        while len(rows) < each:
            case = maker.case(reasoning, tools)
            sent, _, skip = server.serve(case)
            text = server.tokenizer.text(case.ids, skip_special=False)
            if len(case.ids) > 60 or not sent.pieces or own_fault(case, sent, text):
                continue
            output, opened = due(server, case, skip)
            rows.append(
                {
                    "reasoning": reasoning or "",
                    "tools": tools or "",
                    "offered": case.choice is not None,
                    "streamed": case.streamed,
                    "asked": case.asked,
                    "opened": opened,
                    "text": output.text,
                    "markers": [[m.start, m.end, m.content, m.special] for m in output.markers],
                    "pieces": sent.pieces,
                    "calls": [[call.name, call.arguments] for call in sent.calls],
                }
            )
        name = "-".join(name for name in (reasoning, tools) if name)
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        (folder / f"{name}.json").write_text(f"[\n{lines}\n]\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer that transformers loads")
    parser.add_argument("--count", type=int, default=2000, help="outputs for each parser")
    parser.add_argument("--parsers", help="names, with commas; a pair as reasoning+tools")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=2, help="examples printed of each trouble")
    parser.add_argument("--record", type=Path, help="write small cases into this folder instead")
    parser.add_argument("--each", type=int, default=12, help="cases recorded for each parser")
    arguments = parser.parse_args()
    pairs: list[tuple[str | None, str | None]] = [(name, None) for name in REASONING]
    pairs += [(None, name) for name in TOOLS]
    pairs += [("deepseek_r1", "hermes"), ("qwen3", "hermes")]
    if arguments.parsers:
        pairs = []
        for word in arguments.parsers.split(","):
            names = word.split("+")
            pairs.append(
                (next((n for n in names if n in REASONING), None), next((n for n in names if n in TOOLS), None))
            )
    logging.disable(logging.CRITICAL)  # vLLM logs a traceback for each junk call
    server = Server(arguments.tokenizer)
    if arguments.record:
        record(server, arguments.record, pairs, arguments.seed, arguments.each)
        return 0
    failed = False
    for reasoning, tools in pairs:
        figures = check(server, reasoning, tools, arguments.count, arguments.seed, arguments.show)
        alarms = sum(count for name, count in figures.items() if name.startswith("FALSE ALARM"))
        failed = failed or alarms > 0
        name = "+".join(name for name in (reasoning, tools) if name)
        print(f"{name}: " + ", ".join(f"{key} {figures[key]}" for key in sorted(figures)), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

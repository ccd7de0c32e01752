"""Many requests for a vLLM whose parsers lay text into channels: reasoning, tool calls, text, clients that leave.

A small chat model never calls a tool of its own accord. Here a regular expression holds its output to the form of a
call or of reasoning, what stands in it is sampled, and changed weights make markers come as the tokens they are.
"""

import json
import random
import struct
from pathlib import Path
from typing import Any

from tests.traffic import USAGE, Ask, chat, completion

# SmolLM2 has no tokens for markers; these of its special tokens, which are never sampled, become them. Not special, as
# in Qwen3's tokenizer: the parsers need their text.
MARKERS = {
    "<repo_name>": "<think>",
    "<reponame>": "</think>",
    "<file_sep>": "<tool_call>",
    "<filename>": "</tool_call>",
}
MARKER_IDS = range(3, 7)
LESS_THAN = 44  # "<" in that vocabulary

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in keys.items()}},
        },
    }
    for name, keys in {"get_weather": {"city": "string", "days": "integer"}, "search": {"q": "string"}}.items()
]
PROMPTS = [
    "What is the weather in Paris?",
    "Search for a recipe with beans.",
    "Tell me a short story about a fox.",
    "你好，今天天气怎么样？",
    "Write five emoji: 😀😎🤖👩‍🚀",
    "Traduis: déjà vu, garçon, œuvre",
]

CALL = r'<tool_call>\n\{{"name": "{}", "arguments": \{{{}\}}\}}\n</tool_call>'
WEATHER = CALL.format("get_weather", r'"city": "[A-Z][a-zé ]{2,10}", "days": [1-9]')
SEARCH = CALL.format("search", r'"q": "[^"\\<\n]{1,40}"')
PROSE = r"[A-Z][a-z ,']{5,40}\."
WORLD = r"[a-zàéîõü一-龥😀-😎 ]{5,25}"
CALLS = {
    "call": WEATHER,
    "search": SEARCH,
    "prose-call": PROSE + r"\n" + WEATHER,
    "two-calls": WEATHER + r"\n" + SEARCH,
    "no-call": PROSE + r" <to[a-z ]{2,12}\.",
}
THOUGHTS = {
    "end-only": r"[a-z ,.]{10,60}</think>\n\n" + PROSE,
    "both": r"<think>\n[a-z ,.]{10,60}\n</think>\n\n" + PROSE,
    "world": r"<think>\n" + WORLD + r"\n</think>\n\n" + WORLD,
    "never-ends": r"<think>\n[a-z ,.]{300,400}",
}


def with_markers(model: Path, folder: Path) -> Path:
    """The chat model with tokens for the markers, as likely as "<" wherever that is likely."""
    target = folder / "with-markers"
    target.mkdir()
    for path in model.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    data = json.loads((model / "tokenizer.json").read_text())
    for token in data["added_tokens"]:
        if token["content"] in MARKERS:
            token |= {"content": MARKERS[token["content"]], "special": False}
    data["model"]["vocab"] = {MARKERS.get(token, token): number for token, number in data["model"]["vocab"].items()}
    assert data["model"]["vocab"]["<"] == LESS_THAN
    (target / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False))
    _make_likely(target / "model.safetensors")
    return target


def _make_likely(weights: Path) -> None:
    """Give the markers a little more than the row of "<", which is what the model's last layer chooses by."""
    with weights.open("r+b") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(size))["model.embed_tokens.weight"]
        assert entry["dtype"] == "BF16"  # the upper half of a float32
        width, start = 2 * entry["shape"][1], 8 + size + entry["data_offsets"][0]
        file.seek(start + LESS_THAN * width)
        row = struct.unpack(f"<{width // 2}H", file.read(width))
        floats = struct.unpack(f"<{len(row)}f", struct.pack(f"<{len(row)}I", *(half << 16 for half in row)))
        more = struct.unpack(f"<{len(row)}I", struct.pack(f"<{len(row)}f", *(1.15 * value for value in floats)))
        for marker in MARKER_IDS:
            file.seek(start + marker * width)
            file.write(struct.pack(f"<{len(row)}H", *(bits >> 16 for bits in more)))


def parser_traffic(count: int, seed: int) -> list[Ask]:
    """So many requests, the same for the same seed; every name is used once."""
    dice = random.Random(seed)
    return [_one(dice, f"{seed}-{number}") for number in range(count)]


def _one(dice: random.Random, name: str) -> Ask:
    kind = dice.choices(["tools", "thought", "thought-tools", "free", "completion", "asked"], [25, 25, 15, 20, 12, 3])[
        0
    ]
    prompt = dice.choice(PROMPTS)
    fields: dict[str, Any] = {"max_tokens": dice.choice([8, 20, 48, 64]), "temperature": 1.0, **USAGE}
    if kind == "completion":
        if dice.random() < 0.3:
            fields |= {"stop": dice.sample(["e", " the", "\n", "。", "and"], 2)}
        ask = completion(f"completion-{name}", prompt, **fields)
    else:
        ask = chat(f"{kind}-{name}", prompt, **fields | _form(dice, kind))
    if dice.random() < 0.12:
        ask.body["stream"] = False
        del ask.body["stream_options"]
    elif dice.random() < 0.2:
        ask.leave = dice.randrange(0, 14)
    elif dice.random() < 0.15:
        ask.body |= dice.choice([{"return_token_ids": True}, _logprobs(kind), {"stream_options": ALWAYS}])
    if dice.random() < 0.15:
        ask.body["n"] = 2
    return ask


ALWAYS = {"include_usage": True, "continuous_usage_stats": True}


def _logprobs(kind: str) -> dict[str, Any]:
    return {"logprobs": 1} if kind == "completion" else {"logprobs": True, "top_logprobs": 1}


def _form(dice: random.Random, kind: str) -> dict[str, Any]:
    """What makes the reply one that the parsers have to do with."""
    if kind == "free":
        return {"include_reasoning": dice.random() < 0.8}
    offered: dict[str, Any] = {"tools": TOOLS, "tool_choice": "auto"} if "tools" in kind or kind == "asked" else {}
    if kind == "asked":
        named = {"type": "function", "function": {"name": "search"}}
        return offered | {"tool_choice": dice.choice(["required", named])}
    form = ""
    if "thought" in kind:
        form = dice.choice(list(THOUGHTS.values()))
    if "tools" in kind:
        form += ("\\n\\n" if form else "") + dice.choice(list(CALLS.values()))
    return offered | {"structured_outputs": {"regex": form}, "include_reasoning": dice.random() < 0.9}

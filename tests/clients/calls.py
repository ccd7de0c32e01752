"""What the programs of this folder share: each makes a fixed list of calls to a server and prints what came of them.

One JSON object a line, `{"call": name, "saw": ...}`. Nothing is left out or smoothed here: tests/client_reports.py
knows what may differ between two such reports. They run in an environment of their own, without this project.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any

URL = sys.argv[1]  # http://host:port, without a path
QUESTION = "What is the capital of France?"
STORY = "Tell me a short story about a fox."
CODE = "def fibonacci(n):\n"
FORECAST = """Say: <tool_call>
{"name": "weather", "arguments": {"city": "Paris", "unit": "c"}}
</tool_call>"""  # what the smallest of models needs, to call a tool
WEATHER = {  # JSON schema of a tool's arguments
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["c", "f"]}},
    "required": ["city", "unit"],
}
ONE_CONNECTION = 40  # requests one after the other
AT_ONCE = 8  # requests in parallel
TOO_SOON = 0.002  # seconds in which no server has replied
LONG = 1000  # tokens: nobody waits for them
LEAVE_AFTER = 0.3  # seconds after a long stream's start
SETTLE = 0.8  # seconds after which a server, behind a proxy too, has given up what nobody waits for
SAME_START = 4  # characters of a stream that was left; how many came is chance

_calls: dict[str, Callable[[], Any]] = {}


def call(function: Callable[[], Any]) -> Callable[[], Any]:
    """Put a function into the list of calls. It returns what it saw, or a coroutine that does."""
    _calls[function.__name__] = function
    return function


def run() -> None:
    with asyncio.Runner() as runner:  # one loop for all: LangChain keeps connections over its models' lives
        for name, function in _calls.items():
            saw = function()
            if asyncio.iscoroutine(saw):
                saw = runner.run(saw)
            print(json.dumps({"call": name, "saw": saw}, default=_plain), flush=True)


def raised(function: Callable[[], Any]) -> dict[str, Any]:
    """What a call raises, as a user of the library sees it."""
    try:
        came = function()
    except Exception as error:  # noqa: BLE001 -- whatever comes is what is to be compared
        return failure(error)
    return {"raised": None, "came": came}


def failure(error: BaseException) -> dict[str, Any]:
    response = getattr(error, "response", None)
    return {
        "raised": type(error).__name__,
        "message": str(error),
        "status": getattr(error, "status_code", None),
        "body": getattr(error, "body", None),
        "headers": response.headers if response is not None else None,
    }


def settle() -> None:
    """After a request was left: what else the engine computes may change a text, since it computes in batches."""
    time.sleep(SETTLE)


def port(response: Any) -> int:
    """The client's own port: two responses with the same one came on the same connection."""
    return int(response.extensions["network_stream"].get_extra_info("client_addr")[1])


def _plain(value: Any) -> Any:
    if hasattr(value, "multi_items"):  # httpx's headers
        return value.multi_items()
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_unset=True)
    raise TypeError(f"no JSON for {type(value)}")

"""Faults put into every place where vLLM calls the plugin, on a real server: none fails or changes a reply."""

import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sparseety.logreader import find_logs, read_log
from sparseety.records import AnyRecord, EngineEvent, Gap, LogClose, RequestFinished
from tests.logbook import until
from tests.vllm_server import VllmServer, serve, tiny_model

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parent.parent
PROMPTS = ["Once upon a time", "def fibonacci(n):", "The capital of"]


@dataclass
class Faulty:
    server: VllmServer
    control: Path
    fault: Path
    expected: list[str]
    on: bool = True

    def reply(self, prompt: str) -> str:
        """Greedy, and ended by a stop string that never comes or by the client's leaving: the text of it."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 40, "temperature": 0, "stop": ["never said"]}
        request = urllib.request.Request(
            self.server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert reply.status == 200
            return str(json.loads(reply.read())["choices"][0]["text"])

    def leave(self) -> None:
        """A client that goes away: its request is aborted."""
        body = {"model": "m", "prompt": "I leave", "max_tokens": 250, "stream": True}
        request = urllib.request.Request(
            self.server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            reply.read(100)

    def switch(self, on: bool) -> None:
        """Returns when it is done: the plugin looks at its control file once a second, and says so."""
        said = f"sparseety: switched {'on' if on else 'off'}"
        before = self.said(said)
        self.control.write_text(json.dumps({"on": on}))
        for _ in range(100 if on != self.on else 0):
            time.sleep(0.1)
            if self.said(said) > before:
                break
        else:
            assert on == self.on, f"{said} was not said"
        self.on = on

    def settle(self) -> None:
        """Returns when all that a log begins with is on the disk: what is lost of that concerns every request."""
        self.reply("I am first")
        until(lambda: any(isinstance(record, RequestFinished) for record in self.logs()[-1]))

    def said(self, text: str) -> int:
        return self.server.output.read_text().count(text)

    def logs(self) -> list[list[AnyRecord]]:
        paths = [path for path in find_logs([str(self.control.parent / "logs")]) if path.name.startswith("engine")]
        return [[record for _, record in read_log(path, print)] for path in paths]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("faults")
    control, fault = folder / "control.json", folder / "fault"
    model = tiny_model(folder, "llama")
    hook = {"SPARSEETY_HOOK_CAPTURE": "tokens,kv", "SPARSEETY_HOOK_CONTROL": str(control)}
    # Few blocks, so that what is cached of one request is evicted by the next.
    arguments = ("--max-model-len", "320", "--block-size", "32", "--num-gpu-blocks-override", "11")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSEETY_TEST_FAULT", str(fault))
        patch.setenv("PYTHONPATH", f"{ROOT / 'tests' / 'faulty'}:{ROOT}")
        with serve(folder, hook_dir=folder / "logs", arguments=arguments, model=model, hook=hook) as server:
            plain = Faulty(server, control, fault, [])
            yield Faulty(server, control, fault, [plain.reply(prompt) for prompt in PROMPTS])


TOKENS_OFF = [
    "EngineCapture.added",
    "EngineCapture.before_step",
    "EngineCapture.after_step",
    "EngineCapture.finished_outside",
    "EngineCapture.drain",
    "Scribe.added",
    "Scribe.took",
    "Scribe.ended",
    "Journal._put",
]
OTHERS = ["EngineCapture.evicted", "Scribe._blocks", "Journal.publish", "ControlFile.changed"]


@pytest.mark.parametrize("fault", TOKENS_OFF + OTHERS + ["disk ENOSPC", "disk EROFS", "disk EIO"])
def test_no_fault_of_the_plugin_fails_or_changes_a_reply(faulty: Faulty, fault: str) -> None:
    faulty.switch(on=True)
    faulty.settle()
    before = len(faulty.logs())
    message = f"ZeroDivisionError: put into {fault} by a test"
    faulty.fault.write_text(fault)
    try:
        for times in range(20):
            assert [faulty.reply(prompt) for prompt in PROMPTS] == faulty.expected
            faulty.leave()
            # Where a busy machine has the request end before its client is missed, the abort comes another time.
            if times and (fault not in TOKENS_OFF or faulty.said(message)):
                break
        time.sleep(0.3)
    finally:
        faulty.fault.unlink()
    assert [faulty.reply(prompt) for prompt in PROMPTS] == faulty.expected
    if fault in TOKENS_OFF:
        assert faulty.said(message)
        time.sleep(0.3)
        *_, last = faulty.logs()
        assert isinstance(last[-1], LogClose)
        assert any(isinstance(r, Gap) and r.reason == "capture switched itself off: ZeroDivisionError" for r in last)
    elif "." in fault and fault.split(".")[1] in ("evicted", "_blocks"):
        (event,) = [r for r in faulty.logs()[-1] if isinstance(r, EngineEvent) and r.kind == "part_off"]
        assert event.detail == "kv: ZeroDivisionError"
    elif fault.startswith("disk"):
        gaps = [r for r in faulty.logs()[-1] if isinstance(r, Gap)]
        assert gaps
        assert [gap for gap in gaps if not (gap.requests or gap.no_request)] == []
        assert any(gap.requests for gap in gaps)
    faulty.switch(on=False)
    assert len(faulty.logs()) == before


def test_switched_off_the_methods_are_vllms_own_and_switched_on_again_it_records(faulty: Faulty) -> None:
    faulty.switch(on=False)
    count = len(faulty.logs())
    assert [faulty.reply(prompt) for prompt in PROMPTS] == faulty.expected
    faulty.switch(on=True)
    assert [faulty.reply(prompt) for prompt in PROMPTS] == faulty.expected
    time.sleep(0.5)
    logs = faulty.logs()
    assert len(logs) == count + 1
    names: list[Any] = [record for record in logs[-1] if getattr(record, "external_id", None)]
    assert len(names) == 3

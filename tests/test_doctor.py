"""`sparseety doctor` on what it looks at: the demo's chain, whole and with one part missing or wrong at a time."""

import contextlib
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import choose_encoder

from deploy.demo.backend import Settings, serving
from deploy.demo.run import free_ports, part, program, wait_for
from sparseety import doctor, log_checks
from sparseety.asking import NoAnswer, ask
from sparseety.checks import Subject
from sparseety.clock import monotonic_clock
from sparseety.logwriter import LogWriter
from sparseety.records import EngineStart, Scope, Source, TokenizerIdentity
from tests.prometheus_binaries import binary

ROOT = Path(__file__).parent.parent
TOY = ROOT / "tests/data/toy/bytebpe.json"
HOOKS = ["Scheduler.__init__", "Scheduler.update_from_output", "BlockPool._maybe_evict_cached_block"]

Checks = dict[str, tuple[str, str, str]]  # by name: status, text, fix; of several of one name the worst


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's but those that a test makes; and a disk that is nearly full is not what is looked for."""
    own = ("SPARSEETY_PROXY_", "SPARSEETY_HOOK_", "SPARSEETY_VERIFY_")
    for name in [name for name in os.environ if name.startswith(own)]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    Path("sparseety.toml").write_text('[proxy]\nlog_min_free_bytes = "1MiB"\n')


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Checks]:
    code = doctor.main(["--json", "--timeout", "2", *map(str, arguments)])
    said = json.loads(capsys.readouterr().out)
    assert said["exit_code"] == code
    order = ["ok", "unknown", "warn", "fail"]
    checks: Checks = {}
    for check in said["checks"]:
        if check["name"] not in checks or order.index(check["status"]) > order.index(checks[check["name"]][0]):
            checks[check["name"]] = check["status"], check["text"], check["fix"] or ""
    return code, checks


@contextlib.contextmanager
def proxy(folder: Path, upstream: str, *flags: str, extra: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yields its admin port, as a URL."""
    listen, admin = free_ports(2)
    command = [program("sparseety-proxy"), "--listen", f"127.0.0.1:{listen}", "--admin", f"127.0.0.1:{admin}"]
    command += ["--upstream", upstream, "--log-dir", str(folder), *flags]
    with part("proxy", command, folder.parent / "proxy.txt", dict(extra or {})) as running:
        wait_for(running, admin, "/healthz", 30)
        yield f"http://127.0.0.1:{admin}"


@contextlib.contextmanager
def server(pages: Mapping[str, tuple[int, str] | str]) -> Iterator[str]:
    """Answers GET with these; a page of "metrics" is made by prometheus_client, as who asks wants it."""
    registry = CollectorRegistry()
    Counter("vllm:generation_tokens", "Tokens.", registry=registry).inc()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0], (404, "{}"))
            if page == "metrics":
                make, _ = choose_encoder(self.headers["Accept"])
                page = 200, make(registry).decode()
            status, text = page if isinstance(page, tuple) else (200, page)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if status == 302:
                self.send_header("Location", text)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}"
        finally:
            listening.shutdown()
            thread.join()


def log(folder: Path, source: Source = "engine", scope: Scope | None = None, **engine: object) -> LogWriter:
    """A log of somebody who writes on."""
    clock = monotonic_clock()
    writer = LogWriter(folder, source, scope or Scope(), clock=clock)
    if source == "engine":
        identity = TokenizerIdentity(name="somebody/model", files={"tokenizer.json": "ab" * 32})
        fields: dict[str, object] = {"vllm": "0.32.0", "model": "m", "served_names": ["m"], "tokenizer": identity}
        writer.put(EngineStart(ts=clock(), **(fields | engine)))  # type: ignore[arg-type]
    writer.flush()
    return writer


def make_old(folder: Path) -> None:
    for file in folder.glob("*.jsonl"):
        os.utime(file, (0, 0))


# -------------------------------------------------------------------------------------------------- the whole chain


def test_of_a_chain_that_works_all_is_ok(tmp_path, capsys):
    logs = tmp_path / "logs"
    with serving(Settings(log_dir=logs)) as upstream, proxy(logs, upstream) as admin:
        places = ["--log-dir", logs, "--upstream", upstream, "--admin", admin]
        code, checks = run(capsys, *places)
        assert {name: check for name, check in checks.items() if check[0] != "ok"} == {}
        assert code == 0
        assert "vLLM 0.32.0+sparseety.demo, serves SmolLM2-135M-Instruct" in checks["upstream.reachable"][1]
        assert checks["proxy.settings"][1].startswith("sparseety.toml: ")
        assert checks["plugin.hooks"][1].startswith("1 hooks expected, 1 attached")
        assert "sha256 f5ba25d8c8d9 on both sides" in checks["verifier.tokenizer"][1]
        assert doctor.main([*map(str, places)]) == 0
        said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("sparseety doctor: OK   ")
    assert all(line.startswith("ok ") for line in said[2:])


def test_a_server_that_is_down_is_said_by_all_who_need_it(tmp_path, capsys):
    [port] = free_ports(1)
    upstream = f"http://127.0.0.1:{port}"
    with proxy(tmp_path / "logs", upstream) as admin:
        code, checks = run(capsys, "--log-dir", tmp_path / "logs", "--upstream", upstream, "--admin", admin)
    assert code == 1
    assert checks["upstream.reachable"] == ("fail", f"{upstream}: Connection refused", checks["upstream.reachable"][2])
    assert checks["proxy.ready"][0] == "fail"
    assert "upstream: " in checks["proxy.ready"][1]
    assert checks["plugin.version"][0] == "unknown"


def test_without_a_proxy_it_is_said_how_to_start_one(tmp_path, capsys):
    [port] = free_ports(1)
    code, checks = run(
        capsys, "--upstream", "http://vllm:8000", "--admin", f"http://127.0.0.1:{port}", "--only", "proxy"
    )
    assert code == 1
    assert checks.keys() == {"proxy.settings", "proxy.alive"}
    assert checks["proxy.alive"][2].startswith("sparseety-proxy --upstream http://vllm:8000")


def test_a_capture_inside_the_server_needs_no_proxy(tmp_path, capsys):
    writer = log(tmp_path / "logs", "proxy", Scope(mounting="middleware"))
    code, checks = run(capsys, "--log-dir", tmp_path / "logs", "--only", "proxy")
    writer.close()
    assert code == 0
    assert "mounted in the server itself" in checks["proxy.alive"][1]


def test_the_admin_token_is_needed_to_see_more(tmp_path, capsys, monkeypatch):
    logs = tmp_path / "logs"
    with serving(Settings()) as up, proxy(logs, up, extra={"SPARSEETY_PROXY_ADMIN_TOKEN": "x"}) as admin:
        asked = ["--log-dir", logs, "--upstream", up, "--admin", admin, "--only", "proxy"]
        code, checks = run(capsys, *asked)
        assert (code, checks["proxy.metrics"][0]) == (3, "unknown")
        (tmp_path / "token").write_text("x\n")
        monkeypatch.setenv("SPARSEETY_PROXY_ADMIN_TOKEN_FILE", "token")
        code, checks = run(capsys, *asked)
        assert (code, checks["proxy.metrics"][0]) == (0, "ok")


def test_settings_that_cannot_be_used_are_a_failure_and_all_else_is_looked_at(tmp_path, capsys):
    Path("sparseety.toml").write_text("[proxy]\nlisen = 1\n")
    code, checks = run(capsys)
    assert code == 1
    assert checks["proxy.settings"][:2] == ("fail", checks["proxy.settings"][1])
    assert 'sparseety.toml:2: no setting "lisen"' in checks["proxy.settings"][1]
    assert "upstream.reachable" in checks


# ------------------------------------------------------------------------------------------------------ the plugin


def test_a_server_without_the_plugin_is_told_from_one_with_it(tmp_path, capsys):
    logs = tmp_path / "logs"
    logs.mkdir(0o700)
    with serving(Settings()) as upstream:
        code, checks = run(capsys, "--log-dir", logs, "--upstream", upstream, "--only", "plugin")
    assert code == 1
    assert checks["plugin.version"][0] == "ok"
    assert checks["plugin.alive"][:2] == (
        "fail",
        f"no log of an engine in {logs}, and no metric of the plugin at {upstream}/metrics",
    )
    assert "SPARSEETY_HOOK_DIR" in checks["plugin.alive"][2]


def test_a_plugin_that_writes_elsewhere_is_known_by_its_metrics(tmp_path, capsys):
    page = "\n".join(
        f'sparseety_plugin_hooks{{engine="0",site="{site}",state="{state}"}} {float(state == "expected")}'
        for site in HOOKS
        for state in ("expected", "attached", "fired")
    )
    (tmp_path / "logs").mkdir(0o700)
    pages = {"/health": "", "/version": '{"version": "0.32.0"}', "/metrics": page}
    with server(pages) as upstream:
        _, checks = run(capsys, "--log-dir", tmp_path / "logs", "--upstream", upstream, "--only", "plugin")
    assert checks["plugin.alive"][0] == "fail"
    assert "--log-dir" in checks["plugin.alive"][2]
    assert checks["plugin.hooks"][1].startswith("3 hooks expected, 0 attached")


@pytest.mark.parametrize(("attached", "status"), [(30, "ok"), (12, "warn"), (0, "fail")])
def test_hooks_in_the_model_are_counted_by_the_plugins_metrics(attached, status, tmp_path, capsys):
    counts = {"expected": 30, "attached": attached, "fired": 0}
    page = "".join(
        f'sparseety_plugin_hooks{{engine="0",site="ffn_act",state="{state}"}} {float(count)}\n'
        for state, count in counts.items()
    )
    writer = log(tmp_path / "logs", hooks_expected=HOOKS, hooks_attached=HOOKS)
    with server({"/health": "", "/metrics": page}) as upstream:
        _, checks = run(capsys, "--log-dir", tmp_path / "logs", "--upstream", upstream, "--only", "plugin")
    writer.close()
    assert checks["plugin.hooks"][0] == status
    if status != "ok":
        assert checks["plugin.hooks"][1].startswith(f"30 hooks expected in the model (ffn_act), {attached} attached")


def test_a_log_that_nobody_writes_any_more_is_a_plugin_that_is_gone(tmp_path, capsys):
    writer = log(tmp_path / "logs")
    make_old(tmp_path / "logs")
    assert run(capsys, "--log-dir", tmp_path / "logs", "--only", "plugin")[1]["plugin.alive"][0] == "ok"
    writer.close()
    make_old(tmp_path / "logs")
    code, checks = run(capsys, "--log-dir", tmp_path / "logs", "--only", "plugin")
    assert code == 1
    assert "nobody writes it any more" in checks["plugin.alive"][1]


@pytest.mark.parametrize(
    ("attached", "status"), [(HOOKS, "ok"), (HOOKS[:2], "warn"), (HOOKS[::2], "fail"), ([], "fail")]
)
def test_hooks_that_are_not_attached_are_named(attached, status, tmp_path, capsys):
    writer = log(tmp_path / "logs", hooks_expected=HOOKS, hooks_attached=attached)
    _, checks = run(capsys, "--log-dir", tmp_path / "logs", "--only", "plugin")
    writer.close()
    assert checks["plugin.hooks"][0] == status
    assert checks["plugin.hooks"][1].startswith(f"3 hooks expected, {len(attached)} attached")
    assert all((hook in checks["plugin.hooks"][1]) == (hook not in attached) for hook in HOOKS)


@pytest.mark.parametrize(("writes", "status"), [(False, "fail"), (True, "warn")])
def test_a_vllm_that_the_plugin_does_not_know(writes, status, tmp_path, capsys):
    writer = log(tmp_path / "logs") if writes else None
    with server({"/health": "", "/version": '{"version": "0.99.1"}'}) as upstream:
        _, checks = run(capsys, "--log-dir", tmp_path / "logs", "--upstream", upstream, "--only", "plugin")
    if writer:
        writer.close()
    assert checks["plugin.version"][0] == status
    assert "vLLM 0.99.1 is not one that the plugin was tested with (0.28.x, 0.32.x)" in checks["plugin.version"][1]


# ------------------------------------------------------------------------------------------------------ tokenizers


def test_a_tokenizer_that_is_not_the_engines_is_a_failure_and_none_is_not_checked(tmp_path, capsys):
    writer = log(tmp_path / "logs")
    asked = ["--log-dir", tmp_path / "logs", "--only", "verifier"]
    code, checks = run(capsys, *asked)
    assert (code, checks["verifier.tokenizer"][0]) == (3, "unknown")
    assert checks["verifier.tokenizer"][2].startswith("give it in one of three ways")
    code, checks = run(capsys, *asked, "--tokenizer", TOY)
    assert (code, checks["verifier.tokenizer"][0]) == (1, "fail")
    assert "tokenizer.json of sha256 abababababab; " in checks["verifier.tokenizer"][1]
    writer.close()


def test_a_watch_says_what_it_has_judged(capsys):
    verdicts = 'sparseety_verify_requests_total{model_name="m",verdict="pass"} 12.0\n'
    with server({"/metrics": verdicts}) as url:
        _, checks = run(capsys, "--verifier", url, "--only", "verifier")
    assert checks["verifier.watch"] == ("ok", f"a watch answers at {url}: 12 pass", "")


# ------------------------------------------------------------------------------------------------------ the folder


def test_a_folder_that_others_can_enter_and_files_they_can_read_are_warned_of(tmp_path, capsys):
    writer = log(tmp_path / "logs")
    (tmp_path / "logs").chmod(0o755)
    writer.path.chmod(0o644)
    code, checks = run(capsys, "--log-dir", tmp_path / "logs", "--only", "logs")
    writer.close()
    assert code == 0
    assert checks["logs.folder"][0] == checks["logs.files"][0] == "warn"
    assert "mode 0755" in checks["logs.folder"][1]
    assert checks["logs.folder"][2] == f"chmod 700 {tmp_path / 'logs'}"


def test_a_folder_that_this_user_cannot_write_to_is_a_failure():
    with tempfile.TemporaryDirectory() as outer:
        Path(outer).chmod(0o755)
        folder = Path(outer) / "logs"
        folder.mkdir()
        folder.chmod(0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            [found] = [r for r in log_checks.check(Subject(log_dirs=[folder])) if r.name == "logs.folder"]
        finally:
            if root:
                os.seteuid(0)
        assert found.status == "fail"
        assert f"cannot write to {folder}: Permission denied" in found.text
        assert not list(folder.iterdir())


def test_a_disk_that_is_too_full_to_record_is_a_failure(tmp_path, capsys):
    Path("sparseety.toml").write_text('[proxy]\nlog_min_free_bytes = "900TiB"\n')
    (tmp_path / "logs").mkdir(0o700)
    code, checks = run(capsys, "--log-dir", tmp_path / "logs", "--only", "logs")
    assert (code, checks["logs.disk"][0]) == (1, "fail")
    assert "nothing is recorded" in checks["logs.disk"][1]


def test_logs_of_another_release_are_warned_of_and_of_another_format_a_failure(tmp_path, capsys):
    writer = log(tmp_path / "logs")
    text = writer.path.read_text()
    other = writer.path.with_name("engine-elsewhere-1-1795973571123456.00000.jsonl")
    other.write_text(re.sub(r'"program":"[^"]*"', '"program":"sparseety 9.9"', text).replace('"pid":', '"pid":9'))
    old = writer.path.with_name("engine-elsewhere-2-1795973571123456.00000.jsonl")
    old.write_text(text.replace('"format":1', '"format":77').replace('"pid":', '"pid":8'))
    code, checks = run(capsys, "--log-dir", tmp_path / "logs", "--only", "logs")
    writer.close()
    assert code == 1
    assert "format 77" in checks["logs.format"][1]
    assert checks["logs.release"][0] == "warn"
    assert "sparseety 9.9" in checks["logs.release"][1]


# ----------------------------------------------------------------------------------------------- what is scraped


def test_a_colon_that_the_library_loses_towards_prometheus_2_is_warned_of(capsys):
    """prometheus_client itself makes the page, by what is asked for."""
    with server({"/health": "", "/version": '{"version": "0.32.0"}', "/metrics": "metrics"}) as upstream:
        code, checks = run(capsys, "--upstream", upstream, "--only", "upstream")
    assert (code, checks["upstream.metrics"][0]) == (0, "warn")
    assert "vllm_… where a Prometheus 2 asks, as vllm:… where a Prometheus 3 does" in checks["upstream.metrics"][1]
    assert "relabel rule" in checks["upstream.metrics"][2]


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("vllm_generation_tokens_total 1\n", "arrive as vllm_… only"),
        ("# TYPE vllm:generation_tokens counter\n", "has no metric of vLLM's, in either spelling"),
        ((404, ""), "says 404"),
    ],
)
def test_a_page_without_vllms_metrics_is_warned_of(page, said, capsys):
    with server({"/health": "", "/metrics": page}) as upstream:
        _, checks = run(capsys, "--upstream", upstream, "--only", "upstream")
    assert checks["upstream.metrics"][0] == "warn"
    assert said in checks["upstream.metrics"][1]


def target(job: str, health: str, error: str = "") -> dict[str, object]:
    return {"labels": {"job": job}, "scrapeUrl": f"http://{job}/metrics", "health": health, "lastError": error}


def test_what_prometheus_does_not_scrape_and_how_it_spells_is_told(capsys):
    targets = [target("sparseety-proxy", "down", "401 Unauthorized"), target("vllm", "up")]
    pages = {
        "/-/ready": "",
        "/api/v1/targets": json.dumps({"data": {"activeTargets": targets}}),
        "/api/v1/query": json.dumps({"data": {"result": [1]}}),  # whatever is asked for is there: the lost colon too
    }
    with server(pages) as url:
        code, checks = run(capsys, "--prometheus", url, "--only", "prometheus")
    assert code == 1
    assert checks["prometheus.reachable"][0] == "ok"
    assert "cannot scrape the proxy" in checks["prometheus.targets"][1]
    assert "credentials_file" in checks["prometheus.targets"][2]
    assert checks["prometheus.names"][0] == "fail"


def test_a_prometheus_that_is_not_there_is_a_failure(capsys):
    [port] = free_ports(1)
    code, checks = run(capsys, "--prometheus", f"http://127.0.0.1:{port}", "--only", "prometheus")
    assert (code, checks["prometheus.reachable"][0]) == (1, "fail")


@pytest.mark.observability
def test_a_real_prometheus_with_the_shipped_configuration_has_the_colon_back(tmp_path, capsys):
    logs, [port] = tmp_path / "logs", free_ports(1)
    token = tmp_path / "token"
    token.write_text("secret")
    verdicts = 'sparseety_verify_requests_total{model_name="m",verdict="pass"} 1\n'
    with (
        server({"/health": "", "/metrics": "metrics"}) as vllm,
        server({"/metrics": verdicts}) as watch,
        proxy(logs, vllm, "--admin-token-file", str(token)) as admin,
    ):
        config = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
        places = {"proxy:9001": admin, "vllm:8000": vllm, "verifier:9102": watch}
        for name, url in places.items():
            config = config.replace(name, url.removeprefix("http://"))
        config = config.replace("/run/secrets/sparseety-admin-token", str(token)).replace("15s", "1s")
        (tmp_path / "prometheus.yml").write_text(config)
        command = [binary("prometheus"), "--config.file", str(tmp_path / "prometheus.yml")]
        command += ["--storage.tsdb.path", str(tmp_path / "tsdb"), "--web.listen-address", f"127.0.0.1:{port}"]
        asked = ["--prometheus", f"http://127.0.0.1:{port}", "--upstream", vllm]
        asked += ["--only", "prometheus", "--only", "upstream"]
        with part("Prometheus", command, tmp_path / "prometheus.txt") as running:
            wait_for(running, port, "/-/ready", 60)
            deadline = time.monotonic() + 30
            code, checks = run(capsys, *asked)
            # Until each target was scraped, and what was scraped can be asked for.
            while "prometheus.names" not in checks or checks["prometheus.targets"][0] == "unknown":
                assert time.monotonic() < deadline
                time.sleep(0.2)
                code, checks = run(capsys, *asked)
    assert checks["upstream.metrics"][0] == "warn"  # a Prometheus 2 is warned of, whether or not it is the one
    assert {name: check for name, check in checks.items() if name.startswith("prometheus.") and check[0] != "ok"} == {}
    assert code == 0


# ----------------------------------------------------------------------------------------------------- the command


def test_a_program_that_is_not_installed_here_is_not_checked_and_never_ok(tmp_path, capsys, monkeypatch):
    for name in ("proxy.checks", "proxy.config"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "pydantic", None)  # as Python has it for a module that is not there
    code, checks = run(capsys, "--only", "proxy", "--only", "environment")
    assert code == 3
    assert checks["proxy.installed"][:2] == ("unknown", "not checked: pydantic is not installed here")
    assert "pip install 'sparseety[proxy]'" in checks["proxy.installed"][2]
    assert "proxy: " not in checks["environment.packages"][1]


def test_the_verdict_comes_first_then_what_is_wrong_with_its_way_out(tmp_path, capsys):
    [port] = free_ports(1)
    assert doctor.main(["--upstream", f"http://127.0.0.1:{port}", "--only", "upstream", "--only", "environment"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"sparseety doctor: FAIL   1 failed, \d+ ok", said[0])
    assert said[2].startswith("FAIL  upstream.reachable ")
    assert said[3].strip().startswith("fix: start vLLM")
    assert said[4].startswith("ok    environment.python ")


@pytest.mark.parametrize(
    "arguments", [["--upstream", "vllm:8000"], ["--only", "weather"], ["--timeout", "0"], ["--model-map", "m"], ["x"]]
)
def test_wrong_use_is_2(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        doctor.main(arguments)
    assert raised.value.code == 2
    assert "usage: sparseety doctor" in capsys.readouterr().err


def test_a_token_goes_to_nobody_else():
    with server({"/": (302, "/metrics"), "/metrics": "metrics"}) as url:
        assert ask(url, seconds=2, token="secret").status == 302


def test_what_is_no_http_is_no_answer():
    with pytest.raises(NoAnswer):
        ask("http://127.0.0.1:1/", seconds=2)
    with pytest.raises(NoAnswer):
        ask("http://[::1/", seconds=2)


def test_the_page_about_it_names_every_check():
    sources = [
        *(ROOT / "sparseety").glob("*.py"),
        *(ROOT / name / "checks.py" for name in ("proxy", "sampler_hook", "verifier")),
    ]
    areas = "|".join(doctor.AREAS)
    made = {name for path in sources for name in re.findall(rf'"((?:{areas})\.\w+)"', path.read_text())}
    assert len(made) > 15
    page = (ROOT / "docs/doctor.md").read_text()
    assert set(re.findall(rf"^\| `((?:{areas})\.\w+)`", page, re.M)) == made

"""The images and the composition, built and run without a container engine: tests/images.py."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.images import ROOT, WAIT, Builder, Composition, Container, network, possible

pytestmark = [
    pytest.mark.packaging,
    pytest.mark.skipif(not os.environ.get("SPARSEETY_TEST_PACKAGING"), reason="asked for by make test-packaging"),
    pytest.mark.skipif(not possible(), reason="needs root, and namespaces"),
]

TOKEN = "/run/secrets/sparseety-admin-token"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """On a file system of its own: an overlay cannot lie on what it is laid over."""
    made = Path(tempfile.mkdtemp(prefix="sparseety-images-"))
    # As large as it has to look for the proxy to record; it holds some 300 MB.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12g,mode=0755", "tmpfs", made], check=True)
    try:
        yield made
    finally:
        subprocess.run(["umount", "--lazy", made], check=True)
        made.rmdir()


@pytest.fixture(scope="module")
def builder(folder: Path) -> Builder:
    return Builder(folder)


@pytest.fixture
def composed(builder: Builder, folder: Path, request: pytest.FixtureRequest) -> Iterator[Composition]:
    with network() as holder:
        yield Composition(builder, folder / request.node.name, holder)


def until(true: Callable[[], bool], container: Container) -> None:
    deadline = time.monotonic() + WAIT
    while not true():
        assert container.process is not None
        assert container.process.poll() is None, container.output()
        assert time.monotonic() < deadline
        time.sleep(0.1)


@contextlib.contextmanager
def running(composed: Composition, name: str) -> Iterator[Container]:
    """A service that was not healthy before, and is now."""
    container = composed.container(name)
    health = composed.health(name)
    container.start(["sleep", "60"])
    assert not container.healthy(health)  # a check that passes without the service tells nothing
    container.kill()
    container.start(composed.command(name))
    try:
        until(lambda: container.healthy(health), container)
        yield container
    finally:
        container.kill()


def inside(process: int) -> list[str]:
    """Begins a command that is run in the network of a process."""
    return ["nsenter", f"--net=/proc/{process}/ns/net"]


def installed(container: Container) -> dict[str, str]:
    listing = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    done = container.run(["python", "-c", listing])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("target", ["proxy", "verifier", "demo"])
def test_an_image_holds_what_is_locked_and_nothing_else(target, builder, folder):
    container = Container(builder.build(target), folder / f"looking-{target}", network=os.getpid())
    found = installed(container)
    assert "sparseety" in found
    assert not found.keys() & {"torch", "transformers", "vllm", "pip"}
    assert ("tokenizers" in found) == (target != "proxy")
    parts = ["proxy", "verifier"] if target == "demo" else [target]
    locks = "".join((ROOT / f"deploy/docker/{part}.lock").read_text() for part in parts)
    for name, version in found.items():
        assert name == "sparseety" or f"{name.lower().replace('_', '-')}=={version} " in locks


def test_the_demo_is_composed_judged_and_stopped_without_a_loss(composed):
    token = composed.container("token")
    for _ in range(2):  # the second time there is one already
        done = token.run(composed.command("token"))
        assert done.returncode == 0, done.stdout + done.stderr
        [file] = composed.volume("secrets").iterdir()
        assert file.stat().st_mode & 0o777 == 0o444
    secret = file.read_text()
    with running(composed, "demo") as demo, running(composed, "proxy") as proxy, running(composed, "verifier") as seer:
        assert proxy.exec(["python", "-m", "sparseety.probe", "http://127.0.0.1:9001/readyz"]).returncode == 0
        assert proxy.exec(["sh", "-c", "echo > /etc/sparseety/x"]).returncode != 0  # read-only, and not its own
        assert "Uid:\t2000\t2000" in proxy.exec(["cat", "/proc/1/status"]).stdout
        assert "CapEff:\t0000000000000000" in proxy.exec(["cat", "/proc/1/status"]).stdout
        here = inside(proxy.pid)
        clients = [*here, sys.executable, "-m", "deploy.demo.drive", "http://127.0.0.1:9000/v1"]
        driven = subprocess.run(clients, cwd=ROOT, capture_output=True, text=True, timeout=WAIT)
        assert driven.returncode == 0, driven.stderr

        def scraped(url: str, *headers: str) -> str:
            curl = [*here, "curl", "-sf", *(word for header in headers for word in ("-H", header)), url]
            return subprocess.run(curl, capture_output=True, text=True, timeout=WAIT).stdout

        assert scraped("http://127.0.0.1:9001/metrics") == ""  # from another container only with the token
        assert "sparseety_build_info" in scraped("http://127.0.0.1:9001/metrics", f"Authorization: Bearer {secret}")
        passed = 'sparseety_verify_requests_total{model_name="SmolLM2-135M-Instruct",verdict="pass"} 49.0'
        until(lambda: passed in scraped("http://127.0.0.1:9102/metrics"), seer)
        look = ["sparseety", "doctor", "--only", "logs", "--only", "upstream", "--only"]
        looked = proxy.exec([*look, "proxy"])
        assert looked.returncode == 0, looked.stdout
        looked = seer.exec([*look, "verifier", "--log-dir", "/logs", "--upstream", "http://vllm:8000"])
        assert looked.returncode == 0, looked.stdout
        # As compose does it: who depends on others goes first.
        assert seer.stop(30) == 0
        assert proxy.stop(50) == 0
        assert demo.stop(15) == 0
    assert "0 lost" in proxy.output()
    assert "49 pass, 0 fail, 0 incomplete" in seer.output()
    logs = composed.volume("logs")
    assert logs.stat().st_mode & 0o777 == 0o700
    for written in logs.glob("*.jsonl"):
        assert written.name.split("-")[1] == "sparseety"  # one machine, whatever each container is called
        assert (written.stat().st_uid, written.stat().st_mode & 0o777) == (2000, 0o600)


def of_pod(pod: dict[str, Any], name: str, builder: Builder, folder: Path, network: int) -> tuple[Container, list[str]]:
    """A container of a manifest, and its process 1. The volumes are empty folders that anybody may write to, and the
    secret."""
    [spec] = [each for each in [*pod["initContainers"], *pod["containers"]] if each["name"] == name]
    image = builder.build("demo" if name == "vllm" else name)
    secret = folder / "token"
    if not secret.exists():
        secret.mkdir(parents=True)
        (secret / "admin-token").write_text("secret")
    binds = []
    for mount in spec["volumeMounts"]:
        source = folder / mount["name"]
        if mount["mountPath"].startswith("/dev/"):
            continue
        if not source.exists():
            source.mkdir(parents=True)
            source.chmod(0o2777)
        binds.append((str(source), mount["mountPath"], "ro" if mount.get("readOnly") else "rw"))
    # Where the demo says that it has its tokenizer from; a model's is in the cache that both mount.
    binds.append((str(ROOT / "deploy/demo/tokenizer"), "/opt/demo/deploy/demo/tokenizer", "ro"))
    context = pod["securityContext"]
    container = Container(
        image,
        folder / "containers" / name,
        network,
        user=f"{context['runAsUser']}:{context['runAsGroup']}",
        binds=binds,
        read_only=spec["securityContext"].get("readOnlyRootFilesystem", False),
        drop=spec["securityContext"]["capabilities"]["drop"] == ["ALL"],
    )
    arguments = list(image.command) if name == "vllm" else [str(word) for word in spec["args"]]
    return container, [*image.entrypoint, *arguments]


def test_the_sidecar_pod_starts_in_its_order_and_ends_in_the_opposite_one(builder, folder):
    """The demo in vLLM's place."""
    [manifest] = yaml.safe_load_all((ROOT / "deploy/kubernetes/sidecar/deployment.yaml").read_text())
    pod = manifest["spec"]["template"]["spec"]
    ports = {"verifier": 9102, "vllm": 8000, "proxy": 9001}
    with network() as holder, contextlib.ExitStack() as stack:
        up = {}
        for name in [each["name"] for each in [*pod["initContainers"], *pod["containers"]]]:
            spec = next(each for each in [*pod["initContainers"], *pod["containers"]] if each["name"] == name)
            probe = spec.get("startupProbe") or spec["readinessProbe"]
            container, command = of_pod(pod, name, builder, folder / "pod", holder)
            container.start(command)
            stack.callback(container.kill)
            url = f"http://127.0.0.1:{ports[name]}{probe['httpGet']['path']}"
            ask = [*inside(holder), sys.executable, "-m", "sparseety.probe", url]
            until(lambda ask=ask: subprocess.run(ask, cwd=ROOT, capture_output=True).returncode == 0, container)
            up[name] = container
        clients = [*inside(holder), sys.executable, "-m", "deploy.demo.drive", "http://127.0.0.1:9000/v1"]
        driven = subprocess.run(clients, cwd=ROOT, capture_output=True, text=True, timeout=WAIT)
        assert driven.returncode == 0, driven.stderr
        assert [up[name].stop(60) for name in ("proxy", "vllm", "verifier")] == [0, 0, 0]
    assert "served for another 5 s" in up["proxy"].output()
    assert "49 pass, 0 fail, 0 incomplete" in up["verifier"].output()


def test_a_proxy_without_an_upstream_is_alive_not_ready_and_drains(composed):
    token = composed.container("token")
    assert token.run(composed.command("token")).returncode == 0
    with running(composed, "proxy") as proxy:
        assert proxy.exec(["python", "-m", "sparseety.probe", "http://127.0.0.1:9001/readyz"]).returncode == 1
        with running(composed, "demo") as demo:
            ready = ["python", "-m", "sparseety.probe", "http://127.0.0.1:9001/readyz"]
            until(lambda: proxy.healthy(ready), proxy)
            stream = [
                "nsenter",
                f"--net=/proc/{proxy.pid}/ns/net",
                "curl",
                "-sN",
                "http://127.0.0.1:9000/v1/completions",
            ]
            stream += ["-d", json.dumps({"prompt": "x", "stream": True, "max_tokens": 100, "ignore_eos": True})]
            with subprocess.Popen(stream, stdout=subprocess.PIPE, text=True) as client:
                assert client.stdout is not None
                assert client.stdout.readline().startswith("data: ")
                assert proxy.stop(50) == 0  # in the middle of it
                assert client.stdout.read().endswith("data: [DONE]\n\n")
            assert demo.stop(15) == 0
    assert "Draining: 1 requests are open" in proxy.output()

"""Dockerfile, composition, manifests and Prometheus' configuration, held against each other and against the product."""

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import sparseety
from deploy.demo.backend import make_parser
from proxy.config import PREFIX, ProxyConfig, read_config
from sampler_hook.adapters import check_version
from sampler_hook.settings import HookSettings
from tests.images import ROOT, composition, instructions
from verifier import cli

KUBERNETES = sorted((ROOT / "deploy/kubernetes").glob("*/*.yaml"))
PORTS = {"listen": 9000, "admin": 9001, "vllm": 8000, "verifier": 9102, "prometheus": 9090, "grafana": 3000}
JOBS = {"sparseety-proxy": "proxy:9001", "vllm": "vllm:8000", "sparseety-verifier": "verifier:9102"}

Container = dict[str, Any]


def dockerfile(stage: str) -> list[tuple[str, str]]:
    """A stage's instructions, those that it stands on before them."""
    stages: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    current: list[tuple[str, str]] = []
    for word, rest in instructions((ROOT / "Dockerfile").read_text()):
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            current = []
            stages[name] = base, current
        else:
            current.append((word, rest))
    found: list[tuple[str, str]] = []
    while stage in stages:
        stage, steps = stages[stage]
        found[:0] = steps
    return found


def image_env(stage: str) -> dict[str, str]:
    pairs = [pair for word, rest in dockerfile(stage) if word == "ENV" for pair in rest.split()]
    return dict(pair.partition("=")[::2] for pair in pairs)


def last(stage: str, word: str) -> Any:
    return json.loads([rest for name, rest in dockerfile(stage) if name == word][-1])


def manifests() -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in KUBERNETES:
        for document in yaml.safe_load_all(path.read_text()):
            yield path, document


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for path, document in manifests():
        if document["kind"] == "Deployment":
            yield f"{path.parent.name}/{document['metadata']['name']}", document["spec"]["template"]["spec"]


def containers(pod: dict[str, Any]) -> list[Container]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def of_image(image: str) -> list[tuple[str, dict[str, Any], Container]]:
    return [
        (f"{name}/{container['name']}", pod, container)
        for name, pod in pods()
        for container in containers(pod)
        if container["image"] == image
    ]


# ------------------------------------------------------------------------- what is started takes what it is given


def started(container: Container, stage: str) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment, as the image and the composition or the manifest make them."""
    given = container.get("environment") or {each["name"]: each["value"] for each in container.get("env", [])}
    arguments = container.get("command") or container.get("args")
    if arguments is None:
        arguments = last(stage, "CMD") if any(word == "CMD" for word, _ in dockerfile(stage)) else []
    return list(map(str, arguments)), image_env(stage) | {name: str(value) for name, value in given.items()}


def proxies() -> list[tuple[str, Container]]:
    found = [(name, container) for name, _, container in of_image("sparseety-proxy")]
    return [("compose/proxy", composition()["services"]["proxy"]), *found]


@pytest.mark.parametrize(("name", "container"), proxies(), ids=[name for name, _ in proxies()])
def test_the_proxy_takes_its_settings_and_listens_where_others_look(name, container, tmp_path, monkeypatch):
    arguments, environ = started(container, "proxy")
    token = tmp_path / "token"
    token.write_text("secret")
    flag = "--admin-token-file="
    arguments = [f"{flag}{token}" if word.startswith(flag) else word for word in arguments]
    for variable, value in environ.items():
        if variable.startswith("SPARSEETY_"):
            assert variable.removeprefix(PREFIX).lower() in ProxyConfig.model_fields, variable
            monkeypatch.setenv(variable, str(token) if variable.endswith("TOKEN_FILE") else value)
    monkeypatch.chdir(tmp_path)
    config = read_config(arguments)
    assert (config.listen.port, config.admin.port) == (PORTS["listen"], PORTS["admin"])
    assert not config.listen.loopback
    assert not config.admin.loopback
    assert config.admin_token is not None
    assert str(config.log_dir) == "/logs"
    grace = container.get("stop_grace_period", "").removesuffix("s")
    if not grace:
        [grace] = [pod["terminationGracePeriodSeconds"] for each, pod, _ in of_image("sparseety-proxy") if each == name]
    assert float(grace) > config.drain_delay + config.drain_seconds + 15


def verifiers() -> list[tuple[str, Container]]:
    found = [(name, container) for name, _, container in of_image("sparseety-verifier")]
    return [("image", {}), ("compose/verifier", composition()["services"]["verifier"]), *found]


@pytest.mark.parametrize(("name", "container"), verifiers(), ids=[name for name, _ in verifiers()])
def test_the_verifier_takes_its_flags_and_publishes_where_others_look(name, container):
    arguments, _ = started(container, "verifier")
    options = cli._parser().parse_args(arguments)
    assert options.watch
    assert options.paths == ["/logs"]
    assert (options.metrics_host, options.metrics_port) == ("0.0.0.0", PORTS["verifier"])
    assert options.jobs  # the default is as many as the machine has CPUs, whatever the container may use


def test_vllm_has_the_plugin_on_and_time_to_close_its_log():
    services = [composition()["services"]["vllm"], *(each for _, _, each in of_image("sparseety-vllm"))]
    assert len(services) == 2
    for service in services:
        arguments, environ = started(service, "vllm")
        assert HookSettings.from_env(environ) == HookSettings.from_env({"SPARSEETY_HOOK_DIR": "/logs"})
        flags = " ".join(arguments).replace("=", " ")
        assert f"--port {PORTS['vllm']}" in flags
        assert "--shutdown-timeout 30" in flags
    base = [rest for word, rest in instructions((ROOT / "Dockerfile").read_text()) if word == "ARG" and "vllm" in rest]
    check_version(base[0].rpartition(":v")[2], untested=False)


def test_the_demo_takes_its_flags():
    for arguments in (composition()["services"]["demo"]["command"], last("demo", "CMD")):
        options = make_parser().parse_args(arguments)
        assert (options.host, options.port, str(options.log_dir)) == ("0.0.0.0", PORTS["vllm"], "/logs")


# ------------------------------------------------------------------------------------------- the parts find each other


def test_what_is_published_is_on_the_loopback_interface_and_is_what_listens():
    published = {}
    for name, service in composition()["services"].items():
        for port in service.get("ports", []):
            host, outside, inside = port.split(":")
            assert host == "127.0.0.1"
            assert outside == inside
            published.setdefault(name, []).append(int(inside))
    assert published == {
        "vllm": [PORTS["vllm"]],
        "demo": [PORTS["vllm"]],
        "proxy": [PORTS["listen"], PORTS["admin"]],
        "verifier": [PORTS["verifier"]],
        "prometheus": [PORTS["prometheus"]],
        "grafana": [PORTS["grafana"]],
    }
    assert [rest for word, rest in dockerfile("proxy") if word == "EXPOSE"] == ["9000 9001"]


def test_prometheus_scrapes_the_services_with_the_token_that_the_proxy_asks_for():
    services = composition()["services"]
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert {name: job["static_configs"][0]["targets"] for name, job in jobs.items()} == {
        name: [target] for name, target in JOBS.items()
    }
    token = jobs["sparseety-proxy"]["authorization"]["credentials_file"]
    assert services["proxy"]["environment"]["SPARSEETY_PROXY_ADMIN_TOKEN_FILE"] == token
    assert token in services["token"]["command"][0]
    assert "vllm" in services["demo"]["networks"]["default"]["aliases"]
    for name in ("proxy", "prometheus", "token"):
        assert any(volume.startswith("secrets:/run/secrets") for volume in services[name]["volumes"])
    mounted = dict(volume.split(":")[:2] for volume in services["prometheus"]["volumes"] if volume.startswith("."))
    assert f"--config.file={mounted['./deploy/prometheus/prometheus.yml']}" in services["prometheus"]["command"]
    assert mounted["./deploy/prometheus/rules"] == "/etc/prometheus/rules"
    assert config["rule_files"] == ["rules/*.yml"]


def test_grafana_finds_its_dashboards_and_its_prometheus():
    services = composition()["services"]
    mounted = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    [provider] = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/sparseety.yaml").read_text())[
        "providers"
    ]
    assert mounted["./deploy/grafana/dashboards"] == provider["options"]["path"]
    assert mounted["./deploy/grafana/provisioning"] == "/etc/grafana/provisioning"
    sources = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert sources["datasources"][0]["url"] == f"http://prometheus:{PORTS['prometheus']}"


def test_every_path_that_is_mounted_or_copied_is_there():
    for service in composition()["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in composition()["volumes"] or (ROOT / source).exists(), source
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for word, rest in instructions((ROOT / "Dockerfile").read_text()):
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert any(f"!{part}" in ignored for part in (source, *map(str, Path(source).parents))), source


def test_who_shares_the_log_folder_is_one_user_on_one_machine():
    """Files are for their owner only, and of a writer elsewhere nobody knows at once that it was killed."""
    services = composition()["services"]
    sharing = [service for service in services.values() if "logs:/logs" in service.get("volumes", [])]
    assert len(sharing) == 4
    assert {(service["user"], service["hostname"]) for service in sharing} == {("2000:0", "sparseety")}
    for stage in ("proxy", "verifier", "demo", "vllm"):
        assert [rest for word, rest in dockerfile(stage) if word == "USER"][-1] == "2000:0"
    for name, pod in pods():
        assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]) == (2000, 0), name
        for container in containers(pod):
            assert "runAsUser" not in container["securityContext"]


def test_health_checks_ask_what_is_there():
    stages = {"proxy": PORTS["admin"], "verifier": PORTS["verifier"], "demo": PORTS["vllm"], "vllm": PORTS["vllm"]}
    for stage, port in stages.items():
        health = [rest for word, rest in dockerfile(stage) if word == "HEALTHCHECK"][-1]
        command = json.loads(health[health.index("[") :])
        assert command[1:3] == ["-m", "sparseety.probe"]
        assert command[3].startswith(f"http://127.0.0.1:{port}/")
        assert last(stage, "ENTRYPOINT")  # in exec form: signals reach the process itself
    services = composition()["services"]
    for service in services.values():
        for name, wanted in service.get("depends_on", {}).items():
            if wanted["condition"] == "service_healthy":
                stage = services[name].get("build", {}).get("target")
                assert "healthcheck" in services[name] or any(word == "HEALTHCHECK" for word, _ in dockerfile(stage))


# ----------------------------------------------------------------------------------------------------- Kubernetes


def test_probes_services_and_monitors_name_ports_that_are_listened_on():
    expected = {"http": 9000, "admin": 9001, "vllm": 8000, "verifier": 9102}
    for name, pod in pods():
        for container in containers(pod):
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            assert ports.items() <= expected.items(), name
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if probe in container:
                    assert container[probe]["httpGet"]["port"] in ports, f"{name}: {probe}"
    for path, document in manifests():
        spec = document.get("spec", {})
        match document["kind"]:
            case "Service":
                assert {port["targetPort"] for port in spec["ports"]} <= set(expected.values()), path
            case "PodMonitor":
                assert {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]} <= set(expected), path
                jobs = {endpoint["relabelings"][0]["replacement"] for endpoint in spec["podMetricsEndpoints"]}
                assert jobs <= set(JOBS), path
            case "NetworkPolicy":
                allowed = {port["port"] for rule in spec["ingress"] for port in rule["ports"]}
                assert allowed <= set(expected.values()), path


def test_a_deployment_waits_for_as_long_as_a_model_may_load():
    for path, document in manifests():
        if document["kind"] == "Deployment":
            probes = [each["startupProbe"] for each in containers(document["spec"]["template"]["spec"])
                      if "startupProbe" in each]  # fmt: skip
            needed = sum(probe["periodSeconds"] * probe["failureThreshold"] for probe in probes)
            assert document["spec"].get("progressDeadlineSeconds", 600) > needed, path


def test_one_slow_answer_of_the_server_behind_does_not_take_all_proxies_out():
    """They ask the same server, so they turn unready together."""
    for name, _, container in of_image("sparseety-proxy"):
        assert container["readinessProbe"]["failureThreshold"] > 1, name


def test_selectors_find_their_pods_and_volumes_are_there():
    labels = {
        path.parent.name: [
            d["spec"]["template"]["metadata"]["labels"]
            for p, d in manifests()
            if p.parent == path.parent and d["kind"] == "Deployment"
        ]
        for path in KUBERNETES
    }
    for path, document in manifests():
        selector = document.get("spec", {}).get("selector") or document.get("spec", {}).get("podSelector")
        if selector:
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= each.items() for each in labels[path.parent.name]), path
    for name, pod in pods():
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in containers(pod):
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes, name


def test_the_token_is_the_secret_that_the_proxy_reads_and_prometheus_gives():
    for name, pod, container in of_image("sparseety-proxy"):
        [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "token"]
        assert f"--admin-token-file={mount['mountPath']}/admin-token" in container["args"], name
        [volume] = [volume for volume in pod["volumes"] if volume["name"] == "token"]
        assert volume["secret"]["secretName"] == "sparseety-admin"
        assert pod["securityContext"]["fsGroup"]  # else its files are root's alone
    monitors = [document for _, document in manifests() if document["kind"] == "PodMonitor"]
    for endpoint in [each for monitor in monitors for each in monitor["spec"]["podMetricsEndpoints"]]:
        if endpoint["port"] == "admin":
            assert endpoint["authorization"]["credentials"] == {"name": "sparseety-admin", "key": "admin-token"}


def test_pods_ask_for_no_more_than_the_restricted_standard_allows():
    for name, pod in pods():
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in containers(pod):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context.get("readOnlyRootFilesystem") or container["name"] == "vllm"
            assert container["resources"]["requests"]
            assert container["resources"]["limits"]["memory"]


def test_the_sidecars_end_after_the_proxy_and_the_verifier_last():
    """Kubernetes stops containers first, then the sidecars, the one that started first last."""
    [pod] = [pod for name, pod in pods() if name.startswith("sidecar/")]
    assert [container["name"] for container in pod["containers"]] == ["proxy"]
    assert [container["name"] for container in pod["initContainers"]] == ["verifier", "vllm"]
    assert all(container["restartPolicy"] == "Always" for container in pod["initContainers"])
    assert all("startupProbe" in container for container in pod["initContainers"])


def test_a_kustomization_names_all_files_beside_it_and_the_images_of_the_pods():
    for path in KUBERNETES:
        if path.name != "kustomization.yaml":
            continue
        kustomization = yaml.safe_load(path.read_text())
        assert {*kustomization["resources"], path.name} == {each.name for each in path.parent.glob("*.yaml")}
        used = {c["image"] for name, pod in pods() if name.startswith(path.parent.name) for c in containers(pod)}
        assert {image["name"] for image in kustomization["images"]} == used
        assert {image["newTag"] for image in kustomization["images"]} == {sparseety.__version__}


def test_images_have_the_version_of_the_release():
    tags = {
        s["image"].partition(":")[2] for s in composition()["services"].values() if s["image"].startswith("sparseety")
    }
    assert tags == {sparseety.__version__}


# --------------------------------------------------------------------------------------------- locks, example, linters


def pins(path: Path) -> dict[str, set[str]]:
    """Package -> its version and hashes."""
    found: dict[str, set[str]] = {}
    for block in re.split(r"\n(?=\S)", path.read_text()):
        if line := re.match(r"([\w.-]+)==(\S+)", block):
            found.setdefault(line[1], set()).update({line[2], *re.findall(r"--hash=(\S+)", block)})
    return found


@pytest.mark.parametrize("part", ["proxy", "verifier", "build"])
def test_an_image_installs_what_the_tests_ran_with(part):
    whole, locked = pins(ROOT / "requirements.lock"), pins(ROOT / f"deploy/docker/{part}.lock")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = project["project"]["optional-dependencies"].get(part, project["build-system"]["requires"])
    assert {re.match(r"[\w.-]+", requirement)[0] for requirement in asked} <= locked.keys(), "make lock"
    for name, pinned in locked.items():
        if name in whole:  # what no platform of the tests wants may be missing there
            assert pinned == whole[name], f"{name}: make lock"
    assert not locked.keys() & {"torch", "transformers", "vllm"}


def test_the_example_of_settings_has_every_variable_and_its_default():
    text = (ROOT / "docker-compose.yml").read_text()
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    example = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.M))
    assert example.pop("COMPOSE_PROFILES") in ("vllm",)
    assert example == used


def tool(name: str) -> str:
    folder = os.environ.get("SPARSEETY_TEST_DEPLOY_TOOLS")
    if not folder:
        pytest.skip("SPARSEETY_TEST_DEPLOY_TOOLS is not set (make test-deploy)")
    return str(Path(folder).absolute() / "bin" / name)


def test_hadolint_has_nothing_to_say_about_the_dockerfile():
    done = subprocess.run([tool("hadolint"), "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_composition_is_one_by_the_compose_specification():
    read = "import sys; from compose_spec import PyCompose; PyCompose.from_yaml(sys.stdin.read()).validate()"
    text = yaml.safe_dump(composition()).replace(":host-gateway", ":127.0.0.1")  # a word that this library lacks
    done = subprocess.run([tool("python"), "-c", read], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_the_manifests_are_valid_for_kubernetes(version):
    paths = [str(path) for path in KUBERNETES if path.name not in ("kustomization.yaml", "pod-monitor.yaml")]
    command = [tool("kubernetes-validate"), "--strict", "-k", version, *paths]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") + done.stderr.count("passed") >= 10

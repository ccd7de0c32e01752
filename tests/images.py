"""What a Dockerfile and a composition say, done without a container engine: overlays and namespaces over this machine's
own root file system, which stands in for the base image. Needs root; paths, user, capabilities, process 1, read-only
root and volumes are then those of the real thing."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
WAIT = 60.0
# The interpreter of the base image is this one's; a virtual environment's would be found by its path only.
PATH = f"{sys.base_prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_MOUNTS = """
set -e
mount --make-rprivate /
[ ! "$NAME" ] || hostname "$NAME"
mount -t overlay overlay -o "lowerdir=$LOWER,upperdir=$UPPER,workdir=$WORK" "$TREE"
mount --rbind /dev "$TREE/dev"
mount -t proc proc "$TREE/proc"
mount --bind /sys "$TREE/sys"
mount -o remount,ro,bind "$TREE/sys"
while read -r source target mode; do
  [ "$source" ] || continue
  [ -e "$TREE$target" ] || mkdir -p "$TREE$target"
  if [ "$source" = tmpfs ]; then mount -t tmpfs -o mode=1777 tmpfs "$TREE$target"; continue; fi
  mount --bind "$source" "$TREE$target"
  [ "$mode" != ro ] || mount -o remount,ro,bind "$TREE$target"
done <<< "$BINDS"
[ ! "$READ_ONLY" ] || mount -o remount,ro "$TREE"
exec chroot "$TREE" "$@"
"""


def possible() -> bool:
    """Whether this machine lets us."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "setpriv", "chroot"))):
        return False
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--net", "--fork", "sh", "-c", "ip link set lo up"], capture_output=True
    )
    return tried.returncode == 0


@dataclass(frozen=True)
class Image:
    layers: tuple[Path, ...] = ()  # the topmost first
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    health: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()


def instructions(dockerfile: str) -> Iterator[tuple[str, str]]:
    """(word, the rest) of each instruction, lines joined."""
    text = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", dockerfile, flags=re.M))
    for line in filter(str.strip, text.splitlines()):
        word, _, rest = line.partition(" ")
        yield word.upper(), rest.strip()


class Builder:
    """Builds stages of the Dockerfile when they are asked for, each once."""

    def __init__(self, folder: Path, bases: dict[str, Image] | None = None) -> None:
        """bases: what stands in for images that are not stages; else this machine."""
        self._folder, self._bases = folder, bases or {}
        self._arguments: dict[str, str] = {}
        self._stages: dict[str, tuple[str, list[tuple[str, str]]]] = {}
        self._built: dict[str, Image] = {}
        stage: list[tuple[str, str]] | None = None
        for word, rest in instructions((ROOT / "Dockerfile").read_text()):
            if word == "FROM":
                base, _, name = rest.partition(" AS ")
                stage = []
                self._stages[name] = base, stage
            elif stage is not None:
                stage.append((word, rest))
            elif word == "ARG":
                name, _, default = rest.partition("=")
                self._arguments[name] = default

    @property
    def targets(self) -> list[str]:
        return list(self._stages)

    def build(self, target: str) -> Image:
        if target not in self._built:
            base, steps = self._stages[target]
            base = _substitute(base, self._arguments)
            image = self.build(base) if base in self._stages else self._bases.get(base) or self._machine()
            layer = self._folder / f"stage-{target}"
            layer.mkdir(parents=True)
            image = replace(image, layers=(layer, *image.layers))
            for word, rest in steps:
                image = self._step(image, word, rest)
            self._built[target] = image
        return self._built[target]

    def _machine(self) -> Image:
        layer = self._folder / "machine"
        (layer / "root").mkdir(parents=True, exist_ok=True)
        (layer / "root").chmod(0o755)  # others than root are to reach an interpreter that is installed there
        return Image(layers=(layer,), env={"PATH": PATH})

    def _step(self, image: Image, word: str, rest: str) -> Image:
        match word:
            case "ENV":
                pairs = dict(pair.partition("=")[::2] for pair in shlex.split(rest))
                return replace(
                    image, env=image.env | {name: _substitute(value, image.env) for name, value in pairs.items()}
                )
            case "WORKDIR":
                return replace(image, workdir=rest)
            case "USER":
                return replace(image, user=rest)
            case "VOLUME":
                return replace(image, volumes=(*image.volumes, rest))
            case "EXPOSE":
                return replace(image, ports=(*image.ports, *rest.split()))
            case "HEALTHCHECK":
                return replace(image, health=tuple(json.loads(rest[rest.index("[") :])))
            case "ENTRYPOINT":
                return replace(image, entrypoint=tuple(json.loads(rest)), command=())
            case "CMD":
                return replace(image, command=tuple(json.loads(rest)))
            case "COPY":
                self._copy(image, rest)
            case "RUN":
                container = Container(image, self._folder / "run", network=None)
                done = container.run(["/bin/sh", "-c", rest])
                assert done.returncode == 0, done.stdout + done.stderr
            case _:
                raise AssertionError(f"an instruction that nobody here knows: {word}")
        return image

    def _copy(self, image: Image, rest: str) -> None:
        words = rest.split()
        options = [word for word in words if word.startswith("--")]
        *names, target = words[len(options) :]
        if options:
            stage = self.build(options[0].removeprefix("--from="))
            found = [layer / names[0].lstrip("/") for layer in reversed(stage.layers)]  # upper ones over lower ones
            sources = [path for path in found if path.exists()]
        else:
            sources = [ROOT / name for name in names]  # that .dockerignore lets them through, a test holds
        assert sources, f"no such path: {rest}"
        into = image.layers[0] / os.path.normpath(os.path.join(image.workdir, target)).lstrip("/")  # noqa: PTH118
        for path in sources:
            if path.is_dir():
                shutil.copytree(path, into, symlinks=True, dirs_exist_ok=True, ignore=_compiled)
            else:
                to = into / path.name if target.endswith("/") or target == "." else into
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, to)


def _compiled(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__"] if str(ROOT) in folder else []


def _substitute(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda found: values[found[1]], text)


@dataclass
class Container:
    """One that can be run. network: a process whose network it shares; None: this machine's."""

    image: Image
    folder: Path  # where what it writes goes, as long as it is there
    network: int | None
    user: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    binds: list[tuple[str, str, str]] = field(default_factory=list)  # source or tmpfs, target, rw or ro
    hostname: str = ""  # empty: this machine's
    read_only: bool = False
    drop: bool = False  # all capabilities
    process: subprocess.Popen[bytes] | None = None

    def _command(self, command: list[str]) -> tuple[list[str], dict[str, str]]:
        unshare = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child"]
        if self.network is not None:
            unshare = ["nsenter", f"--net=/proc/{self.network}/ns/net", *unshare]
        return [*unshare, "bash", "-c", _MOUNTS, "container", *self._inside(command)], self._mounts()

    def _inside(self, command: list[str]) -> list[str]:
        """What is run after the change of root."""
        uid, gid = self._uid(), (self.user or self.image.user).partition(":")[2]
        environ = {"HOME": "/home/sparseety" if uid else "/root"} | self.image.env | self.env
        become = ["setpriv", f"--reuid={uid}", f"--regid={gid or 0}", "--clear-groups", "--no-new-privs"]
        if self.drop:
            become += ["--inh-caps=-all", "--bounding-set=-all"]
        return [
            "env",
            "-i",
            "-C",
            self.image.workdir,
            *(f"{name}={value}" for name, value in environ.items()),
            *become,
            *command,
        ]

    def _uid(self) -> int:
        return int((self.user or self.image.user).partition(":")[0])

    def _mounts(self) -> dict[str, str]:
        folder = self.folder
        upper = self.image.layers[0]
        lowers = self.image.layers[1:]
        if self.network is not None:  # not a step of a build: its writes go with it
            lowers, upper = self.image.layers, folder / "upper"
        for each in (upper, folder / "work", folder / "tree"):
            each.mkdir(parents=True, exist_ok=True)
        return {
            "LOWER": ":".join([*map(str, lowers), "/"]),
            "UPPER": str(upper),
            "WORK": str(folder / "work"),
            "TREE": str(folder / "tree"),
            "BINDS": "\n".join(" ".join(bind) for bind in self.binds),
            "NAME": self.hostname,
            "READ_ONLY": "yes" if self.read_only else "",
        }

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        words, mounts = self._command(command)
        return subprocess.run(words, env=os.environ | mounts, capture_output=True, text=True, timeout=300)

    def start(self, command: list[str]) -> None:
        words, mounts = self._command(command)
        with self.folder.with_suffix(".output").open("w") as output:
            self.process = subprocess.Popen(
                words, env=os.environ | mounts, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def pid(self) -> int:
        """Of its process 1, as this machine counts."""
        assert self.process is not None
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            if children := Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
                return int(children[0])
            assert self.process.poll() is None, self.output()
            time.sleep(0.02)
        raise AssertionError("it has no process")

    def exec(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run something else in it while it runs."""
        inside = ["nsenter", "-t", str(self.pid), "--mount", "--pid", "--net", "--root", *self._inside(command)]
        return subprocess.run(inside, capture_output=True, text=True, timeout=WAIT)

    def healthy(self, check: list[str]) -> bool:
        return self.exec(check).returncode == 0

    def stop(self, patience: float) -> int:
        """SIGTERM to its process 1, as engines do. Returns the exit code."""
        assert self.process is not None
        os.kill(self.pid, signal.SIGTERM)
        return self.process.wait(patience)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()  # and with it all that is inside
        self.process.wait()

    def output(self) -> str:
        """All that it said."""
        return self.folder.with_suffix(".output").read_text(errors="replace")


@contextmanager
def network() -> Iterator[int]:
    """A network of its own, for containers to share. Yields a process in it."""
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec sleep 900"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "up\n"
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def composition(environ: dict[str, str] | None = None) -> dict[str, Any]:
    """docker-compose.yml, its variables put in."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1], found[2]
        return (environ or {}).get(name) or default or ""

    text = re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", value, (ROOT / "docker-compose.yml").read_text())
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


class Composition:
    """The services of docker-compose.yml that are built here, as containers in one network."""

    def __init__(self, builder: Builder, folder: Path, network: int) -> None:
        self._builder, self._folder, self._network = builder, folder, network
        self.services: dict[str, Any] = composition()["services"]
        hosts = folder / "hosts"
        folder.mkdir(parents=True)
        names = {*self.services, *(alias for service in self.services.values() for alias in _aliases(service))}
        hosts.write_text("".join(f"127.0.0.1 {name}\n" for name in ["localhost", *sorted(names)]))
        self._hosts = hosts

    def volume(self, name: str) -> Path:
        return self._folder / "volumes" / name

    def container(self, name: str) -> Container:
        service = self.services[name]
        image = self._builder.build(service["build"]["target"])
        binds = [(str(self._hosts), "/etc/hosts", "ro")]
        for volume in service.get("volumes", []):
            source, target, *mode = volume.split(":")
            path = (ROOT / source) if source.startswith(".") else self._new(source, image, target)
            binds.append((str(path), target, *(mode or ["rw"])))
        binds += [("tmpfs", target.partition(":")[0], "rw") for target in service.get("tmpfs", [])]
        return Container(
            image,
            self._folder / "containers" / name,
            self._network,
            user=service["user"],
            env={key: str(value) for key, value in service.get("environment", {}).items()},
            binds=binds,
            hostname=service.get("hostname", ""),
            read_only=service.get("read_only", False),
            drop=service.get("cap_drop") == ["ALL"],
        )

    def _new(self, name: str, image: Image, target: str) -> Path:
        """A volume: empty, it takes owner and mode from the folder of the image that it is mounted over."""
        path = self.volume(name)
        path.mkdir(parents=True, exist_ok=True)
        folder = next((f for layer in image.layers if (f := layer / target.lstrip("/")).is_dir()), None)
        if folder is not None and not any(path.iterdir()):
            status = folder.stat()
            os.chown(path, status.st_uid, status.st_gid)
            path.chmod(status.st_mode & 0o7777)
        return path

    def command(self, name: str) -> list[str]:
        """What its process 1 is."""
        service = self.services[name]
        image = self._builder.build(service["build"]["target"])
        entrypoint = service.get("entrypoint", image.entrypoint)
        command = service.get("command", image.command if "entrypoint" not in service else ())
        return [*entrypoint, *command]

    def health(self, name: str) -> list[str]:
        service = self.services[name]
        if "healthcheck" in service:
            assert service["healthcheck"]["test"][0] == "CMD"
            return list(service["healthcheck"]["test"][1:])
        return list(self._builder.build(service["build"]["target"]).health)


def _aliases(service: dict[str, Any]) -> list[str]:
    networks = service.get("networks", {})
    return [alias for network in networks.values() for alias in network.get("aliases", [])]

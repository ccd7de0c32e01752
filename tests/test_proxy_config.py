"""Settings: where they come from, how they are written, what is said of those that cannot be used."""

import re
from pathlib import Path

import pytest
from pydantic import SecretStr

from proxy import values
from proxy.config import PREFIX, ProxyConfig, load_config, read_config, show_config, show_value
from proxy.values import Address
from sparseety.errors import SparseetyError

FILE = """# a comment
[proxy]
listen = "127.0.0.1:9100"

upstream = "http://file:1"
timeout_idle = "15min"
log_segment_bytes = "1MiB"
log_dir = \"\"\"
upstream = a folder with
an odd name\"\"\"
exclusive = true
workers = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder to start in, and no settings in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in ProxyConfig.model_fields:
        monkeypatch.delenv(PREFIX + name.upper(), raising=False)
    return tmp_path


def test_a_flag_goes_before_the_environment_that_before_the_file_and_that_before_the_default(folder, monkeypatch):
    (folder / "sparseety.toml").write_text(FILE)
    monkeypatch.setenv("SPARSEETY_PROXY_UPSTREAM", "http://env:1/")
    monkeypatch.setenv("SPARSEETY_PROXY_LISTEN", "[::1]:0")
    monkeypatch.setenv("SPARSEETY_PROXY_ADMIN", "")  # an empty variable is one that is not set
    monkeypatch.setenv("SPARSEETY_PROXY_PORT", "tcp://10.0.0.1:9000")  # Kubernetes does this
    loaded = load_config(["--listen", "127.0.0.1:1", "--no-exclusive"])
    assert loaded.config == ProxyConfig(
        listen=Address("127.0.0.1", 1),
        upstream="http://env:1",
        timeout_idle=900.0,
        log_segment_bytes=1 << 20,
        log_dir=Path("upstream = a folder with\nan odd name"),
        exclusive=False,
        workers=3,
    )
    assert loaded.origins == {
        "listen": "--listen",
        "upstream": "SPARSEETY_PROXY_UPSTREAM",
        "timeout_idle": "sparseety.toml:6",
        "log_segment_bytes": "sparseety.toml:7",
        "log_dir": "sparseety.toml:8",
        "exclusive": "--no-exclusive",
        "workers": "sparseety.toml:12",
    }


def test_config_show_tells_every_setting_its_value_and_its_origin_but_no_secret(folder, monkeypatch, capsys):
    (folder / "other.toml").write_text(FILE)
    monkeypatch.setenv("SPARSEETY_PROXY_ADMIN_TOKEN", "let me in")
    assert show_config(["show", "--config", "other.toml", "--protect-lag", "5ms"]) == 0
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split("  ")[1:] for line in shown.replace("\nan odd name", "").splitlines()}
    assert rows.keys() == ProxyConfig.model_fields.keys()
    assert [word.strip() for word in rows["timeout_idle"] if word] == ["900 s", "other.toml:6"]
    assert [word.strip() for word in rows["protect_lag"] if word] == ["0.005 s", "--protect-lag"]
    assert [word.strip() for word in rows["log_total_bytes"] if word] == ["20 GiB", "default"]
    assert [word.strip() for word in rows["admin_token"] if word] == ["(set)", "SPARSEETY_PROXY_ADMIN_TOKEN"]
    assert "let me in" not in shown


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[proxy]\n\nupstraem = "http://a:1"\n', 'sparseety.toml:3: no setting "upstraem"; did you mean "upstream"?'),
        ("[proxy]\nlog-dir = 'x'\n", 'sparseety.toml:2: no setting "log-dir"; did you mean "log_dir"?'),
        ("[proxy]\nxyz = 1\n", 'sparseety.toml:2: no setting "xyz"; there are: listen, admin, '),
        ("\n[porxy]\nworkers = 1\n", 'sparseety.toml:2: no table "porxy"; did you mean "proxy"?'),
        ("proxy = 1\n", "sparseety.toml: proxy is no table; write [proxy] and the settings below it"),
        ("[proxy\n", "sparseety.toml: not TOML: "),
        (
            "[proxy]\nworkers = 0\n",
            'sparseety.toml:2: workers="0" is not a whole number from 1 to 1024; example: 4',
        ),
        ("[proxy]\nlisten = 9000\n", 'sparseety.toml:2: listen="9000" is not HOST:PORT; example: 127.0.0.1:9000'),
        ("[proxy]\ntimeout_idle = 0\n", 'sparseety.toml:2: timeout_idle="0" leaves no time at all'),
        ("[proxy]\nlog_dir = 7\n", 'sparseety.toml:2: log_dir="7" cannot be used: '),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_line_and_the_way_out(folder, content, message):
    (folder / "sparseety.toml").write_text(content)
    with pytest.raises(SparseetyError) as raised:
        read_config([])
    assert message in str(raised.value)


def test_a_file_that_was_asked_for_and_is_not_there_is_an_error():
    with pytest.raises(SparseetyError, match=r"none\.toml: No such file or directory"):
        read_config(["--config", "none.toml"])


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (
            [],
            {"UPSTREAM": "vllm:8000"},
            'SPARSEETY_PROXY_UPSTREAM="vllm:8000" is not a URL; example: http://vllm:8000',
        ),
        (["--upstream", "http://[x"], {}, '--upstream="http://[x" is not a URL; example: http://vllm:8000'),
        (["--upstream", "http://a:b@c"], {}, "holds credentials"),
        (["--upstream", "http://a/v1"], {}, "has a path"),
        (["--listen", "9000"], {}, '--listen="9000" is not HOST:PORT; example: 127.0.0.1:9000'),
        (["--listen", "0.0.0.0:9000"], {}, "--listen: 0.0.0.0:9000 can be reached from other machines"),
        (["--drain-seconds", "nan"], {}, '--drain-seconds="nan" is not a duration; examples: 30, 30s, 15min'),
        (["--drain-seconds", "-1"], {}, "is not a duration"),
        (["--log-total-bytes", "20 GB/s"], {}, '--log-total-bytes="20 GB/s" is not a size'),
        ([], {"EXCLUSIVE": "maybe"}, 'SPARSEETY_PROXY_EXCLUSIVE="maybe" is neither true nor false'),
        (["--admin", "0.0.0.0:1", "--allow-remote"], {}, "set SPARSEETY_PROXY_ADMIN_TOKEN"),
        ([], {"ADMIN_TOKEN": " "}, "SPARSEETY_PROXY_ADMIN_TOKEN is empty"),
        (["--admin", "0.0.0.0:1"], {"ADMIN_TOKEN": "x"}, "add --allow-remote if that is meant"),
        (["--upstream-ca", "x.pem"], {}, "--upstream-ca: certificates, but the upstream http://127.0.0.1:8000 is not"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_with_the_way_out(argv, environ, message, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(PREFIX + name, value)
    with pytest.raises(SparseetyError) as raised:
        read_config(argv)
    assert message in str(raised.value)


def test_the_admin_port_may_be_reached_from_elsewhere_with_a_token(monkeypatch):
    monkeypatch.setenv("SPARSEETY_PROXY_ADMIN_TOKEN", "secret\n")
    config = read_config(["--admin", "0.0.0.0:9001", "--allow-remote"])
    assert config.admin_token == SecretStr("secret")
    assert "secret" not in repr(config)


def test_the_admin_token_may_stand_in_a_file(folder, capsys):
    (folder / "token").write_text("secret\n")
    flags = ["--admin", "0.0.0.0:9001", "--allow-remote", "--admin-token-file", "token"]
    assert read_config(flags).admin_token == SecretStr("secret")
    assert show_config(["show", *flags]) == 0
    shown = capsys.readouterr().out
    assert "secret" not in shown
    assert re.search(r"^admin_token +\(set\) +token$", shown, re.M)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "--admin-token-file: token: No such file"),
        (b" \n", "holds no token"),
        (b"\xff", "holds no token"),
        (b"secret", "given by SPARSEETY_PROXY_ADMIN_TOKEN too"),
    ],
)
def test_a_token_file_that_cannot_be_used_is_named_and_not_quoted(content, message, folder, monkeypatch):
    if content is not None:
        (folder / "token").write_bytes(content)
    if content == b"secret":
        monkeypatch.setenv("SPARSEETY_PROXY_ADMIN_TOKEN", "secret")
    with pytest.raises(SparseetyError, match=message) as raised:
        read_config(["--admin-token-file", "token"])
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("30", 30), ("30s", 30), ("15min", 900), ("1.5 h", 5400), ("20ms", 0.02), (2, 2), (0.5, 0.5), ("1d", 86400)],
)
def test_durations_are_read_with_their_units(written, seconds):
    assert values.read_seconds(written) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("written", "size"),
    [("256MiB", 256 << 20), ("20GiB", 20 << 30), ("1kB", 1000), ("1 kib", 1024), ("7", 7), (7, 7), ("0.5MiB", 1 << 19)],
)
def test_sizes_are_read_with_their_units(written, size):
    assert values.read_bytes(written) == size


@pytest.mark.parametrize("name", ProxyConfig.model_fields)
def test_what_config_show_prints_can_be_written_into_the_file(folder, name, capsys):
    default = ProxyConfig()
    assert show_config(["show"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.split()[0] == name)
    shown = row.removeprefix(name).removesuffix("default").strip()
    if name in ("upstream_ca", "admin_token", "admin_token_file"):
        assert shown == "none"  # not set; "none" would be a name
        return
    (folder / "sparseety.toml").write_text(f'[proxy]\n{name} = "{shown}"\n')
    assert read_config([]) == default


def test_no_setting_has_a_name_that_kubernetes_would_set():
    assert not [name for name in ProxyConfig.model_fields if name.endswith(("_port", "_host")) or "_port_" in name]


def test_the_operations_page_lists_every_setting_with_its_default():
    page = (Path(__file__).parent.parent / "docs" / "operations.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", page.partition("| setting |")[2].partition("\n\n")[0], re.M)
    fields = ProxyConfig.model_fields
    assert rows == [(name, show_value(name, field.default), field.description) for name, field in fields.items()]

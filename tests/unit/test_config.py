"""Settings of a daemon: precedence, reading, refusals that name their source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from p2pshard.config import DaemonConfig, load_config, local_address, parse_address
from p2pshard.errors import InvalidRequest


@pytest.fixture
def quiet(tmp_path: Path) -> dict[str, str]:
    """An environment whose data directory has no config.toml."""
    return {"P2PSHARD_DATA_DIR": str(tmp_path / "data")}


def test_defaults(quiet: dict[str, str]) -> None:
    config = load_config({}, environ=quiet)
    assert (config.port, config.api_port, config.data_ports) == (7332, 7331, (7333, 7340))
    assert (config.device, config.memory, config.mdns, config.peers) == ("auto", None, True, ())
    assert (config.cluster, config.warm_worker, config.json_logs, config.advertise) == (
        "default",
        True,
        False,
        None,
    )
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.name)
    assert config.models_dir.is_absolute()


def test_flags_win_over_variables_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('name = "file"\nmemory = "1GB"\ndevice = "cpu"\nport = 9001\n')
    environ = {"P2PSHARD_NAME": "variable", "P2PSHARD_MEMORY": "2GB", "P2PSHARD_DATA_DIR": str(tmp_path)}
    config = load_config({"name": "flag", "memory": None}, environ=environ, config_path=file)
    assert (config.name, config.memory, config.device, config.port) == ("flag", 2_000_000_000, "cpu", 9001)


def test_the_file_is_found_in_the_data_directory_or_by_variable(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('name = "found"\n')
    assert load_config({"data_dir": tmp_path}, environ={}).name == "found"
    other = tmp_path / "other.toml"
    other.write_text(f'name = "named"\ndata_dir = "{tmp_path / "d"}"\n')
    config = load_config({}, environ={"P2PSHARD_CONFIG": str(other)})
    assert (config.name, config.data_dir) == ("named", tmp_path / "d")


def test_every_setting_is_read_from_every_source(tmp_path: Path) -> None:
    expected = DaemonConfig(
        name="box",
        data_dir=tmp_path,
        memory=600_000_000,
        device="cuda:1",
        port=1,
        api_port=2,
        data_ports=(0, 0),
        api_bind="::",
        allow_origins=("https://a.example", "http://b:8080"),
        bind="127.0.0.1",
        advertise="box.lan",
        peers=("10.0.0.1:7332", "[fe80::1]:9"),
        cluster="home",
        mdns=False,
        models_dir=tmp_path / "m",
        tensor_cache=5_000_000_000,
        warm_worker=False,
        copies=False,
        recover_wait=5.0,
        json_logs=True,
    )
    environ = {
        "P2PSHARD_NAME": "box",
        "P2PSHARD_DATA_DIR": str(tmp_path),
        "P2PSHARD_MEMORY": "600MB",
        "P2PSHARD_DEVICE": "cuda:1",
        "P2PSHARD_PORT": "1",
        "P2PSHARD_API_PORT": "2",
        "P2PSHARD_DATA_PORTS": "0-0",
        "P2PSHARD_API_BIND": "::",
        "P2PSHARD_ALLOW_ORIGINS": "https://a.example/, http://b:8080",
        "P2PSHARD_BIND": "127.0.0.1",
        "P2PSHARD_ADVERTISE": "box.lan",
        "P2PSHARD_PEERS": "10.0.0.1, [fe80::1]:9",
        "P2PSHARD_CLUSTER": "home",
        "P2PSHARD_MDNS": "no",
        "P2PSHARD_MODELS_DIR": str(tmp_path / "m"),
        "P2PSHARD_TENSOR_CACHE": "5GB",
        "P2PSHARD_WARM_WORKER": "0",
        "P2PSHARD_COPIES": "0",
        "P2PSHARD_RECOVER_WAIT": "5",
        "P2PSHARD_JSON_LOGS": "1",
    }
    assert load_config({}, environ=environ) == expected
    file = tmp_path / "all.toml"
    file.write_text(
        f'name = "box"\ndata_dir = "{tmp_path}"\nmodels_dir = "{tmp_path}/m"\nmemory = 600000000\n'
        'device = "cuda:1"\nport = 1\napi_port = 2\ndata_ports = [0, 0]\nbind = "127.0.0.1"\n'
        'api_bind = "::"\nallow_origins = ["https://a.example", "http://b:8080"]\n'
        'advertise = "box.lan"\npeers = ["10.0.0.1", "[fe80::1]:9"]\ncluster = "home"\n'
        "mdns = false\ntensor_cache = 5000000000\nwarm_worker = false\ncopies = false\nrecover_wait = 5\njson_logs = true\n"
    )
    assert load_config({}, environ={}, config_path=file) == expected


def test_an_unknown_setting_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('data-dirs = "x"\n')
    with pytest.raises(InvalidRequest, match=r"c\.toml has a setting 'data-dirs'.*did you mean 'data_dir'"):
        load_config({}, environ={}, config_path=file)


@pytest.mark.parametrize(
    ("flags", "environ", "text", "source"),
    [
        ({"memory": "lots"}, {}, "", "--memory is 'lots'"),
        ({"peers": ("host:99999",)}, {}, "", "--peer is"),
        ({}, {"P2PSHARD_PORT": "seventy"}, "", "P2PSHARD_PORT is 'seventy'"),
        ({}, {"P2PSHARD_MDNS": "maybe"}, "", "P2PSHARD_MDNS is 'maybe'"),
        ({}, {"P2PSHARD_DEVICE": "tpu"}, "", "P2PSHARD_DEVICE is 'tpu'"),
        ({}, {}, "port = true", "port in "),
        ({}, {}, 'port = "7340-7350"', "port in "),
        ({}, {}, 'data_ports = "9-1"', "data_ports in "),
        ({}, {}, 'name = "two words"', "name in "),
        ({}, {}, "port = 7335", "port 7335 lies in data_ports 7333-7340"),
        ({}, {}, "port = 7331", "port and api_port are both 7331"),
        ({}, {}, "port = ", "is not TOML"),
    ],
)
def test_a_wrong_value_names_its_source(tmp_path: Path, flags, environ, text, source) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(InvalidRequest) as refused:
        load_config(flags, environ=environ, config_path=file)
    assert source in refused.value.message


def test_a_named_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read the configuration file"):
        load_config({}, environ={}, config_path=tmp_path / "none.toml")


def test_a_file_in_the_data_directory_cannot_move_it(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('data_dir = "/elsewhere"\n')
    with pytest.raises(InvalidRequest, match="sets data_dir"):
        load_config({"data_dir": tmp_path}, environ={})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host", "host:7332"),
        ("host:1", "host:1"),
        ("::1", "[::1]:7332"),
        ("[::1]", "[::1]:7332"),
        ("[fe80::1]:9", "[fe80::1]:9"),
    ],
)
def test_addresses(text: str, expected: str) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    "text", ["", ":7332", "host:", "host:0", "host:65536", "http://host:1", "a b:1", "host:x"]
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_address(text)


def test_the_daemon_of_this_machine() -> None:
    assert local_address({}) == "127.0.0.1:7332"
    assert local_address({"P2PSHARD_PORT": "9001"}) == "127.0.0.1:9001"


def test_the_example_file_is_right(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "node" / "config.example.toml"
    # every line that is commented out is a setting with its default or an example
    text = re.sub(r"(?m)^# ?(\w+ = )", r"\1", example.read_text())
    file = tmp_path / "c.toml"
    file.write_text(text)
    load_config({}, environ={}, config_path=file)
    named = set(re.findall(r"(?m)^(\w+) = ", text))
    assert named == set(DaemonConfig.__dataclass_fields__)


def test_a_variable_is_named_like_its_flag_and_one_that_is_misspelt_is_refused(quiet: dict[str, str]) -> None:
    assert load_config(environ={**quiet, "P2PSHARD_PEER": "10.0.0.1"}).peers == ("10.0.0.1:7332",)
    with pytest.raises(InvalidRequest, match=r"P2PSHARD_PRT.*P2PSHARD_PORT"):
        load_config(environ={**quiet, "P2PSHARD_PRT": "1"})
    load_config(environ={**quiet, "P2PSHARD_NODE": "10.0.0.1", "P2PSHARD_SOMETHING_ELSE": "1"})


@pytest.mark.parametrize("size", ["10", "1KB", "999999"])
def test_a_budget_without_its_unit_is_refused(quiet: dict[str, str], size: str) -> None:
    with pytest.raises(InvalidRequest, match="give a unit"):
        load_config({"memory": size}, environ=quiet)

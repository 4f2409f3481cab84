"""Configuration: what it makes, every mistake in one report, which packages it loads, and its JSON Schema."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Interval
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, TypeAdapter, field_validator

from tent_core.config import Enable, Settings, check, json_schema, load
from tent_core.errors import ConfigError
from tent_core.hookspecs import hookimpl
from tent_core.plugins import Offer, Registry
from tent_core.policy import PolicyEntry
from tent_core.section import Section
from tent_core.section import keys as keys_of
from tent_core.settings import PolicySettings, Sections, Yaml
from tent_core.transport import Transport, TransportDeclaration
from tent_core.types import Capabilities, Intent, Priority
from tent_core.units import Seconds, Size
from tent_core.yamldoc import parse


@dataclass(frozen=True)
class Rail(Section):
    device: str
    weight: Annotated[int, Ge(1)] = 1


@dataclass(frozen=True)
class Own(Section):
    """Settings of the transports of these tests."""

    streams: Annotated[int, Interval(ge=1, le=64)] = 4
    chunk: Size = 65536
    pause_s: Seconds = 0.5
    mode: Literal["fast", "slow"] = "fast"
    rails: tuple[Rail, ...] = ()
    limit: int | Literal["none"] = "none"


class RailModel(BaseModel, extra="forbid"):
    device: str
    weight: int = Field(1, ge=1)


class OwnModel(BaseModel, extra="forbid"):
    """The same as a pydantic model."""

    streams: int = Field(4, ge=1, le=64)
    chunk: Size = 65536
    pause_s: Seconds = 0.5
    mode: Literal["fast", "slow"] = "fast"
    rails: tuple[RailModel, ...] = ()
    limit: int | Literal["none"] = "none"


def factory() -> Transport:
    raise AssertionError("a configuration makes no transport")


class Packages:
    """Installed packages, and which of them have been imported; `own` is what they have for settings."""

    def __init__(self, own: Any = Own, **numbers: int) -> None:
        self.own = own
        self.imported: list[str] = []
        self.registry = Registry([self._offer(name, number) for name, number in numbers.items()])

    def _offer(self, name: str, number: int) -> Offer:
        module = ModuleType(f"package_{name}")
        declaration = TransportDeclaration(name, number, factory, self.own, Capabilities())
        module.tent_transport = hookimpl(tent_transport(declaration))  # type: ignore[attr-defined]

        def load() -> ModuleType:
            self.imported.append(name)
            if name == "rdma":
                raise ImportError("No module named 'pyverbs'")
            return module

        return Offer(name, f"tent-{name}", "1.0", f"package_{name}", load)


def tent_transport(declaration: TransportDeclaration) -> Callable[[], TransportDeclaration]:
    def tent_transport() -> TransportDeclaration:
        return declaration

    return tent_transport


@pytest.fixture(params=[Own, OwnModel])
def packages(request: pytest.FixtureRequest) -> Packages:
    return Packages(request.param, tcp=7, shm=3, mock=1000, rdma=1, ub=11)


def settings(text: str, packages: Packages) -> Settings:
    return load(parse(text), packages.registry)


def mistakes(text: str, packages: Packages) -> list[str]:
    return [str(mistake) for mistake in check(parse(text), packages.registry).mistakes]


FIVE = """\
transports:
  tcp:
    streams: many
  shmm: {enable: true}
policy:
  - name: foreground
    intent: foregroud_get
    transports: [shm, tcp]
peers:
  grace: 5s
wait: {spin_us: -1}
"""


def test_five_mistakes_are_reported_as_five(packages: Packages, tmp_path: Path) -> None:
    path = tmp_path / "tent.yaml"
    path.write_text(FIVE)
    with pytest.raises(ConfigError) as caught:
        load(path, packages.registry)
    assert caught.value.mistakes == (
        "line 3, transports.tcp.streams: found 'many'; allowed: a whole number",
        "line 4, transports.shmm: found the unknown transport 'shmm'; allowed: ascend, gds, io_uring, "
        "mnnvl, mock, mpcomm, nvlink, rdma, shm, sunrise_link, tcp, tpu, ub; did you mean 'shm'?",
        "line 7, policy[0].intent: found 'foregroud_get'; allowed: unspec, foreground_get, "
        "background_prefetch, migration, checkpoint, weight_loading, staging_internal; "
        "did you mean 'foreground_get'?",
        "line 10, peers.grace: found an unknown key; allowed: grace_s, idle_timeout_s, max; "
        "did you mean 'grace_s'?",
        "line 11, wait.spin_us: found -1; allowed: a duration such as 5s, 50us or 10min",
    )
    assert str(caught.value).splitlines()[0] == f"{path}: 5 mistakes"


def test_a_mistake_tells_its_parts(packages: Packages) -> None:
    (mistake,) = check(parse("log: {level: inof}"), packages.registry).mistakes
    assert (mistake.line, mistake.key, mistake.found) == (1, "log.level", "'inof'")
    assert (mistake.allowed, mistake.nearest) == ("debug, info, warning, error", "info")


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("[1]", "line 1: found a list of 1; allowed: a mapping with the keys control, failover"),
        ("transprots: {}", "line 1, transprots: found an unknown key; allowed: .*'transports'"),
        ("control: 5", "line 1, control: found 5; allowed: a mapping"),
        ("control: {listen: localhost}", "found 'localhost'; allowed: host:port"),
        ("control: {listen: '::1:80'}", r"allowed: a host, IPv4 address or \[IPv6 address\]"),
        ("control: {listen: '[::1]:65536'}", "a port up to 65535"),
        ("control: {advertise: 0.0.0.0}", "an address that peers can connect to"),
        ("control: {advertise: 'a b'}", "allowed: a host"),
        ("control: {advertise: '[::g]:1'}", "allowed: a host"),
        ("control: {call_timeout_s: 0}", "allowed: more than 0"),
        ("peers: {max: 0}", "found 0; allowed: at least 1"),
        ("peers: {max: 1.5}", "found 1.5; allowed: a whole number"),
        ("peers: {max: '5'}", "found '5'; allowed: a whole number"),
        ("peers: {grace_s: 10 sec}", "found '10 sec'; allowed: a duration .*did you mean '10s'"),
        ("failover: {max_attempts: true}", "found true; allowed: a whole number"),
        ("transports: [tcp]", "transports: found a list of 1; allowed: a mapping"),
        (
            "transports: {tcp: true}",
            r"tcp: found true; allowed: a mapping such as \{enable: auto\}",
        ),
        ("transports: {tcp: {enable: yes}}", "enable: found 'yes'; allowed: true, auto, false"),
        ("transports: {tcp: {enable: atuo}}", "did you mean 'auto'"),
        ("transports: {tcp: {enable: null}}", "enable: found nothing; allowed: true, auto, false"),
        ("transports: {unspec: {}}", "found the unknown transport 'unspec'"),
        ("transports: {TCP: {}}", "found the unknown transport 'TCP'; .*did you mean 'tcp'"),
        ("transports: {tcp: {streams: 65}}", "found 65; allowed: at most 64"),
        ("transports: {tcp: {stream: 1}}", "allowed: enable, chunk, .*did you mean 'streams'"),
        ("transports: {tcp: {chunk: 64K}}", "found '64K'; allowed: a size .*did you mean '64KiB'"),
        (
            "transports: {tcp: {mode: fats}}",
            "found 'fats'; allowed: fast, slow; did you mean 'fast'",
        ),
        ("transports: {tcp: {rails: [{}]}}", r"rails\[0\].device: found nothing; .*required"),
        ("transports: {tcp: {rails: [{device: a, wieght: 1}]}}", "device, weight; .*'weight'"),
        ("transports: {tcp: {limit: x}}", "limit: found 'x'; allowed: a whole number or none"),
        ("policy: []", "policy: found an empty list; allowed: a list of at least 1"),
        ("policy: {}", "policy: found an empty mapping; allowed: a list"),
        ("policy: [5]", r"policy\[0\]: found 5; allowed: a mapping"),
        ("policy: [{name: a}]", r"policy\[0\].transports: found nothing; allowed: .*required"),
        ("policy: [{transports: [tcp]}]", r"policy\[0\].name: found nothing; allowed: .*required"),
        ("policy: [{name: '', transports: [tcp]}]", "found ''; allowed: text of at least 1"),
        (
            "policy: [{name: a, transports: []}]",
            "found an empty list; allowed: a list of at least 1",
        ),
        ("policy: [{name: a, transports: tcp}]", "found 'tcp'; allowed: a list"),
        ("policy: [{name: a, transports: [7]}]", r"transports\[0\]: found 7; allowed: text"),
        ("policy: [{name: a, transports: ['']}]", r"transports\[0\]: found ''; allowed: text of"),
        (
            "policy: [{name: a, transports: [tpc]}]",
            "the unknown transport 'tpc'.*did you mean 'tcp'",
        ),
        ("policy: [{name: a, transports: [tcp, tcp]}]", r"\[1\]: found 'tcp' again; allowed: each"),
        (
            "policy: [{name: a, transports: [tcp], priority: 0}]",
            "found 0; allowed: high, medium, low",
        ),
        ("policy: [{name: a, transports: [tcp], segment_type: ram}]", "allowed: memory, file"),
        (
            "policy: [{name: a, transports: [tcp], same_machine: 1}]",
            "found 1; allowed: true or false",
        ),
        (
            "policy: [{name: a, transports: [tcp], local_memory: 'cuda:*'}]",
            "a kind of memory such as",
        ),
        (
            "policy: [{name: a, transports: [tcp], min_size: 2KiB, max_size: 1KiB}]",
            "min_size, .* 2KiB",
        ),
        (
            "policy: [{name: a, transports: [tcp], devices: mlx5_0}]",
            "found 'mlx5_0'; allowed: a list",
        ),
        (
            "policy: [{name: a, transports: [tcp]}, {name: a, transports: [shm]}]",
            "'a' again, after",
        ),
    ],
)
def test_each_kind_of_mistake_is_one_mistake_that_says_what_is_allowed(
    text: str, mistake: str, packages: Packages
) -> None:
    found = mistakes(text, packages)
    assert len(found) == 1, found
    assert re.search(mistake, found[0]), found[0]
    assert found[0].startswith("line 1")


def test_mistakes_of_reading_and_of_meaning_are_in_one_report_in_the_order_of_lines(
    packages: Packages,
) -> None:
    found = mistakes("log: {level: loud}\nwait: !tag {}\nlog: {}\npeers: {max: x}\n", packages)
    assert [text.partition(",")[0] for text in found] == ["line 1", "line 2", "line 3", "line 4"]


def test_a_list_with_mistakes_in_it_is_not_called_too_short(packages: Packages) -> None:
    (found,) = mistakes("policy: [{name: a, transports: [tcp], intent: x}]", packages)
    assert "intent" in found


def test_a_file_that_is_not_there_is_a_mistake(packages: Packages, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none.yaml", packages.registry)


def test_a_mapping_is_checked_like_yaml_but_has_no_lines(packages: Packages) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"peers": {"max": 0}, "transports": {"tcpp": {}}}, packages.registry)
    first, second = caught.value.mistakes
    assert first.startswith("peers.max: found 0")
    assert second.startswith("transports.tcpp: found the unknown transport 'tcpp'")


# ---------------------------------------------------------------- what a configuration makes


def test_the_defaults_are_those_of_the_documentation(packages: Packages) -> None:
    made = load(None, packages.registry)
    assert made.peers.grace_s == 10
    assert made.peers.idle_timeout_s == 300
    assert made.peers.max == 4096
    assert made.revocation.timeout_s == 10
    assert made.failover.max_attempts == 3
    assert made.wait.spin_us == 50
    assert made.notifications.queue == 4096
    assert made.transfer.timeout_s == 30
    assert made.control.listen == "127.0.0.1:0"
    assert made.control.advertise is None
    assert (made.log.level, made.log.format) == ("info", "console")


def test_all_that_yaml_says_arrives_in_the_settings(packages: Packages) -> None:
    made = settings(
        """
        control: {listen: "[::]:7000", advertise: "[fe80::1]", keepalive_time_s: 250ms}
        peers: {grace_s: 500ms, idle_timeout_s: 1h, max: 7}
        wait: {spin_us: 1ms}
        log: {level: debug, format: json}
        hooks: {stuck_s: 1, queue: 5}
        transports:
          tcp: {enable: true, streams: 2, chunk: 1MiB, rails: [{device: eth0}]}
          shm:
        policy:
          - name: kv
            segment_type: memory
            same_machine: false
            local_memory: cpu
            remote_memory: "*"
            min_size: 64KiB
            max_size: 1GiB
            priority: high
            intent: weight_loading
            devices: [mlx5_0, mlx5_1]
            qp_pool: foreground
            transports: [rdma, tcp]
          - name: anything
            transports: [shm, tcp]
        """,
        packages,
    )
    assert made.control.listen == "[::]:7000"
    assert made.control.advertise == "[fe80::1]"
    assert made.control.keepalive_time_s == 0.25
    assert (made.peers.grace_s, made.peers.idle_timeout_s, made.peers.max) == (0.5, 3600, 7)
    assert made.wait.spin_us == 1000
    assert (made.hooks.stuck_s, made.hooks.queue) == (1, 5)
    tcp = made.transports["tcp"]
    assert tcp.enable is Enable.TRUE
    assert (tcp.settings.streams, tcp.settings.chunk, tcp.settings.pause_s) == (2, 2**20, 0.5)
    assert [(rail.device, rail.weight) for rail in tcp.settings.rails] == [("eth0", 1)]
    assert made.transports["shm"].enable is Enable.AUTO
    assert made.policy == (
        PolicyEntry(
            name="kv",
            transports=("rdma", "tcp"),
            segment_type="memory",
            same_machine=False,
            local_memory="cpu",
            remote_memory="*",
            min_size=65536,
            max_size=2**30,
            priority=Priority.HIGH,
            intent=Intent.WEIGHT_LOADING,
            devices=("mlx5_0", "mlx5_1"),
            qp_pool="foreground",
        ),
        PolicyEntry("anything", ("shm", "tcp")),
    )


def test_settings_cannot_be_changed(packages: Packages) -> None:
    made = load(None, packages.registry)
    with pytest.raises(FrozenInstanceError):
        made.peers.max = 5  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        made.policy = ()  # type: ignore[misc]
    with pytest.raises(TypeError):
        made.transports["tcp"] = made.transports["shm"]  # type: ignore[index]


def test_sections_whose_lines_are_all_comments_mean_the_defaults(packages: Packages) -> None:
    made = settings("peers:\ntransports:\npolicy:\nlog:\n  # level: debug\n", packages)
    assert made == load(None, packages.registry)


# ---------------------------------------------------------------- which packages are loaded


def test_without_a_configuration_known_names_are_auto_and_private_ones_are_not_touched(
    packages: Packages,
) -> None:
    made = load(None, packages.registry)
    assert set(made.transports) == {"shm", "rdma", "mpcomm", "tcp", "ub"}
    assert made.policy == (PolicyEntry("default", ("shm", "rdma", "mpcomm", "tcp", "ub")),)
    assert set(made.enabled) == {"shm", "tcp", "ub"}
    assert made.skipped["mpcomm"].startswith("no installed package offers the transport 'mpcomm'")
    assert "No module named 'pyverbs'" in made.skipped["rdma"]
    assert packages.imported == ["rdma", "shm", "tcp", "ub"]


def test_a_configuration_that_enables_something_loads_nothing_else(packages: Packages) -> None:
    made = settings("transports: {tcp: {enable: true}}", packages)
    assert packages.imported == ["tcp"]
    assert made.policy == (PolicyEntry("default", ("tcp",)),)


def test_a_configuration_that_only_disables_leaves_the_rest_auto(packages: Packages) -> None:
    made = settings("transports: {rdma: {enable: false, devices: [whatever]}}", packages)
    assert packages.imported == ["shm", "tcp", "ub"]
    assert made.transports["rdma"].enable is Enable.FALSE
    assert made.skipped["rdma"] == "is disabled by transports in the configuration"
    assert "rdma" in made.policy[0].transports  # so that explain can say why it is out


def test_a_transport_that_only_the_policy_names_is_auto(packages: Packages) -> None:
    made = settings("policy: [{name: a, transports: [mock, nvlink]}]", packages)
    assert packages.imported == ["mock"]
    assert made.transports["mock"].enable is Enable.AUTO
    assert made.transports["mock"].settings == packages.own()
    assert "nvlink" in made.skipped


def test_a_disabled_transport_is_never_loaded_even_where_the_policy_names_it(
    packages: Packages,
) -> None:
    made = settings(
        "transports: {shm: {enable: false}}\npolicy: [{name: a, transports: [shm, tcp]}]", packages
    )
    assert packages.imported == ["tcp"]
    assert "shm" in made.skipped


def test_a_private_transport_is_used_where_it_is_named(packages: Packages) -> None:
    assert set(settings("transports: {mock: {}}", packages).enabled) == {"mock"}


class Demanding(BaseModel, extra="forbid"):
    device: str


class Broken(BaseModel, extra="forbid"):
    size: int = 1

    @field_validator("size", mode="before")
    @classmethod
    def _fail(cls, value: object) -> object:
        raise KeyError(value)


def test_required_settings_that_nobody_could_give_skip_what_is_auto_without_being_mentioned() -> (
    None
):
    registry = Registry.of(TransportDeclaration("ub", 11, factory, Demanding, Capabilities()))
    assert "transports.ub.device: found nothing" in load(None, registry).skipped["ub"]
    with pytest.raises(ConfigError, match=r"transports\.ub\.device: found nothing"):
        load({"transports": {"ub": {}}}, registry)


def test_a_settings_model_that_fails_is_a_mistake_and_no_crash() -> None:
    registry = Registry.of(TransportDeclaration("ub", 11, factory, Broken, Capabilities()))
    with pytest.raises(ConfigError, match="on which its package fails: KeyError: 5"):
        load({"transports": {"ub": {"size": 5}}}, registry)


def test_a_configuration_with_mistakes_implies_no_transport(packages: Packages) -> None:
    assert mistakes("transports: {tpc: {enable: true}}", packages)
    assert packages.imported == []


@pytest.mark.parametrize(
    ("name", "reason"), [("mpcomm", "no installed package"), ("rdma", "No module named 'pyverbs'")]
)
def test_what_cannot_be_loaded_is_skipped_under_auto_and_a_mistake_under_true(
    name: str, reason: str, packages: Packages
) -> None:
    auto = settings(f"transports: {{tcp: {{}}, {name}: {{enable: auto}}}}", packages)
    assert reason in auto.skipped[name]
    assert set(auto.enabled) == {"tcp"}
    (found,) = mistakes(f"transports: {{tcp: {{}}, {name}: {{enable: true}}}}", packages)
    assert f"transports.{name}.enable: found true, but" in found
    assert reason in found


def test_two_private_transports_with_one_number_are_both_refused() -> None:
    packages = Packages(tcp=7, mine=1001, yours=1001)
    made = settings("transports: {tcp: {}, mine: {}, yours: {}}", packages)
    assert set(made.enabled) == {"tcp"}
    assert made.skipped["mine"] == made.skipped["yours"]
    assert all(part in made.skipped["mine"] for part in ("tent-mine", "tent-yours", "1001"))


# ---------------------------------------------------------------- the documentation

DOCS = Path(__file__).parent.parent / "docs" / "configuration.md"


def test_every_setting_is_documented_with_its_default() -> None:
    page = DOCS.read_text()
    defaults = TypeAdapter(Sections).dump_python(Sections(), mode="json")
    for name, values in defaults.items():
        for key, default in values.items():
            line = next(line for line in page.splitlines() if f"`{name}.{key}`" in line)
            if isinstance(default, dict):
                assert all(inner in line for inner in default)
            elif isinstance(default, bool):
                assert f"| {str(default).lower()} |" in line
            elif default is not None:
                assert str(default) in line


def test_every_key_of_a_policy_entry_is_documented() -> None:
    page = DOCS.read_text()
    assert all(f"`{key}`" in page for key in keys_of(PolicySettings))
    assert all(f"`{intent.name.lower()}`" in page for intent in Intent)


def test_the_examples_of_the_documentation_are_right(packages: Packages) -> None:
    blocks = re.findall(r"(?m)(?:^    (?:transports|policy):\n)(?:^      .*\n)+", DOCS.read_text())
    assert len(blocks) == 2
    for block in blocks:
        accepted = block.replace(": true", ": auto")  # what is installed here is not the point
        assert mistakes(textwrap.dedent(accepted), packages) == []


# ---------------------------------------------------------------- whatever is written


KEYS = st.sampled_from(
    [
        "transports",
        "policy",
        "peers",
        "log",
        "control",
        "tcp",
        "shm",
        "mock",
        "enable",
        "name",
        "max",
        "x",
    ]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["auto", "tcp", "5s", "", "é"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_mapping_makes_settings_or_mistakes(data: dict[str, Any]) -> None:
    checked = check(data, Packages(tcp=7, shm=3, mock=1000).registry)
    assert (checked.settings is None) == bool(checked.mistakes)
    assert all(mistake.found and mistake.allowed for mistake in checked.mistakes)


# ---------------------------------------------------------------- JSON Schema


def references(node: object) -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "$ref":
                yield value
            else:
                yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_the_json_schema_has_the_settings_of_installed_packages(packages: Packages) -> None:
    schema = json_schema(packages.registry)
    tcp = schema["properties"]["transports"]["properties"]["tcp"]
    assert tcp["additionalProperties"] is False
    assert tcp["properties"]["enable"]["enum"] == [True, "auto", False]
    assert tcp["properties"]["streams"]["maximum"] == 64
    assert [kind["type"] for kind in tcp["properties"]["chunk"]["anyOf"]] == ["integer", "string"]


def test_the_json_schema_is_closed_and_complete(packages: Packages) -> None:
    schema = json.loads(json.dumps(json_schema(packages.registry)))
    definitions = {f"#/$defs/{name}" for name in schema["$defs"]}
    assert set(references(schema)) <= definitions
    assert schema["additionalProperties"] is False
    assert schema["properties"]["transports"]["additionalProperties"] is False
    assert set(schema["properties"]) == {*keys_of(Yaml)}
    for definition in schema["$defs"].values():
        assert definition["additionalProperties"] is False


def test_the_json_schema_knows_the_words_of_the_policy(packages: Packages) -> None:
    entry = json_schema(packages.registry)["$defs"]["PolicySettings"]["properties"]
    assert {"tcp", "mock", "nvlink"} <= set(entry["transports"]["items"]["enum"])
    assert "unspec" not in entry["transports"]["items"]["enum"]
    assert entry["intent"]["anyOf"][0]["enum"][1] == "foreground_get"
    assert entry["min_size"]["anyOf"][1]["pattern"]
    assert entry["min_size"]["description"]


def test_the_json_schema_says_why_a_package_has_no_settings_in_it(packages: Packages) -> None:
    transports = json_schema(packages.registry)["properties"]["transports"]["properties"]
    assert "pyverbs" in transports["rdma"]["description"]
    assert transports["rdma"]["properties"]["enable"]

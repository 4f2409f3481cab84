"""`tent explain`: which transports would carry a request, in which order, and why others not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tent_core.cli import console
from tent_core.cli.options import SIZE, config_option, debug_option, json_option
from tent_core.types import Intent, Priority

if TYPE_CHECKING:
    from tent_core.config import Settings
    from tent_core.planning import Plan
    from tent_core.plugins import Registry
    from tent_core.policy import Selection, TransportFacts

ASSUMED = "a peer with the same transports, all of which start and offer both buffers"


@click.command("explain", short_help="Show which transport would carry a request, and why.")
@click.argument("sizes", nargs=-1, type=SIZE, metavar="[SIZE]...")
@config_option
@click.option(
    "--same-machine/--other-machine", default=True, show_default=True, help="Where the peer is."
)
@click.option(
    "--local-memory",
    default="cpu:0",
    show_default=True,
    help="Location here, such as cpu:0 or cuda:1.",
)
@click.option("--remote-memory", default="cpu:0", show_default=True, help="Location at the peer.")
@click.option(
    "--priority",
    type=click.Choice([p.name.lower() for p in Priority]),
    default="medium",
    show_default=True,
)
@click.option(
    "--intent",
    type=click.Choice([i.name.lower() for i in Intent]),
    default="unspec",
    show_default=True,
)
@click.option("--policy", metavar="ENTRY", help="The policy entry that the request names.")
@click.option(
    "--transport", metavar="NAME", help="The transport that the request hints at for its first try."
)
@json_option
@debug_option
def command(
    sizes: tuple[int, ...],
    config: Path | None,
    same_machine: bool,
    local_memory: str,
    remote_memory: str,
    priority: str,
    intent: str,
    policy: str | None,
    transport: str | None,
    as_json: bool,
) -> None:
    """Show which policy entry matches requests of each SIZE, and what follows.

    That is: which transports are candidates, in order, and why each other one is none. Without a
    SIZE, for every range of sizes in which the answer is the same. No engine is started and no
    peer asked: the peer is assumed to have the same transports as are installed here, and all of
    them to start and to offer both buffers.

    \b
    Examples:
      tent explain --config tent.yaml
      tent explain --config tent.yaml 4KiB 1MiB --other-machine
      tent explain 16MiB --local-memory cuda:0 --intent foreground_get --priority high

    \b
    With --json: {"assumed": text, "answers": [{"from", "below", "entry", "candidates", "passed_over",
    "route", "attempts", "attempt_timeout_s", "stall_s", "turns"}, ...]}, or "size" instead of "from" and
    "below" (bytes; below is null for no bound). "route" is null, or the transports that copy to host
    memory here and those that carry on from it. "turns" is null for what starts at once, or
    {"bytes", "tasks", "slice"}.
    """
    from tent_core import config as settings
    from tent_core import plugins
    from tent_core.batch import Options

    registry = plugins.discover()
    found = settings.load(config, registry)
    options = Options(
        None, Priority[priority.upper()], Intent[intent.upper()], _known(policy, found), transport
    )
    plan = _plan(found, registry, options, (local_memory, remote_memory), same_machine)
    turns = found.scheduling.turns(options.priority)
    rules = Rules(1 + found.failover.max_attempts, turns)
    answers = list(_by_size(plan, sizes) if sizes else _by_range(plan))
    if as_json:
        documents = [{**answer.as_json(), **rules.as_json(answer.selection)} for answer in answers]
        console.emit({"assumed": ASSUMED, "answers": documents})
        return
    for answer in answers:
        _show(answer, rules)
    console.note(f"(assumed: {ASSUMED})")


@dataclass(frozen=True)
class Rules:
    """What holds for a request beside its selection. `turns`: bytes and tasks under way when one starts, and
    the size of its parts; None for what never waits."""

    most_attempts: int
    turns: tuple[int, int, int] | None

    def attempts(self, chosen: Selection) -> int:
        """How many attempts are made at most."""
        return self.most_attempts if chosen.candidates else 0

    def as_json(self, chosen: Selection) -> dict[str, Any]:
        """As the command prints it."""
        entry = chosen.entry
        names = ("bytes", "tasks", "slice")
        return {
            "attempts": self.attempts(chosen),
            "attempt_timeout_s": entry.attempt_s if entry else None,
            "stall_s": entry.stall_s if entry else None,
            "turns": dict(zip(names, self.turns, strict=True)) if self.turns else None,
        }

    def lines(self, chosen: Selection) -> Iterator[str]:
        """The same for people; nothing for what is not limited."""
        from tent_core.units import format_size

        entry = chosen.entry
        if len(chosen.candidates) > self.attempts(chosen):
            yield f"at most {self.attempts(chosen)} of them are tried"
        if entry is not None and entry.attempt_s is not None:
            yield f"each may take {entry.attempt_s:g} s"
        if entry is not None and entry.stall_s is not None:
            yield f"each may go {entry.stall_s:g} s without moving a byte, if it says how many it has moved"
        if self.turns is not None:
            size, tasks, piece = self.turns
            yield (
                f"takes turns: starts when at most {format_size(size)} and {tasks} requests are under way "
                f"with it, in parts of {format_size(piece)}"
            )


@dataclass(frozen=True)
class Answer:
    """What is selected for one size, or for those from `start` on and below `stop` (None: all)."""

    selection: Selection
    size: int | None = None
    start: int = 1
    stop: int | None = None

    @property
    def title(self) -> str:
        """Which requests are meant."""
        from tent_core.units import format_size

        if self.size is not None:
            return f"requests of {format_size(self.size)}"
        if self.stop is None:
            return (
                "requests of any size"
                if self.start <= 1
                else f"requests from {format_size(self.start)} on"
            )
        low = "requests" if self.start <= 1 else f"requests from {format_size(self.start)} on and"
        return f"{low} below {format_size(self.stop)}"

    def as_json(self) -> dict[str, Any]:
        """As the command prints it."""
        chosen = self.selection
        where = (
            {"from": self.start, "below": self.stop} if self.size is None else {"size": self.size}
        )
        route = chosen.route
        return {
            **where,
            "entry": chosen.entry.name if chosen.entry else None,
            "candidates": list(chosen.candidates),
            "passed_over": [{"transport": p.name, "reason": p.reason} for p in chosen.passed_over],
            "route": None
            if route is None
            else {"copies": list(route.copies), "carriers": list(route.carriers)},
        }


def _known(policy: str | None, found: Settings) -> str | None:
    names = [entry.name for entry in found.policy]
    if policy is not None and policy not in names:
        raise click.UsageError(f"no policy entry is named {policy!r}; there are {', '.join(names)}")
    return policy


def _plan(
    found: Settings,
    registry: Registry,
    options: Any,
    memory: tuple[str, str],
    same_machine: bool,
) -> Plan:
    from tent_core.memory import check_location
    from tent_core.planning import Planner, trait_of

    local, remote = map(check_location, memory)
    known = _facts(found, registry)
    offers = {fact.name: fact.number for fact in known.values() if fact.available}
    return Planner(found.policy, known).plan(
        trait_of(local, offers),
        trait_of(remote, offers),
        options,
        same_machine=same_machine,
        same_process=False,
        unreachable={},
    )


def _facts(found: Settings, registry: Registry) -> Mapping[str, TransportFacts]:
    """What is known of each transport that the configuration or its policy names, before any has started."""
    names = {name for entry in found.policy for name in entry.transports} | set(found.transports)
    return {name: _fact(name, found, registry) for name in sorted(names)}


def _fact(name: str, found: Settings, registry: Registry) -> TransportFacts:
    from tent_core.config import Enable
    from tent_core.errors import PluginError
    from tent_core.policy import TransportFacts

    choice = found.transports.get(name)
    if choice is not None and choice.enable is Enable.FALSE:
        return TransportFacts(name, 0, False, "is disabled by transports in the configuration")
    try:
        declaration = registry.load(name).declaration
    except PluginError as error:
        return TransportFacts(name, 0, False, str(error))
    return TransportFacts(name, declaration.number, True, "", declaration.capabilities)


def _by_size(plan: Plan, sizes: tuple[int, ...]) -> Iterator[Answer]:
    for size in sizes:
        if size < 1:
            raise click.UsageError("a request has at least one byte")
        index = int(plan.edges.searchsorted(size, side="right")) - 1
        yield Answer(plan.selections[index], size=size)


def _by_range(plan: Plan) -> Iterator[Answer]:
    edges = plan.edges.tolist()
    for start, stop, selection in zip(edges, [*edges[1:], None], plan.selections, strict=True):
        yield Answer(selection, start=start, stop=stop)


def _show(answer: Answer, rules: Rules) -> None:
    chosen = answer.selection
    entry = f"entry {chosen.entry.name!r}" if chosen.entry else "no entry of the policy matches"
    console.say(f"{answer.title}: {entry}")
    for position, name in enumerate(chosen.candidates, 1):
        console.say(f"  {position}. {name}")
    if chosen.route is not None:
        console.say(f"  {chosen.route}")
    elif not chosen.candidates:
        console.say("  no candidate: such a request fails")
    for line in rules.lines(chosen):
        console.say(f"     {line}")
    for passed in chosen.passed_over:
        console.say(f"  -  {passed.name}: {passed.reason}")
    console.say()

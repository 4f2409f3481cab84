"""Results of `compare.py` as tables in Markdown, which people can read on a terminal as well."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from figures import Figure
from floors import COLUMNS, Column, peer
from results import FAST, IDLE, SLOW, Case, Result, Spread

NAMES = {"cma": "limit: process_vm_*", "tcp": "limit: tcp stream", "memmove": "limit: memcpy"}


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table whose columns are as wide as they need to be, numbers to the right."""
    body = list(rows)
    widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]
    lines = [head, ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])], *body]
    return "\n".join(
        "| " + " | ".join([line[0].ljust(widths[0]), *_right(line[1:], widths[1:])]) + " |"
        for line in lines
    )


def _right(cells: list[str], widths: list[int]) -> Iterator[str]:
    return (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def machine(result: Result) -> str:
    """Where it ran, and how often."""
    facts = ", ".join(f"{name} {value}" for name, value in result.machine.items())
    return f"{facts}; {result.rounds} rounds, {result.seconds:g} s for each case and process"


def times(result: Result, column: Column, state: str) -> str:
    """TENT's times, its peers', and both limits' where there are: medians, and lowest and highest."""
    others: list[tuple[str, str | None]] = []
    for name in (*column.peers, *column.beside, column.limit):
        kinds = result.kinds(name, state) if name.startswith("nixl") else []
        others += [(name, kind) for kind in kinds or [None]]
    others = [who for who in others if any(_of(result, who, c, state) for c in result.cases())]
    head = [f"microseconds, {state}", "TENT", *map(_title, others)]
    rows = []
    for case in result.cases():
        own = result.spread(column.tent, case, state)
        cells = [_spread(own), *(_spread(_of(result, who, case, state)) for who in others)]
        rows.append([f"{case.op} {case.what}", *cells])
    return table(head, rows)


def _of(result: Result, who: tuple[str, str | None], case: Case, state: str) -> Spread | None:
    return result.spread(who[0], case, state, who[1])


def _title(who: tuple[str, str | None]) -> str:
    name, kind = who
    return f"{NAMES.get(name, name)}{f', {kind}' if kind else ''}"


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"{_us(spread.median)} ({_us(spread.lowest)} to {_us(spread.highest)})"


def _us(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def ratios(result: Result, state: str) -> str:
    """Peer's time / TENT's, every row and column, beside the floors when idle; * is below its floor."""
    pairs = [(column, name) for column in COLUMNS for name in column.peers]
    head = [f"peer's time / TENT's, {state}", *(f"{c.title}, to {name}" for c, name in pairs)]
    rows = []
    for case in result.cases():
        cells = [_ratio(result, column, name, case, state) for column, name in pairs]
        rows.append([f"{case.op} {case.what}", *cells])
    return table(head, rows)


def _ratio(result: Result, column: Column, name: str, case: Case, state: str) -> str:
    own, other = result.spread(column.tent, case, state), peer(result, name, case, state)
    if own is None or other is None:
        return ""
    ratio = other.median / own.median
    floor = column.peers[name].get((case.block, case.batch))
    if floor is None or state != IDLE:
        return f"{ratio:.2f}"
    return f"{ratio:.2f}{'' if ratio >= floor else ' *'} (floor {floor:g})"


def over_limits(result: Result, state: str) -> str:
    """TENT's time over the limit of the machine, every row; * is a batch above its bound."""
    head = [f"TENT's time / the limit's, {state}"]
    head += [f"{column.title}, to {column.limit}" for column in COLUMNS]
    rows = []
    for case in result.cases():
        rows.append([f"{case.op} {case.what}"])
        for column in COLUMNS:
            own = result.spread(column.tent, case, state)
            limit = result.spread(column.limit, case, state)
            if own is None or limit is None:
                rows[-1].append("")
                continue
            ratio = own.median / limit.median
            bound = f" (at most {column.most_over:g})" if case.batch > 1 and state == IDLE else ""
            mark = " *" if bound and ratio > column.most_over else ""
            rows[-1].append(f"{ratio:.2f}{mark}{bound}")
    return table(head, rows)


def beside_idle(result: Result, column: Column) -> str:
    """Each state beside the others: the faster peer's time / TENT's in that state, and TENT's time in us."""
    head = [f"{column.title}: faster peer / TENT (us)", *result.states()]
    rows = []
    for case in result.cases():
        rows.append([f"{case.op} {case.what}"])
        for state in result.states():
            own = result.spread(column.tent, case, state)
            others = [peer(result, name, case, state) for name in column.peers]
            times = [other.median for other in others if other is not None]
            if own is None or not times:
                rows[-1].append("")
            else:
                rows[-1].append(f"{min(times) / own.median:.2f} ({_us(own.median)})")
    return table(head, rows)


def kinds(result: Result) -> Iterator[str]:
    """What is to be said of peers whose processes come in two kinds."""
    for state in result.states():
        for name in ("nixl", "nixl-prepped"):
            count = {kind: len(runs) for kind, runs in result.kinds(name, state).items()}
            if count:
                yield (
                    f"{name}, {state}: {count[FAST]} processes of a fast kind and {count[SLOW]} of a slow "
                    "one, told apart by 1,000 x 4 KiB; ratios are to the fast kind."
                )


def missed(figures: list[Figure]) -> str:
    """The figures that are not met, or that there is none."""
    wrong = [f"- {figure}" for figure in figures if not figure.met]
    return "\n".join([f"{len(figures) - len(wrong)} of {len(figures)} figures are met.", *wrong])


def document(result: Result, figures: list[Figure]) -> Iterator[str]:
    """Everything, as paragraphs."""
    yield machine(result)
    yield from kinds(result)
    for state in result.states():
        yield ratios(result, state)
        yield over_limits(result, state)
    if len(result.states()) > 1:
        yield from (beside_idle(result, column) for column in COLUMNS)
    yield missed(figures)
    for state in result.states():
        for column in COLUMNS:
            yield f"**{column.title}**"
            yield times(result, column, state)
    for name, reason in result.failed.items():
        yield f"{name} could not be measured: {reason}"

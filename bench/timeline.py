# SPDX-License-Identifier: Apache-2.0
"""Checks a soak's history, and shows it as one HTML file that needs nothing else.

    python -m bench.timeline HISTORY HTML

The exit status is 1 if a promise was broken. The page has rows over time, and the faults as bands.
A row for each endpoint shows when it was one, as far as the agent was seen to have applied it
(pale), and when it answered (dark); a row for each client its failures and broken promises.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

from bench import history
from bench.history import Applied, Endpoints, Fault, Open, Record, Request, Violation

WIDTH, LEFT, ROW, STEPS = 1000, 190, 18, 1000  # pixels; the time is divided into steps
LISTED = 5  # broken promises of a kind
STYLE = """
body { font: 14px sans-serif; margin: 2em; max-width: 1250px }
table { border-collapse: collapse } td { padding: 0 1em 0 0; vertical-align: top }
.row { fill: none; stroke: #ddd } .fault { fill: #fdebd0 } .is { fill: #aed6f1 }
.answered { fill: #1f618d } .excused { fill: #b9770e } .broken { fill: #c0392b }
.verdict { font-size: 1.3em } text { font: 12px sans-serif }
"""


class Scale:
    """Turns times into pixels."""

    def __init__(self, records: Iterable[Record]) -> None:
        times = [at for it in records for at in _times(it)]
        self.begun, self.ended = min(times, default=0.0), max(times, default=1.0)

    def step(self, at: float) -> int:
        share = (at - self.begun) / max(self.ended - self.begun, 1e-9)
        return round(share * STEPS)

    def x(self, step: float) -> float:
        return LEFT + step * WIDTH / STEPS


def page(records: Sequence[Record], violations: Sequence[Violation]) -> str:
    """Return the HTML."""
    scale = Scale(records)
    requests = [it for it in records if isinstance(it, Request)]
    rows = [*_endpoint_rows(records, requests, scale), *_client_rows(records, violations, scale)]
    height = ROW * (len(rows) + 2)
    faults = [it for it in records if isinstance(it, Fault)]
    shapes = [_row(number, name, parts, scale) for number, (name, parts) in enumerate(rows)]
    bands = [_band(it, height - ROW, scale) for it in faults]
    seconds = scale.ended - scale.begun
    verdict = f"{len(violations)} broken promises" if violations else "no promise was broken"
    svg = "\n".join([*bands, *shapes, *_axis(height, seconds, scale)])
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>ebpflb: a history of requests</title>
<style>{STYLE}</style></head><body>
<h1>Every request of a soak</h1>
<p class="verdict {"broken" if violations else ""}">{len(requests):,} requests in {seconds:.0f} s,
{len(faults)} faults: {verdict}.</p>
<p>Orange: a fault (its name is shown under the mouse). Pale blue: an endpoint of the Service; dark
blue: it answered. Brown: requests failed. Red: they broke a promise.</p>
<svg width="{LEFT + WIDTH + 20}" height="{height}">
{svg}
</svg>
<h2>Faults</h2><table>{_counted(it.what for it in faults)}</table>
<h2>Broken promises</h2><table>{_counted(it.kind for it in violations)}</table>
<table>{"".join(_first(violations, scale))}</table>
</body></html>
"""


def _times(record: Record) -> tuple[float, ...]:
    match record:
        case Endpoints() | Applied():
            return (record.at,)
        case Fault():
            return record.at, record.until
        case _:
            return record.begun, record.ended


Row = tuple[str, list[tuple[str, set[int]]]]  # its name, and the steps of each class


def _endpoint_rows(
    records: Sequence[Record], requests: Iterable[Request], scale: Scale
) -> Iterator[Row]:
    answered: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for request in requests:
        if request.endpoint:
            answered[request.service, request.endpoint].add(scale.step(request.ended))
    served = _served(records, scale)
    for name in sorted({*answered, *served}):
        yield f"{name[0]}: {name[1]}", [("is", served[name]), ("answered", answered[name])]


def _served(records: Sequence[Record], scale: Scale) -> defaultdict[tuple[str, str], set[int]]:
    """Return the periods in which each was an endpoint, as the agent was seen to apply it."""
    written: defaultdict[str, list[Endpoints]] = defaultdict(list)
    applied = sorted((it for it in records if isinstance(it, Applied)), key=lambda it: it.at)
    for it in records:
        if isinstance(it, Endpoints):
            written[it.service].append(it)
    found: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    ends = [*(it.at for it in applied[1:]), scale.ended]
    for seen, end in zip(applied, ends, strict=True):
        steps = range(scale.step(seen.at), scale.step(end) + 1)
        for service, changes in written.items():
            last = max(
                (it for it in changes if it.version <= seen.version),
                key=lambda it: it.version, default=None,
            )  # fmt: skip
            for name in last.names if last else ():
                found[service, name].update(steps)
    return found


def _client_rows(
    records: Sequence[Record], violations: Iterable[Violation], scale: Scale
) -> Iterator[Row]:
    broken, excused = defaultdict[str, set[int]](set), defaultdict[str, set[int]](set)
    for it in violations:
        broken[it.client].add(scale.step(it.at))
    clients = {it.client: None for it in records if isinstance(it, Request | Open)}
    for record in records:
        if isinstance(record, Request) and record.error:
            excused[record.client].add(scale.step(record.ended))
    for name in dict.fromkeys([*sorted(clients), *broken]):
        yield name, [("excused", excused[name]), ("broken", broken[name])]


def _row(number: int, name: str, parts: Iterable[tuple[str, set[int]]], scale: Scale) -> str:
    y, height = number * ROW, ROW - 3
    shapes = [f'<rect class="row" x="{LEFT}" y="{y}" width="{WIDTH}" height="{height}"/>']
    for kind, steps in parts:
        inset = 0 if kind in ("is", "broken") else 4
        path = "".join(
            f"M{scale.x(first):g} {y + inset}h{scale.x(last + 1) - scale.x(first):g}"
            f"v{height - 2 * inset}H{scale.x(first):g}z"
            for first, last in _runs(steps)
        )
        shapes.append(f'<path class="{kind}" d="{path}"/>')
    label = f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>'
    return "".join([label, *shapes])


def _runs(steps: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last step of each run of neighbours."""
    ordered = sorted(steps)
    if not ordered:
        return
    gaps = [(a, b) for a, b in pairwise(ordered) if b > a + 1]
    firsts, lasts = [ordered[0], *(b for _, b in gaps)], [*(a for a, _ in gaps), ordered[-1]]
    yield from zip(firsts, lasts, strict=True)


def _band(fault: Fault, height: int, scale: Scale) -> str:
    x = scale.x(scale.step(fault.at))
    width = max(scale.x(scale.step(fault.until)) - x, 2)
    said = f"{fault.at - scale.begun:.2f} s, for {fault.until - fault.at:.2f} s: {fault.what}"
    return (
        f'<rect class="fault" x="{x:g}" y="0" width="{width:g}" height="{height}">'
        f"<title>{escape(said)}</title></rect>"
    )


def _axis(height: int, seconds: float, scale: Scale) -> Iterator[str]:
    for part in range(11):
        x = scale.x(part * STEPS / 10)
        place = f'x="{x:g}" y="{height - 6}" text-anchor="middle"'
        yield f"<text {place}>{part * seconds / 10:.0f} s</text>"


def _first(violations: Sequence[Violation], scale: Scale) -> Iterator[str]:
    for kind in dict.fromkeys(it.kind for it in violations):
        for it in [it for it in violations if it.kind == kind][:LISTED]:
            yield _cells(f"{it.at - scale.begun:.3f} s", *it[1:])


def _counted(names: Iterable[str]) -> str:
    return "".join(_cells(f"{count}", name) for name, count in Counter(names).most_common())


def _cells(*words: str) -> str:
    return f"<tr>{''.join(f'<td>{escape(word)}</td>' for word in words)}</tr>\n"


def main() -> None:
    file, html = map(Path, sys.argv[1:])
    records = history.read(file)
    found = history.check(records)
    html.write_text(page(records, found))
    for each in found:
        print(f"{each.at:.3f} {each.client}: {each.kind}: {each.text}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Whether a PromQL expression is well-formed, and uses only existing metrics and labels.

The grammar is promql-parser's, which checks types and functions too.
"""

from collections.abc import Iterator, Mapping, Set
from typing import Any

import promql_parser as promql

Labels = Mapping[str, Set[str]]
"""Series name -> its labels."""

TARGET = frozenset({"instance", "job"})  # what Prometheus adds


def parse(text: str) -> promql.Expr:
    """Parse the expression. Raises ValueError. Grafana's variables are replaced as Grafana replaces
    them.
    """
    text = text.replace("$__rate_interval", "5m")
    return promql.parse(text.replace("$node", ".*").replace("$job", ".*"))


def labels(expr: Any, known: Labels) -> frozenset[str]:
    """Return the labels of the answer. Raises ValueError for an unknown series or label."""
    match expr:
        case promql.VectorSelector():
            return _of_series(expr, known)
        case promql.MatrixSelector():
            return labels(expr.vector_selector, known)
        case promql.AggregateExpr():
            return _of_aggregate(expr, known)
        case promql.Call():
            return _of_call(expr, known)
        case promql.BinaryExpr():
            return _of_both(expr, known)
        case promql.ParenExpr() | promql.SubqueryExpr() | promql.UnaryExpr():
            return labels(expr.expr, known)
    return frozenset()


def series(expr: Any) -> Iterator[str]:
    """Yield the names of the metrics in the expression."""
    if isinstance(expr, promql.VectorSelector) and expr.name:
        yield expr.name
    parts = [getattr(expr, part, None) for part in ("expr", "lhs", "rhs", "vector_selector")]
    for part in (*parts, *(expr.args if isinstance(expr, promql.Call) else ())):
        if part is not None:
            yield from series(part)


def _of_series(selector: Any, known: Labels) -> frozenset[str]:
    if selector.name not in known:
        raise ValueError(f"no such metric: {selector.name}")
    found = TARGET | known[selector.name]
    _only(frozenset(matcher.name for matcher in selector.matchers.matchers), found, selector)
    return found


def _of_aggregate(expr: Any, known: Labels) -> frozenset[str]:
    inner = labels(expr.expr, known)
    if expr.modifier is None:
        return inner if str(expr.op) in ("topk", "bottomk") else frozenset()
    named = _only(frozenset(expr.modifier.labels), inner, expr)
    return named if expr.modifier.type == promql.AggModifierType.By else inner - named


def _of_call(call: Any, known: Labels) -> frozenset[str]:
    found = frozenset[str]().union(*(labels(each, known) for each in call.args))
    if call.func.name == "histogram_quantile":
        return found - _only(frozenset({"le"}), found, call)
    return frozenset() if call.func.name == "absent" else found


def _of_both(expr: Any, known: Labels) -> frozenset[str]:
    left, right = labels(expr.lhs, known), labels(expr.rhs, known)
    matching = getattr(expr.modifier, "matching", None)
    if matching is not None:
        _only(frozenset(matching.labels), left & right, expr)
    return left | right if str(expr.op) == "or" else left or right


def _only(asked: frozenset[str], there: Set[str], expr: Any) -> frozenset[str]:
    if asked - there:
        raise ValueError(f"no such label: {', '.join(sorted(asked - there))} in {expr.prettify()}")
    return asked

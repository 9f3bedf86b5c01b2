"""What one metric is: its kind, name, help text, and how it is read from the row that has its value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Row = TypeVar("Row")
Value = float | Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ExportedFigure(Generic[Row]):
    kind: type[GaugeMetricFamily | CounterMetricFamily]
    name: str  # without the prefix; Prometheus puts _total behind a counter's
    text: str
    value: Callable[[Row], Value]
    split_by: tuple[str, ...] = ()  # the label whose values are the keys of `value`, when that is a mapping


def gauge(name: str, text: str, value: Callable[[Row], Value], *split_by: str) -> ExportedFigure[Row]:
    return ExportedFigure(GaugeMetricFamily, name, text, value, split_by)


def counter(name: str, text: str, value: Callable[[Row], Value], *split_by: str) -> ExportedFigure[Row]:
    return ExportedFigure(CounterMetricFamily, name, text, value, split_by)


def metrics(
    prefix: str, figures: Sequence[ExportedFigure[Row]], names: Sequence[str], rows: Mapping[tuple[str, ...], Row]
) -> Iterator[Metric]:
    """A metric for each figure, with a sample for each row. `names` are labels, and the keys of `rows` their values."""
    for figure in figures:
        family = figure.kind(prefix + figure.name, figure.text, labels=[*names, *figure.split_by])
        for labels, row in rows.items():
            value = figure.value(row)
            for part, number in value.items() if isinstance(value, Mapping) else ((None, value),):
                family.add_metric([*labels, *([] if part is None else [part])], number)
        yield family

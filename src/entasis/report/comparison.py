"""The report of a comparison: one HTML file that needs nothing else, written from the results that a study left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from entasis.errors import EntasisError
from entasis.report import numbers
from entasis.report.experts import ExpertMap, expert_map
from entasis.report.figures import difference_figure, forest_figure, learning_rate_figure, loss_figure
from entasis.report.ink import Pen
from entasis.report.page import flat_record, render_page, write_page
from entasis.report.schema import COMPARISON_FORMAT, Comparison, ShapeResult
from entasis.report.series import Series
from entasis.report.silhouette import VIEW_WIDTH, Silhouette, silhouettes
from entasis.report.wording import budget_fields, facts, loss_name, scope, verdict, within
from entasis.shape.match import MATCH_FIELDS
from entasis.shape.records import Shape

_LONGEST_SAMPLE = 4000


def write_report(results: Comparison, path: Path) -> None:
    """Write the report of `results` to `path`; equal results give equal bytes, and `path` is whole or untouched.

    Raises:
        EntasisError: the results have another format or lack runs, or the file cannot be written.
    """
    write_page(render_report(results), path)


def render_report(results: Comparison) -> str:
    """The report as HTML text.

    Raises:
        EntasisError: the results have another format or lack runs.
    """
    _check(results)
    return render_page("comparison.html", _context(results))


@dataclass(frozen=True, slots=True)
class _Entry:
    """One shape, as the template uses it."""

    series: Series
    silhouette: Silhouette
    sample: str | None
    experts: ExpertMap | None
    """None: no layer has experts."""

    @property
    def name(self) -> str:
        return self.series.name

    @property
    def result(self) -> ShapeResult:
        return self.series.result

    @property
    def colour(self) -> str:
        return self.series.pen.variable

    @property
    def dashes(self) -> str:
        return " ".join(f"{1.8 * length:g}" for length in self.series.pen.dashes)


def _context(results: Comparison) -> dict[str, Any]:
    reference_name = results["reference"]
    names = [reference_name, *(name for name in results["shapes"] if name != reference_name)]
    shapes = [Series(name, Pen(index), results["shapes"][name]) for index, name in enumerate(names)]
    drawings = silhouettes([Shape.from_dict(series.result["shape"]) for series in shapes])
    entries = [
        _Entry(
            series,
            drawing,
            None if (sample := series.result["sample"]) is None else _bounded(sample),
            expert_map(series.result["runs"]),
        )
        for series, drawing in zip(shapes, drawings, strict=True)
    ]
    reference, others, steps = shapes[0], shapes[1:], results["steps"]
    means = [series.result["mean_bits_per_byte"] for series in shapes]
    bits = [value for value in means if value is not None]
    longest_bar = max([results["data"]["unigram_bits_per_byte"] or 0.0, *bits])
    unit = numbers.loss_unit(results["mask_share"])
    tuned = any(series.result["tuning"] for series in shapes)
    rates = {series.result["learning_rate"] for series in shapes}
    return {
        "results": results,
        "entries": entries,
        "reference": entries[0],
        "others": entries[1:],
        "facts": facts(results),
        "scope": scope(results),
        "budget_fields": budget_fields(results),
        "loss_name": loss_name(results),
        "unit": unit,
        "bits": bits,
        "match_field": MATCH_FIELDS.get(results["match_by"], results["match_by"]),
        "verdict": verdict,
        "within": within,
        "number": numbers,
        "view_width": VIEW_WIDTH,
        "learning_rate_figure": learning_rate_figure(shapes, unit) if tuned else None,
        "shared_rate": rates.pop() if len(rates) == 1 else None,
        "loss_figure": loss_figure(shapes, steps, unit),
        "difference_figure": difference_figure(others, reference, steps, unit) if others else None,
        "forest_figure": forest_figure(others, unit) if others else None,
        "bar": lambda value: 100 * value / longest_bar,
        "seeds_differ": len(results["seeds"]) > 1,
        "rises_again": any(series.result["mean_best_step"] < steps for series in shapes),
        "prompt": _bounded(results["sample_prompt"]),
        "config_yaml": yaml.safe_dump(results["config"], sort_keys=False, allow_unicode=True),
        "environment": list(flat_record(results["environment"])),
    }


def _check(results: Comparison) -> None:
    if results.get("format") != COMPARISON_FORMAT:
        raise EntasisError(
            f"results: format {results.get('format')!r} is not {COMPARISON_FORMAT!r}; "
            "write the report with the version of entasis that ran the study"
        )
    if results["reference"] not in results["shapes"]:
        raise EntasisError(f"results: the reference {results['reference']!r} is not among the shapes")
    for name, shape in results["shapes"].items():
        steps = [{point["step"] for point in run["curve"]} for run in shape["runs"]]
        if not steps or not set.intersection(*steps):
            raise EntasisError(
                f"results: shape {name!r} has no evaluation that all its runs share; finish the study first"
            )


def _bounded(text: str) -> str:
    return text if len(text) <= _LONGEST_SAMPLE else f"{text[:_LONGEST_SAMPLE]} …"

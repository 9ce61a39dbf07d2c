"""What a comparison is, and is not, in plain words. Only what the results say; nothing is computed here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from entasis.report.numbers import count, percent, ratio, significant
from entasis.report.schema import Comparison, Difference, ShapeResult
from entasis.shape.match import MATCH_FIELDS

BUDGET_FIELDS = {
    "parameters": ("stored parameters", "everything included"),
    "effective_parameters": ("effective parameters", "matrices that can act, as the papers count"),
    "embedding_parameters": ("embedding parameters", "embedding, head and positions; part of the stored ones"),
    "flops_per_token": ("FLOPs per token", "forward, as executed"),
    "effective_flops_per_token": ("effective FLOPs per token", "forward, as the papers count"),
    "kv_cache_bytes_per_token": ("KV cache per token", "bfloat16, all layers"),
    "decode_bytes_per_token": ("bytes read per decoded token", "weights and cache at full context, batch 1"),
}
"""Name in running text, and what it counts."""
_OF_DECODING = {"kv_cache_bytes_per_token", "decode_bytes_per_token"}
"""Fields that mean nothing for an encoder, which decodes nothing."""
_LEADS = ("lower loss", "higher loss", "no difference shown", "identical", "one seed")


@dataclass(frozen=True, slots=True)
class Statement:
    """One point: a few words that carry it, then the rest."""

    lead: str
    text: str


def budget_fields(results: Comparison) -> dict[str, tuple[str, str]]:
    """The budgets that mean something for the study's models."""
    masked = results["mask_share"] is not None
    return {field: text for field, text in BUDGET_FIELDS.items() if not (masked and field in _OF_DECODING)}


def loss_name(results: Comparison) -> str:
    """What the held-out loss is called in running text."""
    return "held-out loss" if results["mask_share"] is None else "held-out masked-token loss"


def verdict(difference: Difference) -> Statement:
    """The verdict's sentence, with the words that carry it apart."""
    lead, colon, rest = difference["sentence"].partition(": ")
    if colon and lead.lower() in _LEADS:
        return Statement(f"{lead}:", rest)
    return Statement("", difference["sentence"])


def within(value: float | None, tolerance: float) -> bool:
    """Whether a ratio counts as equal to the reference."""
    return value is not None and abs(value - 1) <= tolerance + 1e-12


def scope(results: Comparison) -> list[Statement]:
    """What the comparison can and cannot say, most important first."""
    shapes, others = results["shapes"], _others(results)
    statements = [_quality(results), *_objective(results)]
    if others:
        statements += [_rates(results), _budgets(results)]
    if unequal := results["unequal"]:
        text = (
            f"{_listed(unequal)} {_verb(unequal)} more than {percent(results['match_tolerance'])} off the reference; "
            "a difference in loss may come from the difference in size."
        )
        statements.append(Statement("Outside the tolerance.", text))
    own = {name: shape["model"] for name, shape in shapes.items() if shape["model"]}
    if own:
        text = "; ".join(f"{name}: {_settings(model)}" for name, model in own.items())
        statements.append(Statement("The shapes differ in more than their layers.", f"{text}."))
    statements.append(_seeds(results))
    if len(results["seeds"]) > 1 and others:
        text = (
            "The intervals cover chance in initialisation and data order, as far as these seeds show it; not the "
            "choice of data, tokenizer or held-out text."
        )
        if (intervals := len(others) + len(results["contrasts"])) > 1:
            text += f" The {intervals} intervals are not corrected for multiple comparisons."
        statements.append(Statement("What the intervals cover.", text))
    text = (
        f"One data set ({results['data']['name']}), one model size, {results['steps']:,} steps, "
        f"{significant(results['epochs'], 3)} passes over the training text. Larger models, longer training and "
        "downstream tasks are not part of it."
    )
    statements.append(Statement("One setting.", text))
    warned = [name for name, shape in shapes.items() if shape["warnings"]]
    if warned:
        statements.append(Statement("Warnings.", f"The shape rules warn about {_listed(warned)}; see Shapes below."))
    return statements


def _quality(results: Comparison) -> Statement:
    values = [shape["tokens_per_parameter"] for shape in results["shapes"].values()]
    low, high = significant(min(values), 3), significant(max(values), 3)
    seen = f"Each run sees {low if low == high else f'{low} to {high}'} training tokens per non-embedding parameter"
    if results["exploratory"]:
        return Statement(
            "A comparison of early learning speed, not of quality.",
            f"{seen}. Below about 20 the order of shapes can still change with more training.",
        )
    return Statement("Trained to at least 20 tokens per parameter.", f"{seen}.")


def _objective(results: Comparison) -> list[Statement]:
    if (share := results["mask_share"]) is None:
        return [] if results["data"]["tokenizer"] else [_tokens_only()]
    text = (
        f"These are encoders: {percent(share)} of the tokens are masked and predicted from those left, before and "
        "after, and a step learns from those alone. The held-out masks are the same for every shape, seed and "
        "evaluation. The loss is the mean over masked tokens and no probability of the text: there is no figure in "
        "bits per byte and no text sample, and it says nothing beside the loss of a model that predicts the next token."
    )
    return [Statement("Masked-token loss.", text)]


def _tokens_only() -> Statement:
    text = (
        "The data came as tokens of another program, without their tokenizer and their text. Losses are per token: "
        "there is no figure in bits per byte and no text sample, and no loss of another tokenizer can stand beside "
        "these."
    )
    return Statement("Losses per token only.", text)


def _rates(results: Comparison) -> Statement:
    shapes = results["shapes"]
    tuned = [name for name, shape in shapes.items() if shape["tuning"]]
    edge = [name for name in tuned if shapes[name]["tuned_at_edge"]]
    if len(tuned) == len(shapes):
        seed = "" if results["tune_seed"] is None else f", found with seed {results['tune_seed']}, which no test uses"
        text = f"Every shape is trained at its own best learning rate of those tried{seed}."
        if edge:
            text += f" The best rate of {_listed(edge)} is at the edge of those tried: the optimum may lie outside."
        return Statement("Learning rates are tuned per shape.", text)
    if tuned:
        text = f"Only {_listed(tuned)} {_verb(tuned)} trained at a tuned rate; the others keep the configured one."
        return Statement("Learning rates are tuned for some shapes only.", text)
    if len({shape["learning_rate"] for shape in shapes.values()}) == 1:
        text = "All shapes are trained at the same rate. It may suit one shape better than another."
        return Statement("One shared learning rate, not tuned per shape.", text)
    return Statement("Learning rates are set by hand.", "They differ between shapes and are not tuned.")


def _budgets(results: Comparison) -> Statement:
    matched = MATCH_FIELDS.get(results["match_by"], results["match_by"])
    others, tolerance = _others(results), results["match_tolerance"]
    fields = [field for field in budget_fields(results) if any(field in shape["ratio"] for shape in others.values())]
    equal = [f for f in fields if all(within(shape["ratio"].get(f), tolerance) for shape in others.values())]
    also = [BUDGET_FIELDS[field][0] for field in equal if field != matched]
    text = f"Within {percent(tolerance)} of the reference"
    text += f", except {_listed(results['unequal'])}." if results["unequal"] else "."
    if also:
        text += f" Within {percent(tolerance)} as well: {', '.join(also)}."
    different = [_spread(field, others) for field in fields if field not in equal and field != matched]
    if different:
        text += f" Further off (ratio to the reference): {'; '.join(different)}."
    return Statement(f"Matched by {BUDGET_FIELDS[matched][0] if matched in BUDGET_FIELDS else matched}.", text)


def _spread(field: str, others: dict[str, ShapeResult]) -> str:
    values = [value for shape in others.values() if (value := shape["ratio"].get(field)) is not None]
    if not values:
        return BUDGET_FIELDS[field][0]
    low, high = ratio(min(values)), ratio(max(values))
    return f"{BUDGET_FIELDS[field][0]} {low if low == high else f'{low} to {high}'}"


def _seeds(results: Comparison) -> Statement:
    seeds = results["seeds"]
    if len(seeds) == 1:
        return Statement(
            f"One seed ({seeds[0]}).", "Without a second one nothing is known of chance, and no difference is shown."
        )
    if len(results["shapes"]) == 1:
        return Statement(
            f"{len(seeds)} seeds ({', '.join(map(str, seeds))}).", "Each drives initialisation and data order."
        )
    return Statement(
        f"{len(seeds)} paired seeds ({', '.join(map(str, seeds))}).",
        "With the same seed every shape sees the same batches in the same order; differences are taken seed by seed.",
    )


def facts(results: Comparison) -> list[tuple[str, str]]:
    """The frame of the study as short label and value."""
    data, share = results["data"], results["mask_share"]
    return [
        ("Data", f"{data['name']}, {count(data['train_tokens'])} training tokens"),
        ("Tokenizer", f"{data['tokenizer'] or 'not known'}, {data['vocab_size']:,} entries"),
        ("Objective", "next token" if share is None else f"masked tokens, {percent(share)}"),
        ("Training", f"{results['steps']:,} steps of {results['batch_tokens']:,} tokens"),
        ("Per run", f"{count(results['train_tokens_per_run'])} tokens, {significant(results['epochs'], 3)} epochs"),
        ("Seeds", ", ".join(map(str, results["seeds"]))),
    ]


def _others(results: Comparison) -> dict[str, ShapeResult]:
    return {name: shape for name, shape in results["shapes"].items() if name != results["reference"]}


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _verb(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"

"""What a run showed, in numbers that may be published: no question, passage, answer or prompt. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import PureWindowsPath
from typing import Any

import warmprefix
from warmprefix_tools.quality.arms import SYSTEM, arm_number
from warmprefix_tools.quality.data_sets import DATA_SETS
from warmprefix_tools.quality.made_up import MADE_UP
from warmprefix_tools.quality.paired import Comparison
from warmprefix_tools.quality.questions import EvidenceQuestion
from warmprefix_tools.quality.results import ArmResult, QualityResults, verdict
from warmprefix_tools.quality.scores import MEASURES

__all__ = ["published"]

_FORMAT = 1
_OWN = "own"
_NAMES = ("model", "root")
"""What of an engine names files or machines."""
_DIGITS = 4


def published(results: QualityResults, questions: Sequence[EvidenceQuestion], day: date) -> dict[str, Any]:
    """Return a run's settings and the results of each arm.

    The names of files, functions and prompts of the user's are left out, and so are the arms that they make.
    """
    settings = results.settings
    data = str(settings["data"])
    fields: dict[str, Any] = {
        "format": _FORMAT,
        "model": _name(str(settings["model"])),
        "set": data if data in DATA_SETS or data.split(":")[0] == MADE_UP else _OWN,
        "questions": results.questions,
        "passages": max([len(question.passages) for question in questions], default=0),
        "chance": None if results.chance is None else round(results.chance, _DIGITS),
        "system": "default" if settings.get("system") == SYSTEM else _OWN,
        **{name: settings.get(name) for name in ("choose", "max_tokens", "repeats")},
        "measure": results.measure if ":" not in results.measure else _OWN,
        "margin": results.margin,
        "stops": results.stops,
        "annotate": results.annotate,
        "engine": {name: value for name, value in settings.get("engine", {}).items() if name not in _NAMES},
        "warmprefix": warmprefix.__version__,
        "date": day.isoformat(),
        "arms": [_arm(arm, results) for arm in results.arms if ":" not in arm.arm + arm.baseline],
    }
    moved = {place: arm for arm in results.arms if (place := arm_number(arm.arm, "gold"))}
    if results.positions and len(moved) == max(moved):
        fields["positions"] = {
            "passages": len(moved),
            "right": [round(results.positions[place], _DIGITS) for place in sorted(moved)],
            "questions": [moved[place].answers for place in sorted(moved)],
        }
    return fields


def _name(model: str) -> str:
    """Return the name of a model; of a path, as engines call a model in a folder, only its end."""
    path = PureWindowsPath(model)  # splits at both kinds of slashes
    return path.name if path.root or path.drive or model[:1] in (".", "~") else model


def _arm(arm: ArmResult, results: QualityResults) -> dict[str, Any]:
    compared, repeats = arm.comparison, results.settings.get("repeats") or 1
    return {
        "arm": arm.arm,
        "baseline": arm.baseline,
        "questions": arm.answers if compared is None else compared.pairs,
        "failed": arm.failed,
        "truncated": arm.truncated,
        "changed": arm.changed,
        "other_evidence": arm.other_evidence,
        "scores": {name: round(value, _DIGITS) for name, value in arm.scores._asdict().items()},
        "verdict": verdict(arm, results.margin),
        "flips": None if compared is None else round((compared.wins + compared.losses) / compared.pairs, _DIGITS),
        "comparisons": {name: dict(_compared(arm.comparisons[name])) for name in MEASURES if name in arm.comparisons},
        "tokens_per_prompt": round(arm.prompt_tokens / max(1, arm.answers + arm.failed) / repeats, 1),
        "prompt_tokens": arm.prompt_tokens,
        "cached_tokens": arm.cached_tokens,
        "saved": None if arm.saved is None else round(arm.saved, _DIGITS),
    }


def _compared(found: Comparison) -> Iterator[tuple[str, float]]:
    yield from (("pairs", found.pairs), ("wins", found.wins), ("losses", found.losses))
    for name in ("difference", "low", "high", "worst", "p_value"):
        yield name, round(getattr(found, name), _DIGITS)

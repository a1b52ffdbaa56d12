"""Names that stand for versions of a model, and what has come of each version (cluster/canary.py judges).

The first version is the stable one; each other is a canary, with a judge of its own. A canary that is found worse gets
weight 0 and stays listed with the reason; calls that it works on go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ...cluster.canary import SIGNS, CanaryJudge, Rules, Sample, Verdict, Version, choose
from ...core.errors import InvalidRequest
from ...core.slo import Targets
from ..audit.log import AuditLog
from .registry import ModelRegistry

MAX_VERSIONS = 8
NO_TARGETS = Targets()
SERVING, ROLLED_BACK = "serving", "rolled_back"
_log = logging.getLogger(__name__)


class Canary:
    """One name. targets: a call that keeps to them attains its objectives; zeros: they are not looked at. counts: of
    answers by version, (those that were good, those that were errors). verdicts: why versions were taken back."""

    def __init__(
        self, name: str, versions: Sequence[Version], *, seed: int = 0, targets: Targets = NO_TARGETS, rules: Rules
    ) -> None:
        self.name = name
        self.versions = list(versions)
        self.seed = seed
        self.targets = targets
        self.rules = rules
        self.counts = {version.model: [0, 0] for version in versions}
        self.judges = {version.model: CanaryJudge(rules) for version in versions[1:]}
        self.verdicts: dict[str, Verdict] = {}

    @property
    def stable(self) -> str:
        return self.versions[0].model

    def choose(self, session: str) -> str:
        """The model for calls of this session."""
        return choose(self.name, self.versions, session, self.seed)

    def note(self, model: str, sample: Sample) -> Verdict | None:
        """What came of a call of a version; the verdict by which it is taken back now."""
        self.counts[model][sample.is_error] += 1
        if model == self.stable:
            for judge in self.judges.values():
                judge.note(sample, is_canary=False)
            return None
        verdict = self.judges[model].note(sample, is_canary=True)
        if verdict is None or model in self.verdicts:
            return None
        self.verdicts[model] = verdict
        self.versions = [each._replace(weight=0.0) if each.model == model else each for each in self.versions]
        return verdict

    def shown(self) -> dict[str, Any]:
        """For /admin/canaries."""
        targets = self.targets
        return {
            "name": self.name,
            "seed": self.seed,
            "ttft_ms": round(1000 * targets.ttft_s, 1) if targets.ttft_s else None,
            "tpot_ms": round(1000 * targets.tpot_s, 1) if targets.tpot_s else None,
            "tolerance": self.rules.tolerance,
            "alpha": self.rules.alpha,
            "min_samples": self.rules.min_samples,
            "versions": [self._shown_version(version) for version in self.versions],
        }

    def _shown_version(self, version: Version) -> dict[str, Any]:
        good, errors = self.counts[version.model]
        shown: dict[str, Any] = {
            "model": version.model,
            "weight": version.weight,
            "role": "stable" if version.model == self.stable else "canary",
            "state": ROLLED_BACK if version.model in self.verdicts else SERVING,
            "num_calls": good + errors,
            "num_errors": errors,
        }
        judge = self.judges.get(version.model)
        if judge is not None:
            shown["evidence"] = {sign: float(f"{judge.tests[sign].evidence:.4g}") for sign in SIGNS}
            shown["evidence_needed"] = len(SIGNS) / self.rules.alpha
            verdict = self.verdicts.get(version.model)
            shown["why"] = None if verdict is None else reason(verdict)
        return shown


class Canaries:
    """Those of one front end. on_rollback: told of each. targets: what the server wants of its calls, where a canary
    names none."""

    def __init__(self, models: ModelRegistry, audit: AuditLog | None, targets: Callable[[], Targets]) -> None:
        self.num_rollbacks: dict[tuple[str, str], int] = {}
        self._models = models
        self._audit = audit
        self._targets = targets
        self._all: dict[str, Canary] = {}

    @property
    def all(self) -> list[Canary]:
        return list(self._all.values())

    def find(self, name: str | None) -> Canary | None:
        return None if name is None else self._all.get(name)

    def put(
        self,
        name: str,
        versions: Sequence[Version],
        *,
        seed: int = 0,
        targets: Targets = NO_TARGETS,
        rules: Rules | None = None,
    ) -> Canary:
        """A new one, or in the place of one of that name, of which nothing is kept then. Raises InvalidRequest."""
        if name not in self._all:
            self._models.check_new(name)
        models = [version.model for version in versions]
        if not 2 <= len(models) <= MAX_VERSIONS or len(set(models)) != len(models):
            raise InvalidRequest(f"A canary needs 2 to {MAX_VERSIONS} different versions.", param="versions")
        for model in models:
            if model not in (*self._models.home, *self._models.models, *self._models.unloaded()):
                raise InvalidRequest(f"There is no model {model[:200]!r} here.", param="versions")
        if any(not 0 <= version.weight <= 1e6 for version in versions) or not versions[0].weight > 0:
            raise InvalidRequest("Weights must be 0 to 1,000,000, the first above 0.", param="versions")
        canary = Canary(name, versions, seed=seed, targets=targets, rules=rules or Rules())
        self._all[name] = canary
        self._models.aliases[name] = tuple(models)
        self._models.expected.discard(name)
        return canary

    def remove(self, name: str) -> Canary | None:
        self._models.aliases.pop(name, None)
        return self._all.pop(name, None)

    def note(self, canary: Canary, model: str, is_error: bool, ttft_s: float | None, tpot_s: float | None) -> None:
        """What came of a call."""
        targets = canary.targets if any(canary.targets) else self._targets()
        meets = None
        if is_error:
            meets = None if not any(targets) else False
        elif any(targets) and ttft_s is not None:
            is_late = 0 < targets.ttft_s < ttft_s or (tpot_s is not None and 0 < targets.tpot_s < tpot_s)
            meets = not is_late
        verdict = canary.note(model, Sample(is_error, meets, ttft_s, tpot_s))
        if verdict is None:
            return
        key = (canary.name, model)
        self.num_rollbacks[key] = self.num_rollbacks.get(key, 0) + 1
        _log.warning("The canary %s of %s is taken back: %s", model, canary.name, reason(verdict))
        if self._audit is not None:
            entry = {
                "actor": {"tenant": "", "client": "server"},
                "action": "canary.rollback",
                "object": canary.name,
                "outcome": model,
                "why": reason(verdict),
            }
            self._audit.note(entry)


_WORDS = {
    "errors": "errors",
    "targets": "calls that missed their targets",
    "ttft": "first tokens later than the stable version's median",
    "tpot": "tokens slower than the stable version's median",
}


def reason(verdict: Verdict) -> str:
    return (
        f"{verdict.canary:.1%} {_WORDS[verdict.sign]}, against {verdict.stable:.1%}, "
        f"after {verdict.num_canary} calls (evidence {verdict.evidence:.3g})"
    )


_LABELS = ("model_name", "version")


class CanaryMetrics:
    """A collector."""

    def __init__(self, canaries: Canaries) -> None:
        self._canaries = canaries

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        weights = GaugeMetricFamily("tokenmill:canary_weight", "Weight of a version", labels=_LABELS)
        calls = CounterMetricFamily("tokenmill:canary_calls", "Answers of a version", labels=(*_LABELS, "outcome"))
        evidence = GaugeMetricFamily(
            "tokenmill:canary_evidence", "Evidence that a canary is worse", labels=(*_LABELS, "sign")
        )
        for canary in self._canaries.all:
            for version in canary.versions:
                weights.add_metric((canary.name, version.model), version.weight)
                good, errors = canary.counts[version.model]
                calls.add_metric((canary.name, version.model, "ok"), float(good))
                calls.add_metric((canary.name, version.model, "error"), float(errors))
            for model, judge in canary.judges.items():
                for sign, test in judge.tests.items():
                    evidence.add_metric((canary.name, model, sign), test.evidence)
        yield weights
        yield calls
        yield evidence
        rollbacks = CounterMetricFamily("tokenmill:canary_rollbacks", "Canaries taken back", labels=_LABELS)
        for (name, model), number in self._canaries.num_rollbacks.items():
            rollbacks.add_metric((name, model), float(number))
        yield rollbacks

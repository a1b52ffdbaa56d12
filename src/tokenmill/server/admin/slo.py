"""The operator's view of objectives: /admin/slo."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from ...api.json_reply import JSONReply
from ...control.slo.idle_job import IdleTime
from ...control.slo.objectives import Objectives
from ...control.slo.scorer import Scorer
from ...core.slo import FEATURES, PROFILES, Traffic
from ..callers import require_operator


def routes(objectives: Objectives, scorer: Scorer, idle_time: IdleTime | None) -> list[Route]:
    async def show(request: HttpRequest) -> Response:
        require_operator(request)
        return JSONReply(slo_body(objectives, scorer, idle_time))

    return [Route("/admin/slo", show)]


def slo_body(objectives: Objectives, scorer: Scorer, idle_time: IdleTime | None = None) -> dict[str, Any]:
    """mode, profiles as they are here, whose traffic resembles which, and what the idle command does."""
    return {
        "object": "slo",
        "mode": objectives.mode,
        "is_measured": objectives.is_known,
        "profiles": [_profile(name, objectives, scorer) for name in PROFILES],
        "idle_command": None if idle_time is None else idle_time.shown(),
        "callers": [_caller(key, traffic, scorer) for key, traffic in list(scorer.traffic.items())[::-1]],
    }


def _profile(name: str, objectives: Objectives, scorer: Scorer) -> dict[str, Any]:
    profile, effective = PROFILES[name], objectives.effective[name]
    alone = objectives.alone(profile.num_prompt)
    return {
        "name": name,
        "summary": profile.summary,
        "ttft_ms": _ms(effective.ttft_s),
        "tpot_ms": _ms(effective.tpot_s),
        "wanted_ttft_ms": _ms(profile.targets.ttft_s),
        "wanted_tpot_ms": _ms(profile.targets.tpot_s),
        "is_raised": effective != profile.targets,
        "median_prompt_tokens": profile.num_prompt,
        "unloaded_ttft_ms": _ms(alone.ttft_s),
        "unloaded_tpot_ms": _ms(alone.tpot_s),
        "source": profile.source,
        "requests": _counts(name, scorer),
    }


def _counts(profile: str, scorer: Scorer) -> dict[str, dict[str, int]]:
    return {
        time: {
            "met": scorer.counts.get((profile, time, True), 0),
            "missed": scorer.counts.get((profile, time, False), 0),
        }
        for time in ("ttft", "tpot")
    }


def _caller(key: str, traffic: Traffic, scorer: Scorer) -> dict[str, Any]:
    verdict = traffic.verdict
    shown: dict[str, Any] = {
        "id": key,
        "name": scorer.shown_name(key),
        "num_requests": traffic.num_seen,
        "profile": None,
        "reason": None,
        "features": None,
    }
    if verdict is not None:
        distances = verdict.distances or (None,) * len(FEATURES)
        shown |= {
            "profile": verdict.profile,
            "reason": verdict.reason,
            "lead": round(verdict.lead, 2),
            "features": {
                name: {"value": round(value, 2), "distance": None if distance is None else round(distance, 2)}
                for name, value, distance in zip(FEATURES, verdict.features, distances, strict=True)
            },
        }
    return shown


def _ms(seconds: float) -> float | None:
    return round(1000 * seconds, 1) if seconds else None

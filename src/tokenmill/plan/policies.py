"""`simulate --policy`: policies by name or from a file of one's own, put into a deployment and its gateway.

    --policy least_load             the kind follows from the name, where only one kind has it
    --policy eviction=lru           the kind is named
    --policy my_policy.py           the kind follows from the methods of the class
    --policy my_policies.py:Last    one of several classes

A name may be that of a plug-in, too. What is chosen here comes before what CLUSTER.toml says. The classes, files and
names are those that `tokenmill serve` takes: nothing is written anew for the simulator.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ..cluster.admission import Everybody
from ..cluster.gateway import Gateway
from ..cluster.pools import DECISIONS, decision_named
from ..cluster.replication import POLICIES as REPLICATION
from ..cluster.replication import replication_named
from ..cluster.rescheduling import POLICIES as MIGRATION
from ..cluster.rescheduling import policy_named
from ..cluster.router import ADMISSION, OF_GATEWAYS, ROUTING_POLICIES
from ..core.config import EngineConfig, Kind, OwnPolicy, check_name
from ..core.errors import ConfigError, TokenmillError
from ..core.tiers import HOST, REMOTE
from ..kv.tiers.policies import ADMISSIONS, REPLACEMENTS
from ..kv.tiers.replacement import Replacement, TierAdmission
from ..node.options import EVICTIONS, OWN_POLICIES, SCHEDULING_POLICIES
from ..node.policy_file import is_policy_file, own_policy, policy_names, read_policy
from ..plugins.load import are_on
from ..sim.deployment import Deployment
from ..sim.tier_plan import TierSpecs

KINDS = (
    *OF_GATEWAYS.values(),
    *OWN_POLICIES.values(),
    ADMISSION,
    Kind("tiering", Replacement, ("num_bytes",)),
    Kind("tier-admission", TierAdmission, ("num_bytes",)),
)
"""That a file of one's own may hold, in the order in which they are told of."""
_EVERYBODY = "everybody"
NAMES: Mapping[str, Sequence[str]] = {
    "routing": ROUTING_POLICIES,
    "disaggregation": DECISIONS,
    "migration": MIGRATION,
    "replication": REPLICATION,
    "scheduling": tuple(SCHEDULING_POLICIES),
    "eviction": tuple(EVICTIONS),
    "admission": (_EVERYBODY,),
    "tiering": tuple(REPLACEMENTS),
    "tier-admission": tuple(ADMISSIONS),
}
"""Of each kind, those that come with us."""


@dataclass(frozen=True, slots=True)
class ChosenPolicies:
    """named: kind -> the policy's name; an OwnPolicy brings itself along."""

    named: Mapping[str, str]

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """While policies run: what fails in the file of one is a ConfigError that says where; so is what fails by what
        one's own policy returned, since ours return what can be used."""
        files = {name.file for name in self.named.values() if isinstance(name, OwnPolicy)}
        try:
            yield
        except TokenmillError:
            raise
        except Exception as error:
            if not files:
                raise
            what = " ".join(f"{type(error).__name__}: {error}".split())
            steps = traceback.extract_tb(error.__traceback__)
            places = [each for each in steps if each.filename in files]
            if places:
                told = f"{places[-1].filename}, line {places[-1].lineno}, failed while it ran: {what}"
            else:
                told = f"{', '.join(sorted(files))}: what it returned cannot be used: {what}"
            raise ConfigError(f"--policy {told}", param="policy") from error

    def config(self, config: EngineConfig) -> EngineConfig:
        """The settings of an engine with the policies that are its own."""
        scheduling = self.named.get("scheduling", config.scheduling_policy)
        eviction = self.named.get("eviction", config.eviction_policy)
        scheduling = scheduling if isinstance(scheduling, OwnPolicy) else SCHEDULING_POLICIES[scheduling]
        return replace(config, scheduling_policy=scheduling, eviction_policy=eviction)

    def deployment(self, deployment: Deployment) -> Deployment:
        """The same, with the policies that engines and stores have. Raises ConfigError for a policy of tiers where
        there are none."""
        made: dict[int, EngineConfig] = {}  # many workers have one
        for worker in deployment.workers:
            if id(worker.config) not in made:
                made[id(worker.config)] = self.config(worker.config)
        workers = tuple(replace(worker, config=made[id(worker.config)]) for worker in deployment.workers)
        parts = deployment.parts
        if parts.tiers is not None:
            parts = replace(parts, tiers=self._specs(parts.tiers))
        else:
            for kind in ("tiering", "tier-admission"):
                if kind in self.named:
                    raise ConfigError(f"--policy {kind}=... needs [[tiers]] in the cluster's file.", param="policy")
        return replace(deployment, workers=workers, parts=parts)

    def _specs(self, specs: TierSpecs) -> TierSpecs:
        tiers = []
        for tier in specs.tiers:
            policy = self.named.get("tiering", tier.policy) if tier.kind != REMOTE else tier.policy
            admission = self.named.get("tier-admission", tier.admission) if tier.kind != HOST else tier.admission
            tiers.append(replace(tier, policy=policy, admission=admission))
        return replace(specs, tiers=tuple(tiers))

    def set_up(self, gateway: Gateway) -> None:
        """Before workers join, after what the cluster's file says."""
        named = self.named
        if "routing" in named:
            gateway.router.choose_by(named["routing"])
        if "disaggregation" in named:
            gateway.pools.decision = decision_named(named["disaggregation"])
        if "migration" in named:
            gateway.reviews.policy = policy_named(named["migration"])
        if "replication" in named:
            gateway.reviews.replication = replication_named(named["replication"])
        if "admission" in named:
            name = named["admission"]
            gateway.admission = name.make() if isinstance(name, OwnPolicy) else Everybody()

    def facts(self) -> dict[str, str]:
        """For results."""
        return {kind: str(name) for kind, name in self.named.items()}


def read_policies(texts: Iterable[str]) -> ChosenPolicies:
    """What the flags name, one policy of a kind. Raises ConfigError."""
    named: dict[str, str] = {}
    for text in texts:
        kind, name = _read(text)
        if kind in named:
            raise ConfigError(
                f"--policy names two {kind} policies, {named[kind]} and {name}: give one.", param="policy"
            )
        named[kind] = name
    return ChosenPolicies(named)


def _read(text: str) -> tuple[str, str]:
    kind, equals, name = text.partition("=")
    if not equals or is_policy_file(kind):
        kind, name = "", text
    else:
        check_name(kind, NAMES, "policy", "The kind in --policy KIND=NAME")
    if is_policy_file(name):
        kinds = [each for each in KINDS if each.name == kind or not kind]
        found, own = read_policy(name, kinds, "policy")
        return found.name, own
    kind = kind or _kind_of(name)
    (of_kind,) = (each for each in KINDS if each.name == kind)
    return kind, own_policy(name, of_kind, "policy", NAMES[kind], f"--policy {kind}=...")


def _kind_of(name: str) -> str:
    """The only kind that has a policy of this name, of ours or of plug-ins."""
    able = [each for each, names in NAMES.items() if name in names]
    added = {each.name: policy_names(each) for each in KINDS}
    able = able or [each for each, names in added.items() if name in names]
    if not able:
        known = [each for names in (*NAMES.values(), *added.values()) for each in names]
        check_name(name, dict.fromkeys(known), "policy", "--policy" if are_on() else "--policy (plug-ins are off)")
    if len(able) > 1:
        choices = " or ".join(f"{each}={name}" for each in able)
        raise ConfigError(f"--policy {name} is ambiguous: say {choices}.", param="policy")
    return able[0]

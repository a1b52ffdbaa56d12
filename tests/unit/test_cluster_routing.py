"""Which engine gets a request, policy by policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from random import Random

import pytest

from tokenmill.cluster.entry import Entry
from tokenmill.cluster.index import PrefixIndex
from tokenmill.cluster.keys import with_keys
from tokenmill.cluster.kv_aware import KVAware
from tokenmill.cluster.links import EngineLink, NewestCosts
from tokenmill.cluster.load import Load
from tokenmill.cluster.router import ROUTING_POLICIES, Router, make_routing
from tokenmill.cluster.routing import LeastLoad, Route
from tokenmill.core.block import KEY_BYTES
from tokenmill.core.config import OwnPolicy
from tokenmill.core.cost import Costs
from tokenmill.core.events import EngineStats, Ready, WorkerFacts
from tokenmill.core.kv_events import CLEARED, STORED, KVEvent, KVEvents, WatchKV
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.terms import Terms

BLOCK = 4
COSTS = Costs(step_s=1e-3, row_s=1e-5, token_s=1e-4, position_s=1e-9, context_s=1e-9)
TERMS = Terms()


class Scene:
    """Engines with equal costs, and an index that knows what they were given."""

    def __init__(self, num_links: int, costs: Costs = COSTS, **facts: int) -> None:
        self.index = PrefixIndex()
        self.links: dict[int, EngineLink] = {}
        self.number = 0
        facts = {"max_num_seqs": 8, "max_num_batched_tokens": 256} | facts
        for number in range(num_links):
            worker = WorkerFacts(id=f"w{number}")
            ready = Ready("m", 2**20, 100, (2,), "id", BLOCK, 0, worker=worker, **facts)  # type: ignore[arg-type]
            self.links[number] = EngineLink(number, ready, "mixed", EngineStats(costs=costs))
            self.index.join(number)
            self.index.apply(number, KVEvents(0, (KVEvent(CLEARED),)))

    def request(self, prompt: tuple[int, ...], terms: Terms = TERMS, session: str = "", adapter: str = "") -> Request:
        self.number += 1
        made = Request(f"r{self.number}", prompt, SamplingParams(), 8, 0, terms=terms, session=session, adapter=adapter)
        return with_keys([made], self.links[0].ready)[0]

    def hold(self, link: int, prompt: tuple[int, ...]) -> None:
        made = self.request(prompt)
        self.index.expect(link, made.id, made.keys)

    def give(self, link: int, num_tokens: int = 64, num_hit: int = 0) -> Entry:
        entry = Entry(self.request(tuple(range(1000, 1000 + num_tokens))))
        self.links[link].give(entry, num_hit)
        return entry

    def choose(self, policy: str, request: Request) -> Route:
        return make_routing(policy, self.index).choose(request, self.links, 0.0)


def test_each_policy_gives_one_of_the_engines_that_may_have_it() -> None:
    scene = Scene(4)
    scene.hold(3, tuple(range(32)))
    for name in ROUTING_POLICIES:
        policy = make_routing(name, scene.index)
        request = scene.request(tuple(range(32)), session="s")
        for links in (scene.links, {2: scene.links[2], 1: scene.links[1]}):
            assert policy.choose(request, links, 0.0).link in links.values()


def test_round_robin_goes_in_turn_also_where_engines_come_and_go() -> None:
    scene = Scene(3)
    policy = make_routing("round_robin", scene.index)
    request = scene.request((1,))
    assert [policy.choose(request, scene.links, 0.0).link.number for _ in range(4)] == [0, 1, 2, 0]
    del scene.links[1]
    assert [policy.choose(request, scene.links, 0.0).link.number for _ in range(3)] == [2, 0, 2]


def test_power_of_two_takes_the_lighter_of_two_and_draws_alike_each_time() -> None:
    scene = Scene(2)
    scene.give(0)
    assert scene.choose("power_of_two", scene.request((1,))).link.number == 1
    many = Scene(16)
    drawn = [make_routing("power_of_two", many.index) for _ in range(2)]
    numbers = [[each.choose(many.request((1,)), many.links, 0.0).link.number for _ in range(50)] for each in drawn]
    assert numbers[0] == numbers[1] and len(set(numbers[0])) > 4


def test_a_session_stays_where_it_is_until_that_engine_has_far_more_than_its_share() -> None:
    scene = Scene(4)
    homes = {
        name: scene.choose("session_affinity", scene.request((1,), session=name)).link for name in map(str, range(40))
    }
    assert {link.number for link in homes.values()} == {0, 1, 2, 3}
    home = homes["7"]
    assert scene.choose("session_affinity", scene.request((1, 2, 3), session="7")).link is home
    del scene.links[next(number for number in scene.links if number != home.number)]
    assert scene.choose("session_affinity", scene.request((1,), session="7")).link is home, "another's end moves it not"
    for _ in range(8):
        scene.give(home.number)
    assert scene.choose("session_affinity", scene.request((1,), session="7")).link is not home


def test_prefix_affinity_follows_a_long_prefix_and_not_a_short_one() -> None:
    scene = Scene(3)
    scene.hold(2, tuple(range(64)))
    scene.give(2)
    assert scene.choose("prefix_affinity", scene.request(tuple(range(64)))).link.number == 2
    assert scene.choose("prefix_affinity", scene.request((*range(16), *range(500, 700)))).link.number == 0
    for _ in range(1100):
        scene.give(2)
    assert scene.choose("prefix_affinity", scene.request(tuple(range(64)))).link.number == 0, "loads are far apart"


def test_kv_aware_goes_to_the_prefix_while_its_queue_takes_less_than_computing_it() -> None:
    scene = Scene(2)
    prompt = tuple(range(512))
    scene.hold(1, prompt)
    route = scene.choose("kv_aware", scene.request(prompt))
    assert (route.link.number, route.num_hit) == (1, 508), "one token is left to compute"
    scene.give(1, 256)
    assert scene.choose("kv_aware", scene.request(prompt)).link.number == 1
    scene.give(1, 512)
    route = scene.choose("kv_aware", scene.request(prompt))
    assert (route.link.number, route.num_hit, route.source) == (0, 0, None), "nobody can send KV"


def test_a_prefix_is_fetched_where_that_takes_less_than_waiting_for_it_or_computing_it() -> None:
    scene = Scene(2)
    for link in scene.links.values():
        link.ready = replace(link.ready, worker=link.ready.worker._replace(kv_address="somewhere"))
    prompt = tuple(range(4096))
    policy, request = KVAware(scene.index), scene.request(prompt)
    scene.hold(1, prompt)
    scene.give(1, 1024)
    assert policy.choose(request, scene.links, 0.0).source is None, "it is expected there, and not yet told of"
    scene.index.apply(1, KVEvents(1, (KVEvent(STORED, request.keys),)))
    route = policy.choose(request, scene.links, 0.0)
    assert (route.link.number, route.reason, route.source, route.num_source) == (0, "fetch", 1, 4092)
    for _ in range(100):
        policy.note_fetch(1000, 0.5)
    assert policy.choose(request, scene.links, 0.0).source is None, "it takes longer than to wait"


def test_salts_hit_only_their_own_prefixes() -> None:
    scene = Scene(2)
    prompt = tuple(range(64))
    salted = [
        with_keys([Request("a", prompt, SamplingParams(), 1, 0, cache_salt=salt)], scene.links[0].ready)[0]
        for salt in ("one", "two")
    ]
    scene.index.expect(1, "a", salted[0].keys)
    assert scene.choose("kv_aware", salted[0]).num_hit and not scene.choose("kv_aware", salted[1]).num_hit


def test_an_engine_without_rows_is_passed_over_while_others_have_some() -> None:
    scene = Scene(2, max_num_seqs=2)
    prompt = tuple(range(512))
    scene.hold(1, prompt)
    for _ in range(2):
        entry = scene.give(1, 16)
        scene.links[1].start(entry, 0)
        entry.tokens.append(1)
    assert scene.choose("kv_aware", scene.request(prompt)).link.number == 0


def test_slo_aware_computes_least_where_that_is_in_time() -> None:
    scene = Scene(3)
    prompt = tuple(range(512))
    scene.hold(1, prompt)
    scene.hold(2, prompt[:256])
    scene.give(1, 1024)
    soon, late = scene.request(prompt, Terms(ttft_s=0.06)), scene.request(prompt, Terms(ttft_s=1.0))
    assert scene.choose("slo_aware", soon).link.number == 2
    assert scene.choose("slo_aware", late).link.number == 1
    assert scene.choose("kv_aware", late).link.number == 2
    hopeless = scene.choose("slo_aware", scene.request(prompt, Terms(ttft_s=0.001)))
    assert (hopeless.reason, hopeless.link.number) == ("late", 2)


def test_engines_that_have_an_adapter_under_way_are_preferred_among_equals() -> None:
    scene = Scene(3)
    for link in range(3):
        entry = Entry(scene.request(tuple(range(64)), adapter="x" if link == 1 else "y"))
        scene.links[link].give(entry)
    assert scene.choose("kv_aware", scene.request((1, 2, 3), adapter="x")).link.number == 1
    assert scene.choose("kv_aware", scene.request((1, 2, 3), adapter="y")).link.number == 0


@pytest.mark.parametrize("seed", range(30))
def test_scoring_few_engines_gives_what_scoring_all_gives(seed: int) -> None:
    """Random loads, costs, hits and subsets of up to 60 engines, some prefixes held by most of them."""
    random = Random(seed)
    scene = Scene(random.choice((3, 20, 60)))
    policy = KVAware(scene.index)
    base = tuple(range(400))
    entries: list[tuple[int, Entry]] = []
    for number, link in scene.links.items():
        if random.random() < 0.5:
            scale = random.choice((1, 1, 3)) * random.uniform(0.8, 1.2)
            link.stats = EngineStats(costs=Costs(*(scale * each for each in COSTS)))
        if random.random() < 0.8:
            scene.hold(number, base[:64])
        if random.random() < 0.2:
            scene.hold(number, base[: random.randrange(1, 400)])
    for _ in range(60):
        number = random.choice(list(scene.links))
        if random.random() < 0.6 or not entries:
            entries.append((number, scene.give(number, random.randrange(1, 900))))
        else:
            number, entry = entries.pop(random.randrange(len(entries)))
            if random.random() < 0.5:
                scene.links[number].start(entry, 0)
                entry.tokens.append(1)
            scene.links[number].take_back(entry)
        links = {each: scene.links[each] for each in scene.links if random.random() < 0.7} or scene.links
        request = scene.request((*base[: random.randrange(1, 400)], *range(2000, 2000 + random.randrange(200))))
        route = policy.choose(request, links, 0.0)
        best = policy.score_all(request, links)
        assert (route.link.number, route.num_hit) == (best.number, best.num_hit)


def test_an_engine_that_has_not_told_is_taken_to_cost_what_its_kind_told_last_and_is_ranked_anew() -> None:
    fast, slow = COSTS, Costs(step_s=0.5, token_s=1e-2)
    scene, costs = Scene(3, Costs()), NewestCosts()
    large = replace(scene.links[2].ready, num_blocks=7)
    scene.links[2] = EngineLink(2, large, "mixed", EngineStats())
    policy = make_routing("kv_aware", scene.index)
    for link in scene.links.values():
        costs.join(link)

    def tell(number: int, told: Costs, num_computed: int) -> None:
        link, before = scene.links[number], scene.links[number].stats
        link.step(EngineStats(costs=told, prompt_tokens_computed=num_computed))
        costs.step(link, before)

    def choose() -> int:
        return policy.choose(scene.request((1, 2, 3)), scene.links, 0.0).link.number

    assert choose() == 0
    tell(0, fast, 64)
    assert [link.costs for link in scene.links.values()] == [fast] * 3, "of all that there is, the newest"
    scene.give(0)
    assert choose() == 1, "one that is measured is not preferred for that"
    tell(2, slow, 64)
    assert [link.costs for link in scene.links.values()] == [fast, fast, slow], "each by its kind"
    assert choose() == 1
    tell(0, slow, 128)
    assert scene.links[1].costs == slow and policy.score_all(scene.request((1, 2, 3)), scene.links).number == choose()
    tell(1, fast, 0)
    assert scene.links[1].costs == fast and scene.links[0].costs == slow, "its own, once it has told"
    costs.leave(1)
    costs.join(again := EngineLink(3, scene.links[1].ready, "mixed", EngineStats()))
    assert again.costs == slow, "of steps with prompts"


def test_the_load_of_an_engine_is_what_it_has_and_has_not_done() -> None:
    load = Load(100)
    load.give(50, 10)
    load.give(30, 0)
    assert (load.num_waiting, load.num_to_compute, load.share_left) == (2, 70, 1.0)
    load.step(135)
    assert load.share_left == 0.5
    load.step(140)
    load.start(50, 10, 10)
    assert (load.num_waiting, load.num_to_compute, load.num_drawing, load.num_context) == (1, 30, 1, 50)
    assert load.share_left == 1.0
    load.step(155)
    assert load.share_left == 0.5
    load.end(30, 0, 0)
    load.end(50, 10, 7)
    assert (load.num_waiting, load.num_to_compute, load.num_positions, load.num_drawing, load.num_context) == (0,) * 5


def test_engines_are_asked_of_their_caches_where_there_are_several_and_the_policy_looks_at_prefixes() -> None:
    links = Scene(3).links
    first = {0: links[0]}
    router = Router("kv_aware")
    assert router.join(first) == [] and not router.has_keys
    assert router.join(first | {1: links[1]}) == [(0, WatchKV(True)), (1, WatchKV(True))] and router.has_keys
    assert router.join(links) == [(2, WatchKV(True))]
    assert router.hear(0, KVEvents(3, (KVEvent(CLEARED),))) == []
    assert router.hear(0, KVEvents(5, (KVEvent(STORED, bytes(KEY_BYTES)),))) == [(0, WatchKV(True))]
    assert Router("least_load").join(links) == []


def test_a_policy_says_by_itself_what_it_looks_at() -> None:
    """One that inherits `looks_at` and chooses in its own way may choose by more: then all is looked at."""

    class Own(LeastLoad):
        def choose(self, request: Request, links: Mapping[int, EngineLink], now: float) -> Route:
            return Route(next(iter(links.values())), "first")

    class Said(Own):
        def looks_at(self, request: Request) -> Iterable[int]:
            return (7,)

    router, request = Router("least_load"), Request("r", (1, 2), SamplingParams(), 4, 0)
    assert router.looks_at(request) == ()
    for policy, looked in ((Own, None), (Said, (7,))):
        router.choose_by(OwnPolicy(policy.__name__, lambda policy=policy, **offered: policy()))
        assert router.looks_at(request) == looked

// Profiles with their targets as they are held here, and whose traffic resembles which.

import { h } from "./dom.js";
import { decimal, duration, whole } from "./format.js";
import { badge, card, empty, table } from "./ui.js";

const MODES = { auto: "Profiles are recognised from traffic and applied.", off: "Requests have the targets that they or their tenants name." };

export function objectivesView(slo) {
  return [
    card("Profiles", h("p", { class: "muted small" }, MODES[slo.mode] ?? `All requests without a profile of their own are ${slo.mode}.`),
      table("Profiles", [
        ["Profile", (each) => [each.name, h("div", { class: "small muted" }, each.summary)], "name"],
        ["TTFT", (each) => target(each.ttft_ms, each.wanted_ttft_ms), "right"],
        ["met, missed", (each) => counts(each.requests.ttft), "right"],
        ["TPOT", (each) => target(each.tpot_ms, each.wanted_tpot_ms), "right"],
        ["met, missed", (each) => counts(each.requests.tpot), "right"],
      ], slo.profiles)),
    card("Recognised traffic", slo.callers.length
      ? table("Recognised traffic", [
        ["Who", (each) => each.name || each.id, "name"],
        ["Requests", (each) => whole(each.num_requests), "right"],
        ["Resembles", (each) => (each.profile ? badge(each.profile, "live") : "not known yet")],
        ["Nearest example", (each) => each.reason ?? "", "name"],
      ], slo.callers)
      : empty("No traffic yet", "After some requests of a tenant or client, the profile that they resemble is told here.")),
    slo.idle_command && card("Idle command", h("p", null, Object.entries(slo.idle_command).filter(([, value]) => typeof value !== "object").map(([name, value]) => `${name.replaceAll("_", " ")} ${typeof value === "number" ? decimal(value) : value}`).join(", "))),
  ];
}

// A target that this machine cannot meet is raised: both are told.
function target(here, wanted) {
  if (!here) return "–";
  return [duration(here / 1000), wanted && wanted !== here && h("div", { class: "small muted" }, `raised from ${duration(wanted / 1000)}`)];
}

function counts({ met, missed }) {
  return met || missed ? badge(`${whole(met)}, ${whole(missed)}`, missed ? "warn" : "ok") : "–";
}

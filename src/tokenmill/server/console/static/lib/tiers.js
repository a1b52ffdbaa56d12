// What the tiers of this machine's KV store have, and what passed through them.

import { bytes, whole } from "./format.js";
import { card, table } from "./ui.js";

export function tiersView(tiers) {
  if (!tiers) return null;
  return card("KV tiers", table("KV tiers", [
    ["Tier", (each) => each.name, "name"],
    ["Has", (each) => size(each.bytes), "right"],
    ["At most", (each) => size(each.max_bytes), "right"],
    ["Pinned", (each) => size(each.pinned_bytes), "right"],
    ["Blocks", (each) => count(each.blocks), "right"],
    ["Hits", (each) => count(each.hits), "right"],
    ["Loaded", (each) => size(each.load_bytes), "right"],
    ["Saved", (each) => size(each.save_bytes), "right"],
    ["Evicted", (each) => count(each.evictions), "right"],
    ["Corrupt", (each) => count(each.corrupt), "right"],
  ], Object.entries(tiers).map(([name, counts]) => ({ name, ...counts }))));
}

function size(value) {
  return value === undefined ? "–" : bytes(value);
}

function count(value) {
  return value === undefined ? "–" : whole(value);
}

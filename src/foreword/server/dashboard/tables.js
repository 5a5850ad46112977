// Tiles and tables of one moment.

import { amount, byId, count, make, meter, seconds, share, table } from "./show.js";

const put = (id, element) => byId(id).replaceChildren(element);

export function showState(state) {
  const { prompt_tokens: tokens, saved_seconds: saved, reasons } = state.totals;
  const all = tokens.cached + tokens.computed;
  const blocks = state.blocks;
  const tiles = [
    ["Token hit rate", all ? share(tokens.cached / all) : "–", "of all prompt tokens since the start"],
    ["Time saved", seconds(saved), "an estimate, since the start"],
    ["Tokens cached", count(tokens.cached), "taken from the cache"],
    ["Tokens computed", count(tokens.computed), "of prompts"],
    ["Requests", count(state.requests.running + state.requests.waiting), `${count(state.requests.running)} running, ${count(state.requests.waiting)} waiting`],
    ["Pool in use", share((blocks.capacity - blocks.free) / blocks.capacity), `${count(blocks.pinned)} of ${count(blocks.pin_budget)} blocks pinned`],
  ];
  byId("tiles").replaceChildren(...tiles.map(([name, value, note]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value, make("small", {}, note)))));
  byId("model").textContent = state.model + (state.enabled ? "" : state.cacheable ? ", caching is off" : `, not cacheable: ${state.not_cacheable}`);

  const missed = Object.entries(reasons).filter(([, of]) => of.requests > 0).sort((a, b) => b[1].tokens - a[1].tokens);
  const most = Math.max(1, ...missed.map(([, of]) => of.tokens));
  put("reasons", table(missed, [
    ["Reason", ([name]) => name],
    ["Requests", ([, of]) => count(of.requests), true],
    ["Tokens computed", ([, of]) => count(of.tokens), true],
    ["", ([name, of]) => meter(of.tokens, most, `${name}: ${amount(of.tokens, "token")}`)],
  ], "No request yet. Each one will say here why its match ended where it did."));

  byId("tenants-box").hidden = !state.tenants;
  if (state.tenants) {
    put("tenants", table(state.tenants, [
      ["Tenant", (its) => its.tenant],
      ["Cached", (its) => count(its.blocks.cached), true],
      ["Held", (its) => count(its.blocks.held), true],
      ["Pinned", (its) => count(its.blocks.pinned), true],
      ["Share", (its) => count(its.blocks.share), true],
      ["", (its) => meter(its.blocks.cached + its.blocks.held, blocks.capacity, `${its.tenant}: blocks of the pool`)],
    ], "No tenant."));
  }
}

export function showTop(nodes) {
  put("top", table(nodes.filter((node) => node.hits).slice(0, 8), [
    ["Begins", (node) => make("span", { class: "said" }, node.text)],
    ["Tenant", (node) => node.owner || "–"],
    ["Tokens", (node) => count(node.tokens), true],
    ["Hits", (node) => count(node.hits), true],
  ], "No prefix was hit yet."));
}

export function showAdvice(advice) {
  if (!advice.length) {
    put("advice", make("p", { class: "empty" }, "Nothing. A clock, an id or reordered parts that keep ending matches would be named here."));
    return;
  }
  put("advice", make("div", {}, ...advice.map((one) => make("div", { class: "advice" },
    make("p", {}, one.text),
    make("p", { class: "soft" }, `${one.tenant ? `${one.tenant}: ` : ""}${one.kind}, ${amount(one.calls, "call")}, ${amount(one.tokens_per_call, "token")} a call`)))));
}

export function showLive({ requests, total }) {
  const shown = table(requests, [
    ["Request", (one) => make("span", { class: "said" }, one.key || one.id.slice(0, 12))],
    ["Tenant", (one) => one.tenant || "–"],
    ["Phase", (one) => one.phase],
    ["Cached", (one) => count(one.cached_tokens), true],
    ["Prompt", (one) => `${count(one.cached_tokens + one.computed_tokens)} / ${count(one.prompt_tokens)}`, true],
    ["Answer", (one) => count(one.completion_tokens), true],
    ["Age", (one) => seconds(one.age_s), true],
  ], "Nobody is waiting for an answer.");
  put("live", shown);
  if (total > requests.length) byId("live").append(make("p", { class: "note" }, `and ${count(total - requests.length)} more`));
}

// The tree of cached prefixes. A row is a run of blocks that is not branched.

import { amount, byId, count, make, seconds } from "./show.js";
import { get, post } from "./server.js";

const MOST = 1000;

let nodes = new Map(); // by block
let more = false;
let wanted = "";
let current = null; // the block of the row that Tab leads to
let drawn = "";
const open = new Set();
const order = new Map(); // rows keep their places while others come and go

export async function refresh() {
  const found = new Map();
  const page = await get(`/v1/cache/tree?limit=${wanted ? MOST : 300}`);
  for (const node of page.nodes) found.set(node.block, node);
  for (const block of open) {
    const node = found.get(block);
    if (!node || kidsOf(block, found).length >= node.children) continue;
    try {
      for (const kid of (await get(`/v1/cache/tree?start=${block}&limit=200`)).nodes) if (!found.has(kid.block)) found.set(kid.block, kid);
    } catch (error) {
      if (error.status !== 404) throw error; // evicted meanwhile
    }
  }
  for (const block of found.keys()) if (!order.has(block)) order.set(block, order.size);
  if (order.size > 20 * MOST) order.clear();
  nodes = found;
  more = page.more;
  draw();
}

const kidsOf = (parent, among = nodes) => [...among.values()].filter((node) => node.parent === parent);

function matching() {
  const kept = new Set();
  for (const node of nodes.values()) {
    if (![node.text, node.owner, node.block].some((text) => text.toLowerCase().includes(wanted))) continue;
    for (let at = node; at && !kept.has(at.block); at = nodes.get(at.parent)) kept.add(at.block);
  }
  return kept;
}

function draw() {
  const tree = byId("tree");
  const shown = wanted ? matching() : null;
  const text = JSON.stringify([[...nodes.values()], [...open], wanted, more]);
  if (text === drawn) return;
  drawn = text;
  const focused = tree.contains(document.activeElement);
  const top = [...nodes.values()].filter((node) => !nodes.has(node.parent));
  if (!nodes.has(current) || (shown && !shown.has(current))) current = null;
  current ??= sorted(top, shown)[0]?.block ?? null;
  const [down, side] = [tree.scrollTop, document.activeElement];
  tree.replaceChildren(...sorted(top, shown).map((node) => row(node, 1, shown)));
  tree.scrollTop = down;
  if (focused && side) item(current)?.focus({ preventScroll: true });
  const empty = byId("tree-empty");
  empty.hidden = tree.childElementCount > 0 && !more;
  empty.textContent = tree.childElementCount
    ? "There are more prefixes than are shown; open a row or search."
    : wanted ? "No cached prefix begins so." : "Nothing is cached yet. Ask the model something of more than a few words.";
}

const sorted = (list, shown) =>
  list.filter((node) => !shown || shown.has(node.block)).sort((a, b) => order.get(a.block) - order.get(b.block));

function row(node, level, shown) {
  const isOpen = open.has(node.block) || Boolean(shown);
  const kids = isOpen ? sorted(kidsOf(node.block), shown) : [];
  const fixed = node.owner === "public";
  const act = (label, run, kind) => make("button", {
    type: "button", tabindex: "-1", class: kind, disabled: fixed,
    onclick: (event) => { event.stopPropagation(); current = node.block; run(node); },
  }, label);
  const told = `${amount(node.tokens, "token")}, ${amount(node.hits, "hit")}, used ${seconds(node.idle_s)} ago`;
  const line = make("div", { class: "node" },
    make("span", { class: "twist", "aria-hidden": "true" }, node.children ? (isOpen ? "▾" : "▸") : ""),
    make("span", { class: "said", title: node.text }, node.text),
    node.owner ? make("span", { class: "tag" }, node.owner) : null,
    node.pinned ? make("span", { class: "tag pinned" }, "pinned") : null,
    node.held ? make("span", { class: "tag" }, "in use") : null,
    make("span", { class: "n" }, told),
    act(node.pinned ? "Unpin" : "Pin", pin, ""),
    act("Flush", flush, "danger"));
  const parts = [line];
  if (kids.length) parts.push(make("ul", { role: "group" }, ...kids.map((kid) => row(kid, level + 1, shown))));
  return make("li", {
    role: "treeitem",
    "data-block": node.block,
    "aria-level": level,
    "aria-label": `${node.text}: ${told}${node.pinned ? ", pinned" : ""}`,
    "aria-expanded": node.children ? String(isOpen) : null,
    "aria-selected": String(node.block === current),
    tabindex: node.block === current ? "0" : "-1",
    onclick: (event) => { event.stopPropagation(); focus(node.block); toggle(node); },
  }, ...parts);
}

const item = (block) => byId("tree").querySelector(`[data-block="${block}"]`);

function focus(block) {
  current = block;
  for (const each of byId("tree").querySelectorAll("[role=treeitem]")) {
    const here = each.dataset.block === block;
    each.tabIndex = here ? 0 : -1;
    each.setAttribute("aria-selected", String(here));
    if (here) each.focus();
  }
}

async function toggle(node, on = !open.has(node.block)) {
  if (!node.children) return;
  if (on) open.add(node.block);
  else open.delete(node.block);
  draw();
  if (on) await run(refresh);
}

async function pin(node) {
  const body = { block: node.block, ...whose(node) };
  await run(async () => {
    const done = await post(node.pinned ? "/v1/cache/unpin" : "/v1/cache/pin", body);
    await refresh();
    tell(node.pinned
      ? `${amount(done.unpinned, "block")} pinned no longer.`
      : `Pinned ${amount(done.blocks, "block")}; ${count(done.pinned)} of ${count(done.budget)} are.`);
  });
}

async function flush(node) {
  const question = node ? `Forget “${node.text.slice(0, 80)}” and all that continues it?` : "Forget everything that is cached, of all tenants?";
  if (!(await sure(question))) return;
  await run(async () => {
    const done = await post("/v1/cache/flush", node ? { block: node.block, ...whose(node) } : {});
    await refresh();
    tell(`Flushed ${amount(done.dropped, "block")}${done.still_held ? `; requests under way go on reading ${count(done.still_held)}` : ""}.`);
  });
}

const whose = (node) => (node.owner ? { tenant: node.owner } : {});

function sure(question) {
  const dialog = byId("sure");
  byId("sure-what").textContent = question;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

const tell = (text) => { byId("told").textContent = text; };

async function run(work) {
  try {
    await work();
  } catch (error) {
    tell(error.message);
  }
}

function keyed(event) {
  if (event.target.getAttribute("role") !== "treeitem" || event.ctrlKey || event.metaKey || event.altKey) return;
  const rows = [...byId("tree").querySelectorAll("[role=treeitem]")];
  const at = rows.findIndex((each) => each.dataset.block === current);
  const node = nodes.get(current);
  if (!node) return;
  const go = (each) => each && focus(each.dataset.block);
  const fixed = node.owner === "public";
  const keys = {
    ArrowDown: () => go(rows[at + 1]),
    ArrowUp: () => go(rows[at - 1]),
    Home: () => go(rows[0]),
    End: () => go(rows.at(-1)),
    ArrowRight: () => (open.has(node.block) ? go(item(node.block).querySelector("[role=treeitem]")) : toggle(node, true)),
    ArrowLeft: () => (open.has(node.block) ? toggle(node, false) : nodes.has(node.parent) && focus(node.parent)),
    Enter: () => toggle(node),
    " ": () => toggle(node),
    p: () => fixed || pin(node),
    Delete: () => fixed || flush(node),
  };
  const work = keys[event.key] ?? keys[event.key.toLowerCase()];
  if (!work) return;
  event.preventDefault();
  work();
}

byId("tree").addEventListener("keydown", keyed);
byId("flush-all").addEventListener("click", () => flush(null));
byId("search").addEventListener("input", (event) => {
  wanted = event.target.value.trim().toLowerCase();
  draw();
  run(refresh);
});

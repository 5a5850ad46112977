// The beat of the page: every two seconds, while somebody sees it.

import * as charts from "./charts.js";
import { Refused, get, key } from "./server.js";
import { byId } from "./show.js";
import * as tables from "./tables.js";
import * as tree from "./tree.js";

const BEAT_MS = 2000;

let state = null;
let timer = null;
let asking = false;

async function beat() {
  clearTimeout(timer);
  if (asking) return;
  asking = true;
  try {
    const now = await get("/v1/cache");
    if (!now.totals) throw new Refused(403, "This is a tenant's key; the dashboard needs an admin key.");
    const rest = await Promise.all([
      get("/v1/cache/requests"), get("/v1/cache/advice"), get("/v1/cache/tree?order=hits&limit=20"),
    ]);
    state = now;
    show("board");
    tables.showState(state);
    charts.add(state);
    tables.showLive(rest[0]);
    tables.showAdvice(rest[1].advice);
    tables.showTop(rest[2].nodes);
    await tree.refresh();
    say("live", "live");
    trouble("");
  } catch (error) {
    if (error.status === 401 || error.status === 403) return signIn(error.message);
    say("gone", "server not reached");
    trouble(error instanceof Refused ? error.message : "The server does not answer. What is shown is old; the page goes on asking.");
  } finally {
    asking = false;
  }
  if (!document.hidden) timer = setTimeout(beat, BEAT_MS);
}

function show(id) {
  for (const each of ["board", "sign-in"]) byId(each).hidden = each !== id;
  byId("leave").hidden = !key.get();
}

function signIn(message) {
  byId("refused").textContent = key.get() ? message : "";
  key.forget();
  state = null;
  show("sign-in");
  say("wait", "signed out");
  byId("key").focus();
}

function say(kind, text) {
  byId("state").dataset.state = kind;
  if (byId("state").textContent !== text) byId("state").textContent = text;
}

function trouble(text) {
  byId("trouble").hidden = !text;
  if (text) show("board");
  byId("trouble").textContent = text;
}

function paint(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
  charts.redraw(state);
}

const system = matchMedia("(prefers-color-scheme: dark)");
const chosen = () => localStorage.getItem("foreword-theme") ?? (system.matches ? "dark" : "light");

byId("theme").addEventListener("click", () => {
  localStorage.setItem("foreword-theme", chosen() === "dark" ? "light" : "dark");
  paint(chosen());
});
byId("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  key.keep(byId("key").value.trim());
  byId("key").value = "";
  beat();
});
byId("leave").addEventListener("click", () => {
  key.forget();
  location.reload();
});
system.addEventListener("change", () => paint(chosen()));
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    clearTimeout(timer);
    say("wait", "paused");
  } else beat();
});
let resized = null;
window.addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => charts.redraw(state), 150);
});

byId("since").textContent = new Date().toLocaleTimeString();
paint(chosen());
beat();

// What this page remembers of the last ten minutes, and the charts over it.

import { byId, count, seconds, share } from "./show.js";

const KEPT_S = 600;
const WINDOW = 15; // samples that a rate looks back

const samples = [];
const charts = new Map();

export function add(state) {
  const { prompt_tokens: tokens, saved_seconds: saved, ttft } = state.totals;
  const last = samples.at(-1);
  if (last && tokens.cached + tokens.computed < last.cached + last.computed) samples.length = 0; // it was restarted
  samples.push({
    at: Date.now() / 1000,
    cached: tokens.cached,
    computed: tokens.computed,
    saved,
    cold: total(ttft, ["miss"]),
    warm: total(ttft, ["partial", "full"]),
    blocks: state.blocks,
  });
  while (samples[0].at < Date.now() / 1000 - KEPT_S) samples.shift();
  draw(state);
}

function total(ttft, hits) {
  const kinds = hits.map((hit) => ttft[hit] ?? { requests: 0, seconds: 0 });
  return {
    requests: kinds.reduce((sum, kind) => sum + kind.requests, 0),
    seconds: kinds.reduce((sum, kind) => sum + kind.seconds, 0),
  };
}

function mean(now, before) {
  const requests = now.requests - before.requests;
  return requests > 0 ? (now.seconds - before.seconds) / requests : null;
}

function draw(state) {
  const back = (i) => samples[Math.max(0, i - WINDOW)];
  const rate = samples.map((now, i) => {
    const cached = now.cached - back(i).cached;
    const all = cached + now.computed - back(i).computed;
    return all > 0 ? (100 * cached) / all : null;
  });
  const start = samples[0];
  const step = (kind) => samples.map((now, i) => (i ? mean(now[kind], samples[i - 1][kind]) : null));
  const { cold, warm } = samples.at(-1);
  const blocks = state.blocks;
  const nothing = { requests: 0, seconds: 0 };
  const [slow, fast] = [mean(cold, nothing), mean(warm, nothing)];

  tell("rate", rate.at(-1) == null ? "no prompt in the last 30 s" : `${share(rate.at(-1) / 100)} in the last 30 s`);
  tell("saved", `${seconds(samples.at(-1).saved - start.saved)} since this page was opened`);
  tell("ttft", slow && fast ? `warm ${seconds(fast)}, cold ${seconds(slow)}: ${(slow / fast).toFixed(1)}x` : `cold ${seconds(slow)}, warm ${seconds(fast)} on average`);
  tell("pool", `${count(blocks.cached)} cached, ${count(blocks.held)} held, ${count(blocks.free)} free of ${count(blocks.capacity)} blocks`);

  plot("rate", [rate], [{ label: "cached", color: "--one", fill: true }], (v) => `${v} %`, [0, 100]);
  plot("saved", [samples.map((s) => s.saved - start.saved)], [{ label: "saved", color: "--good", fill: true }], (v) => `${v} s`);
  plot("ttft", [step("cold"), step("warm")], [
    { label: "cold", color: "--two", gaps: true },
    { label: "warm", color: "--one", gaps: true },
  ], (v) => `${v} s`);
  plot("pool", [
    samples.map((s) => s.blocks.cached + s.blocks.held),
    samples.map((s) => s.blocks.held),
  ], [
    { label: "cached", color: "--one", fill: true },
    { label: "held", color: "--two", fill: true },
  ], (v) => count(v), [0, blocks.capacity]);
}

function tell(id, text) {
  byId(`say-${id}`).textContent = text;
  byId(id).setAttribute("aria-label", text);
}

const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function plot(id, lines, series, unit, range) {
  const data = [samples.map((sample) => sample.at), ...lines];
  const known = charts.get(id);
  const box = byId(id);
  if (known) {
    known.setData(data);
    return;
  }
  const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  charts.set(id, new window.uPlot({
    width: box.clientWidth,
    height: box.clientHeight - (series.length > 1 ? 26 : 0),
    cursor: { y: false, drag: { x: false, y: false } },
    legend: { show: series.length > 1, live: false },
    scales: { x: { range: () => [Date.now() / 1000 - Math.max(60, Math.min(KEPT_S, samples.at(-1).at - samples[0].at)), Date.now() / 1000] },
              y: { range: (u, low, high) => range ?? [0, high > 0 ? high * 1.1 : 1] } },
    axes: [{ ...axis, space: 90, size: 26, values: (u, times) => times.map(clock) }, { ...axis, size: 58, values: (u, values) => values.map(unit) }],
    series: [{}, ...series.map(({ label, color: name, fill, gaps }) => ({
      label,
      stroke: color(name),
      width: 2,
      fill: fill ? `${color(name)}33` : undefined,
      spanGaps: Boolean(gaps),
      points: { show: Boolean(gaps), size: 6 },
    }))],
  }, data, box));
}

// Colours and widths are fixed when a chart is made: after a change it is made again.
export function redraw(state) {
  for (const chart of charts.values()) chart.destroy();
  charts.clear();
  if (state && samples.length) draw(state);
}

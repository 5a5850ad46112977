// Requests to the server that the page came from. The key travels in a header and is kept until the tab is closed.

const KEPT = "foreword-key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEPT),
  keep: (value) => sessionStorage.setItem(KEPT, value),
  forget: () => sessionStorage.removeItem(KEPT),
};

async function ask(path, options) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store", signal: AbortSignal.timeout(10_000) });
  const body = await response.json();
  if (!response.ok) throw new Refused(response.status, body.error?.message ?? `status ${response.status}`);
  return body;
}

export const get = (path) => ask(path, {});

export const post = (path, body) =>
  ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });

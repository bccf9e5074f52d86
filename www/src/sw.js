// Keeps the page for when there is no network. The build puts in the files and their version; a new version takes over once the last tab of the
// old one is closed. Models are not its business: the engine keeps their weights itself.

const VERSION = "__VERSION__";
const FILES = ["__FILES__"];
const name = `cedra-page-${VERSION}`;
const kept = new Set(FILES.map((file) => new URL(file, self.registration.scope).href));

self.addEventListener("install", (event) => {
  const fresh = FILES.map((file) => new Request(file, { cache: "reload" }));
  event.waitUntil(caches.open(name).then((cache) => cache.addAll(fresh)));
});

self.addEventListener("activate", (event) => {
  const old = (names) => names.filter((other) => other.startsWith("cedra-page-") && other !== name);
  event.waitUntil(
    caches
      .keys()
      .then((names) => Promise.all(old(names).map((other) => caches.delete(other))))
      .then(() => self.clients.claim()),
  );
});

self.addEventListener("fetch", (event) => {
  const { request } = event;
  if (request.method !== "GET") return;
  const url = new URL(request.url);
  url.search = url.hash = "";
  if (!kept.has(url.href)) return;
  event.respondWith(caches.open(name).then(async (cache) => (await cache.match(url.href)) ?? fetch(request)));
});

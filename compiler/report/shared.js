const $ = id => document.getElementById(id);
const make = (tag, text, kind) => { const e = document.createElement(tag); if (text !== undefined) e.textContent = text; if (kind) e.className = kind; return e; };
const bytes = n => { const units = ["B", "KiB", "MiB", "GiB", "TiB"]; let i = 0; while (n >= 1024 && i < 4) { n /= 1024; i++; } return (i ? n.toPrecision(n >= 1000 ? 4 : 3) : n) + " " + units[i]; };
const secs = s => s >= 1 ? s.toPrecision(3) + " s" : s >= 1e-3 ? (s * 1e3).toPrecision(3) + " ms" : (s * 1e6).toPrecision(3) + " µs";
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

async function unpack() {
  const raw = Uint8Array.from(atob($("data").textContent), c => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

function table(target, head, rows) {
  const tr = make("tr"); head.forEach(([text, kind]) => tr.append(make("th", text, kind))); target.replaceChildren(tr);
  for (const row of rows) { const line = make("tr"); row.forEach((cell, i) => line.append(make("td", cell, head[i][1]))); target.append(line); }
}

function tiles(rows) {
  for (const [name, value, more] of rows) { const tile = make("div", undefined, "tile"); tile.append(make("span", name), make("b", value), make("span", more)); $("tiles").append(tile); }
}

function tip(event, parts) {
  const target = $("tip");
  target.replaceChildren(...parts.map(([tag, text]) => make(tag, text, tag === "div" ? "note" : undefined)));
  target.style.display = "block";
  target.style.left = Math.min(event.clientX + 14, innerWidth - target.offsetWidth - 8) + "px";
  target.style.top = Math.min(event.clientY + 14, innerHeight - target.offsetHeight - 8) + "px";
}

function themed(redraw) {
  $("theme").onclick = () => { const root = document.documentElement, dark = css("--page") === "#14181f"; root.dataset.theme = dark ? "light" : "dark"; redraw(); };
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

"use strict";
const tabs = [...document.querySelectorAll('[role="tab"]')];
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const narrow = () => window.innerWidth < 600;

function layoutOf(chart) {
  const ink = dark.matches ? "#e6edf3" : "#1b1f24";
  const grid = dark.matches ? "#30363d" : "#d0d7de";
  const axis = { gridcolor: grid, zerolinecolor: grid, automargin: true };
  const layout = { ...chart.layout };
  return { ...layout, autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink },
    margin: { l: 55, r: 15, t: 15, b: 45 }, xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
    legend: { orientation: "h", y: narrow() ? -0.25 : -0.15 },
    hoverlabel: { bgcolor: dark.matches ? "#161b22" : "#ffffff", font: { color: ink } } };
}

function draw(panel) {
  for (const place of panel.querySelectorAll(".chart")) {
    const chart = charts[place.dataset.chart];
    window.Plotly.react(place, chart.data, layoutOf(chart), { responsive: true, displayModeBar: false });
  }
}

function select(tab) {
  for (const each of tabs) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", String(chosen));
    each.tabIndex = chosen ? 0 : -1;
    const panel = document.getElementById(each.getAttribute("aria-controls"));
    panel.hidden = !chosen;
    if (chosen && window.Plotly) draw(panel);
  }
}

// A link may name a tab: plan.html#memory
const named = tabs.find((tab) => `#${tab.dataset.name}` === window.location.hash);
if (named) select(named);

tabs.forEach((tab, index) => {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(index + step + tabs.length) % tabs.length];
    select(next);
    next.focus();
  });
});

for (const head of document.querySelectorAll("th[data-sort]")) {
  head.tabIndex = 0;
  const sort = () => {
    const body = head.closest("table").tBodies[0];
    const column = [...head.parentNode.children].indexOf(head);
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => row.children[column].dataset.value ?? row.children[column].textContent;
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      const order = isNaN(x) || isNaN(y) ? String(x).localeCompare(y) : x - y;
      return up ? order : -order;
    });
    body.append(...rows);
  };
  head.addEventListener("click", sort);
  head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
}

async function plotly() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  const redraw = () => draw(document.querySelector('[role="tabpanel"]:not([hidden])'));
  redraw();
  dark.addEventListener("change", redraw);
  document.body.dataset.ready = "true";
}
plotly();

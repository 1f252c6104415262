"""The page's style sheet and script. The page is whole without the script, which adds a readout, sorting and search."""

_COLOURS_LIGHT = ("#1f6fd0", "#d1480f", "#138a5c", "#8a4fc4", "#a67500", "#c2387a", "#0b8494", "#68707d")
_COLOURS_DARK = ("#6aa8f5", "#f48a5a", "#4cc994", "#bb94ee", "#e0b040", "#f07db0", "#4cc5d4", "#a8b0bd")


def _palette(colours: tuple[str, ...]) -> str:
    return "".join(f".c{i}{{--line:{colour}}}" for i, colour in enumerate(colours))


STYLE = (
    """
:root{color-scheme:light dark;--ink:#1d2129;--soft:#5b6472;--faint:#dfe3e9;--page:#fff;--panel:#f6f7f9;--mark:#fff1b8;
--warn:#9a4a00;--warnpage:#fff4e5;--link:#1f5fb8;--line:var(--link)}
"""
    + _palette(_COLOURS_LIGHT)
    + """
@media (prefers-color-scheme:dark){:root{--ink:#e6e8ec;--soft:#a3abb8;--faint:#353b45;--page:#16181d;--panel:#1f2229;
--mark:#5a4a00;--warn:#ffb870;--warnpage:#33240f;--link:#84b6ff}
"""
    + _palette(_COLOURS_DARK)
    + """}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:0 20px 40px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
[hidden]{display:none!important}
header{padding:20px 0 4px}
h1{font-size:26px;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:20px;margin:36px 0 10px;padding-top:14px;border-top:1px solid var(--faint)}
h3{font-size:16px;margin:24px 0 8px}
h4{font-size:14px;min-height:42px;margin:0 0 4px;overflow-wrap:anywhere}
h4 code{display:block}
h5{font-size:13px;margin:10px 0 4px;color:var(--soft)}
a{color:var(--link)}
nav a{margin-right:16px}
code{font:.88em ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}
h4 code,small,footer,figcaption,.none{color:var(--soft);font-weight:400}
small{font-size:12.5px}
footer{margin-top:40px;font-size:13px}
ul.plain{list-style:none;margin:4px 0;padding:0}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:14px}
th,td{text-align:left;vertical-align:top;padding:5px 14px 5px 0;overflow-wrap:anywhere;
border-bottom:1px solid var(--faint)}
td{min-width:110px}
tbody th{font-weight:400;color:var(--soft);white-space:nowrap}
thead th{font-weight:600}
.settings td{max-width:420px}
table.different tbody th,table.different td{background:var(--mark)}
table.different tbody th{color:var(--ink);padding-left:8px}
mark{background:var(--mark);color:inherit}
dl.main{display:grid;grid-template-columns:repeat(auto-fill,minmax(270px,1fr));gap:6px 24px;margin:0}
dl.main dt{color:var(--soft);font-size:13px;overflow-wrap:anywhere}dl.main dd{margin:0}
.run{font-weight:600;margin-right:6px;overflow-wrap:anywhere}
.run i{display:inline-block;width:10px;height:10px;border-radius:3px;background:var(--line);margin-right:6px}
.legend{position:sticky;top:0;z-index:2;display:flex;flex-wrap:wrap;gap:4px 18px;padding:8px 0;background:var(--page);
border-bottom:1px solid var(--faint)}
.legend label{display:flex;align-items:center;gap:6px;overflow-wrap:anywhere}
.legend span{color:var(--soft)}
svg.sample{width:28px;height:10px}
.warning{background:var(--warnpage);overflow-wrap:anywhere;
border-left:4px solid var(--warn);padding:8px 12px;margin:8px 0}
.warning>strong,strong.bad{color:var(--warn)}
.note{overflow-wrap:anywhere;border-left:4px solid var(--faint);padding:4px 12px;margin:8px 0}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(360px,100%),1fr));gap:16px}
figure{margin:0;padding:12px;background:var(--panel);border-radius:8px;min-width:0}
figcaption{font-size:13px}
svg.chart{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:11.5px;fill:var(--soft)}
.grid{stroke:var(--faint);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}
.line polyline{fill:none;stroke:var(--line);stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.line .raw{stroke-width:1;opacity:.4}.line .mean{stroke-width:2.4}
.dashed polyline{stroke-dasharray:5 4}
.dot{fill:var(--line)}.spot{fill:transparent}.spot:hover{fill:var(--line)}
path.bad{stroke:var(--line);stroke-width:2;fill:none}
.cross{stroke:var(--soft);stroke-dasharray:2 3;pointer-events:none}
.readout{position:fixed;z-index:3;pointer-events:none;max-width:340px;padding:6px 10px;border-radius:6px;font-size:13px;
background:var(--page);border:1px solid var(--faint);box-shadow:0 2px 10px #0004;overflow-wrap:anywhere}
.controls{display:flex;flex-wrap:wrap;gap:8px 18px;align-items:center;margin:8px 0}
input,select{font:inherit;max-width:100%}
.cards{max-height:640px;overflow-y:auto;border:1px solid var(--faint);border-radius:8px}
.heads,.card>summary{display:grid;grid-template-columns:64px 76px 92px minmax(0,1fr);gap:0 8px;padding:5px 12px}
#answers .card>summary{grid-template-columns:64px 76px minmax(0,1fr)}
.heads{position:sticky;top:0;background:var(--panel);color:var(--soft);font-size:13px}
.card{border-top:1px solid var(--faint);padding:0 0 2px}
.card>summary{cursor:pointer;font-variant-numeric:tabular-nums}
.card>summary:hover{background:var(--panel)}
.card>summary span:last-child{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.card[open]>summary{background:var(--panel)}
.card>:not(summary){margin-left:12px;margin-right:12px}
pre{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;background:var(--panel);border-radius:6px;
padding:8px 10px;margin:0 0 10px;font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(320px,100%),1fr));gap:0 16px}
details>summary{cursor:pointer}
.charts+details,.all{margin-top:20px}
@media print{.cards{max-height:none}.legend{position:static}}
"""
)

SCRIPT = """
"use strict";
(() => {
  const all = (selector, root = document) => Array.from(root.querySelectorAll(selector));
  for (const part of all(".js")) part.hidden = false;

  // Values of all lines at the step under the pointer
  const box = document.createElement("div");
  box.className = "readout";
  box.hidden = true;
  document.body.append(box);
  const read = new WeakMap();
  const spots = (chart) => {
    if (!read.has(chart)) {
      read.set(chart, all("g.line", chart).map((line) => ({
        line,
        marks: all("title", line).map((title) => {
          const mark = title.parentNode, text = title.textContent;
          title.remove();  // else the browser shows it as well
          const at = mark.getBBox();
          return {text, x: at.x + at.width / 2};
        }),
      })));
    }
    return read.get(chart);
  };
  for (const chart of all("svg.chart")) {
    const cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
    cross.setAttribute("class", "cross");
    cross.setAttribute("y1", 10);
    cross.setAttribute("y2", 192);
    cross.style.display = "none";
    chart.append(cross);
    const leave = () => { box.hidden = true; cross.style.display = "none"; };
    chart.addEventListener("pointerleave", leave);
    chart.addEventListener("pointermove", (event) => {
      const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse()).x;
      const shown = spots(chart).filter(({line, marks}) => marks.length && getComputedStyle(line).display !== "none");
      if (!shown.length) return leave();
      const nearest = (marks) => marks.reduce((a, b) => Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a);
      const near = shown.map(({line, marks}) => ({line, mark: nearest(marks)}));
      const place = nearest(near.map(({mark}) => mark)).x;
      cross.setAttribute("x1", place);
      cross.setAttribute("x2", place);
      cross.style.display = "";
      box.replaceChildren(...near.map(({line, mark}) => {
        const row = document.createElement("div");
        if (shown.length > 1) {
          const tag = document.createElement("span");
          tag.className = "run " + Array.from(line.classList).filter((name) => name !== "line").join(" ");
          tag.append(document.createElement("i"), line.dataset.name);
          row.append(tag);
        }
        row.append(mark.text);
        return row;
      }));
      box.hidden = false;
      const wide = box.offsetWidth, high = box.offsetHeight;
      box.style.left = Math.max(4, event.clientX + (event.clientX + wide + 24 > innerWidth ? -wide - 14 : 14)) + "px";
      box.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - high - 4)) + "px";
    });
  }

  // Completions: order and choice
  const controls = document.querySelector(".controls");
  if (controls) {
    const list = controls.nextElementSibling, cards = all(".card", list);
    const [order, step, contains, count] =
      [".order", ".step", ".contains", "output"].map((one) => controls.querySelector(one));
    const value = (card, key) => card.dataset[key] === "" ? NaN : Number(card.dataset[key]);
    const show = () => {
      const [key, way] = order.value.split("-"), sign = way === "up" ? 1 : -1;
      const words = contains.value.toLowerCase();
      const compare = (a, b) => {
        const [x, y] = [value(a, key), value(b, key)];
        if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
        return sign * (x - y);
      };
      list.append(...cards.sort(compare));
      for (const card of cards) {
        card.hidden = (step.value !== "" && card.dataset.step !== step.value)
          || (words !== "" && !card.textContent.toLowerCase().includes(words));
      }
      count.value = cards.filter((card) => !card.hidden).length + " of " + cards.length + " match";
    };
    controls.addEventListener("input", show);
    show();
  }

  // Settings: search
  for (const search of all(".search")) {
    search.addEventListener("input", () => {
      const words = search.value.toLowerCase();
      for (const row of all("tbody tr", search.closest("details"))) {
        row.hidden = !row.textContent.toLowerCase().includes(words);
      }
    });
  }
})();
"""

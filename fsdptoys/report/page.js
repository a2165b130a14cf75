"use strict";
(function () {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const NARROW = 600;

  // Figures take the page's colors, so they follow its light and dark themes.
  function color(name) { return getComputedStyle(root).getPropertyValue("--" + name).trim(); }

  function isDark() {
    const chosen = root.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  function short(text, width) { return text.length > width ? text.slice(0, width - 1) + "…" : text; }

  function plain(text) {
    const element = document.createElement("textarea");
    element.innerHTML = text;
    return element.value;
  }

  function layoutFor(figure, width) {
    const layout = structuredClone(figure.layout);
    const narrow = width < NARROW;
    const ink = color("ink"), soft = color("soft"), grid = color("grid");
    Object.assign(layout, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
      uirevision: "the same",  // redrawing keeps the zoom
      font: { color: ink, size: narrow ? 11 : 12.5, family: getComputedStyle(document.body).fontFamily },
      hoverlabel: { bgcolor: color("paper"), bordercolor: soft, font: { color: ink, size: 12 }, align: "left", namelength: -1 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: ink },
    });
    if (narrow) {
      layout.margin = Object.assign({}, layout.margin, { l: 46, r: 6 });
      if (!(layout.yaxis && layout.yaxis.type === "category")) layout.height = Math.min(layout.height, 330);
    }
    for (const axis of [layout.xaxis, layout.yaxis]) {
      Object.assign(axis, { gridcolor: grid, zerolinecolor: grid, linecolor: soft, tickcolor: soft, showline: true, zeroline: false });
      if (axis.type === "category") {
        axis.showgrid = false;
        const longest = narrow ? 15 : 34;
        axis.tickvals = axis.categoryarray;
        axis.ticktext = axis.categoryarray.map((name) => short(plain(name), longest).replace(/&/g, "&amp;").replace(/</g, "&lt;"));
      }
    }
    if (narrow) layout.xaxis.nticks = 6;
    for (const shape of layout.shapes || []) {
      if (shape.name === "band") shape.fillcolor = color("shade");
      else shape.line = Object.assign({}, shape.line, { color: soft });
    }
    // Labels need room; narrow screens rely on the legend.
    layout.annotations = (layout.annotations || []).filter((note) => !(narrow && note.name === "label"));
    for (const note of layout.annotations) note.font = { color: note.name === "label" ? ink : soft, size: narrow ? 10 : 11.5 };
    return layout;
  }

  function dataFor(figure) {
    const ink = color("ink"), paper = color("paper");
    return structuredClone(figure.data).map((trace) => {
      if (trace.marker && trace.marker.color === "black") {
        trace.marker.color = ink;
        if (trace.error_x) trace.error_x.color = ink;
      }
      if (trace.mode === "markers" && trace.marker) trace.marker.line = Object.assign({}, trace.marker.line, { color: paper });
      if (trace.type === "bar" && trace.marker.pattern) trace.marker.pattern.fgcolor = paper;
      if (trace.stackgroup && trace.fillpattern) trace.fillpattern.fgcolor = paper;
      return trace;
    });
  }

  // Legends are buttons, which are reachable by keyboard and wrap on small screens.
  const PATHS = {
    circle: "M14 3a4 4 0 1 0 .01 0Z", square: "M10 3h8v8h-8Z", diamond: "M14 2l5 5l-5 5l-5-5Z",
    "triangle-up": "M14 2l5 9h-10Z", "triangle-down": "M14 12l5-9h-10Z",
    cross: "M12.5 2h3v3.500h3.500v3h-3.500v3.500h-3v-3.500h-3.500v-3h3.500Z",
    x: "M10 3.500l1.500-1.500l2.500 2.700l2.500-2.700l1.500 1.500l-2.600 3.500l2.600 3.500l-1.500 1.500l-2.500-2.700l-2.500 2.700l-1.500-1.500l2.600-3.500Z",
  };
  const DASHES = { solid: "", dash: "6 3", dot: "2 2.500", dashdot: "6 2 2 2" };

  function swatch(trace) {
    const own = trace.type === "bar" ? trace.marker.color : (trace.line && trace.line.color) || (trace.marker && trace.marker.color);
    const paint = own === "black" ? "currentColor" : own;
    let inside;
    if (trace.type === "bar" || trace.stackgroup) {
      const pattern = (trace.type === "bar" ? trace.marker.pattern : trace.fillpattern).shape;
      const lines = {
        "/": "M6 14l8-14M12 14l8-14M18 14l8-14", "\\": "M2 0l8 14M8 0l8 14M14 0l8 14", x: "M6 14l8-14M16 14l8-14M4 0l8 14M14 0l8 14",
        "-": "M2 4.500h24M2 9.500h24", "|": "M8 0v14M14 0v14M20 0v14", "+": "M2 7h24M9 0v14M19 0v14", ".": "M7 4h2M13 4h2M19 4h2M10 9h2M16 9h2M22 9h2",
      }[pattern] || "";
      inside = `<rect x="3" y="1" width="22" height="12" rx="2" fill="${paint}"/><path d="${lines}" stroke="var(--paper)" stroke-width="1.4" fill="none"/>`;
    } else {
      const line = trace.mode.includes("lines") ? `<path d="M1 7h26" stroke="${paint}" stroke-width="2" stroke-dasharray="${DASHES[trace.line.dash || "solid"]}"/>` : "";
      const mark = trace.mode.includes("markers") ? `<path d="${PATHS[trace.marker.symbol]}" fill="${paint}"/>` : "";
      inside = `<g opacity="${trace.opacity || 1}">${line}${mark}</g>`;
    }
    return `<svg width="28" height="14" viewBox="0 0 28 14" aria-hidden="true">${inside}</svg>`;
  }

  function addLegend(holder, plot, figure) {
    const entries = figure.data.map((trace, index) => [trace, index]);
    if (entries.length < 2) return;
    const list = document.createElement("ul");
    list.className = "legend";
    list.setAttribute("aria-label", "Series; press to hide or show");
    for (const [trace, index] of entries) {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.innerHTML = swatch(trace);
      button.append(document.createTextNode(trace.meta));
      button.addEventListener("click", () => {
        const shown = button.getAttribute("aria-pressed") === "true";
        button.setAttribute("aria-pressed", String(!shown));
        figure.data[index].visible = !shown;
        Plotly.restyle(plot, { visible: !shown }, [index]);
      });
      const item = document.createElement("li");
      item.append(button);
      list.append(item);
    }
    holder.append(list);
  }

  const drawn = [];
  function draw(figure) {
    const plot = document.getElementById("plot-" + figure.name);
    const width = plot.clientWidth;
    Plotly.newPlot(plot, dataFor(figure), layoutFor(figure, width), {
      responsive: true, displaylogo: false, typesetMath: false, showSendToCloud: false, showLink: false, plotlyServerURL: "",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
      toImageButtonOptions: { filename: figure.name, scale: 2 },
    });
    addLegend(plot.nextElementSibling, plot, figure);
    drawn.push([plot, figure, width < NARROW]);
  }

  function redraw(onlyTurned) {
    for (const entry of drawn) {
      const [plot, figure, wasNarrow] = entry;
      const width = plot.clientWidth, narrow = width < NARROW;
      if (onlyTurned && narrow === wasNarrow) continue;
      entry[2] = narrow;
      Plotly.react(plot, dataFor(figure), layoutFor(figure, width), plot._context);
    }
  }

  // Switch between light and dark.
  const button = document.getElementById("theme");
  function name() {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", "Switch to " + (isDark() ? "light" : "dark") + " colors");
  }
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); redraw(false); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { name(); redraw(false); });
  addEventListener("resize", () => redraw(true));
  name();

  // Sort numbers before texts, with empty cells last in both directions; a third press restores the original order.
  for (const table of document.querySelectorAll("table[data-sortable]")) {
    const body = table.tBodies[0], original = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const next = { none: "ascending", ascending: "descending", descending: "none" }[head.getAttribute("aria-sort")];
      heads.forEach((other) => other.setAttribute("aria-sort", other === head ? next : "none"));
      const key = (row) => row.cells[column].dataset.sort;
      const sign = next === "descending" ? -1 : 1;
      const rows = next === "none" ? original : [...original].sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
        const [p, q] = [Number(x), Number(y)];
        if (!Number.isNaN(p) && !Number.isNaN(q)) return sign * (p - q);
        return sign * x.localeCompare(y, undefined, { numeric: true });
      });
      body.append(...rows);
    }));
  }

  for (const field of document.querySelectorAll("input[data-table]")) {
    const rows = [...document.getElementById(field.dataset.table).tBodies[0].rows];
    const output = field.parentElement.querySelector("output");
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        const fits = words.every((word) => word.startsWith("-") && word.length > 1 ? !text.includes(word.slice(1)) : text.includes(word));
        row.hidden = !fits;
        shown += fits;
      }
      output.textContent = `${shown} of ${rows.length} rows`;
    });
  }

  // Draw one figure at a time, so that a long page can be scrolled meanwhile.
  const waiting = figures.slice();
  (function next() {
    const figure = waiting.shift();
    if (!figure) { root.dataset.drawn = "true"; return; }
    draw(figure);
    setTimeout(next, 0);
  })();
})();

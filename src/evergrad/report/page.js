"use strict";
(() => {
  const root = document.documentElement;
  const preferred = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null; // by the button; else the system decides
  let printing = false;
  try { chosen = window.localStorage.getItem("evergrad-theme"); } catch { /* a file may have no storage */ }

  const dark = () => !printing && (chosen ? chosen === "dark" : preferred.matches);

  // Figures -------------------------------------------------------------------------------------------------
  const config = {
    displaylogo: false, responsive: true, displayModeBar: "hover", scrollZoom: false,
    modeBarButtons: [["toImage"]],
  };
  const merged = (below, above) => {
    const both = { ...below };
    for (const [key, value] of Object.entries(above)) {
      const nested = value && typeof value === "object" && !Array.isArray(value) && both[key];
      both[key] = nested ? merged(both[key], value) : value;
    }
    return both;
  };
  const themed = () => {
    const [text, soft, line, back] = dark()
      ? ["#e4e8ec", "#9aa5b0", "#343b44", "#1d2228"] : ["#1c2126", "#58626c", "#d5dae0", "#ffffff"];
    const axis = {
      gridcolor: line, linecolor: line, zerolinecolor: line, tickcolor: line, automargin: true,
      tickfont: { color: soft }, title: { font: { color: text } },
    };
    return {
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { color: text, size: 13, family: getComputedStyle(document.body).fontFamily },
        xaxis: axis, yaxis: axis, legend: { bgcolor: "rgba(0,0,0,0)" },
        hoverlabel: { bgcolor: back, bordercolor: line, font: { color: text }, align: "left" },
        annotationdefaults: { font: { color: text }, arrowcolor: soft },
        colorway: ["#2b7fb8", "#d55e00", "#009e73", "#c2689b", "#c78500", "#5b7fd6", "#8a7a3b", "#808890"],
        coloraxis: { colorbar: { outlinewidth: 0, tickcolor: line } },
      },
    };
  };
  const placed = (layout, width) => {
    const narrow = width < 560;
    const base = {
      margin: { l: 56, r: 16, t: layout.title ? 44 : 16, b: 48 },
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom" },
      dragmode: false,
    };
    const made = merged(base, layout);
    if (narrow) made.font = { ...(made.font || {}), size: 11 };
    made.template = themed();
    made.autosize = true;
    return made;
  };
  const figures = [...document.querySelectorAll("figure.plot")].map((box) => ({
    box, canvas: box.querySelector(".canvas"), data: JSON.parse(box.querySelector("script").textContent), drawn: false,
  }));
  const draw = (figure) => {
    if (!figure.canvas.clientWidth || !window.Plotly) return;
    const options = { ...config, toImageButtonOptions: { format: "svg", filename: figure.box.dataset.name } };
    const width = figure.canvas.clientWidth;
    figure.canvas.dataset.theme = dark() ? "dark" : "light";
    window.Plotly.react(figure.canvas, figure.data.traces, placed(figure.data.layout, width), options)
      .then(() => { figure.drawn = true; figure.box.dataset.drawn = "yes"; });
  };
  const drawAll = () => figures.forEach(draw);

  // Light and dark ------------------------------------------------------------------------------------------
  const button = document.getElementById("theme");
  const apply = () => {
    root.dataset.theme = dark() ? "dark" : "light";
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", dark() ? "Switch to light" : "Switch to dark");
    drawAll();
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    chosen = dark() ? "light" : "dark";
    try { window.localStorage.setItem("evergrad-theme", chosen); } catch { /* as above */ }
    apply();
  });
  preferred.addEventListener("change", apply);

  // Folded sections: a figure has no width before it is shown -----------------------------------------------
  for (const details of document.querySelectorAll("section > details")) {
    details.addEventListener("toggle", () => {
      if (details.open) figures.filter((figure) => details.contains(figure.box)).forEach(draw);
    });
  }
  const reveal = () => {
    const target = window.location.hash.length > 1 && document.getElementById(window.location.hash.slice(1));
    const folded = target && target.querySelector(":scope > details");
    if (folded) folded.open = true;
  };
  window.addEventListener("hashchange", reveal);

  // Printing: light, everything open, figures as wide as paper ----------------------------------------------
  let closed = [];
  const beforePrint = () => {
    if (printing) return;
    printing = true;
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((details) => { details.open = true; });
    document.body.style.width = "180mm";
    for (const table of document.querySelectorAll("table.data")) { // paper does not scroll
      table.style.zoom = Math.min(1, document.body.clientWidth / table.scrollWidth);
    }
    apply();
  };
  const afterPrint = () => {
    if (!printing) return;
    printing = false;
    closed.forEach((details) => { details.open = false; });
    document.body.style.width = "";
    document.querySelectorAll("table.data").forEach((table) => { table.style.zoom = ""; });
    apply();
  };
  window.addEventListener("beforeprint", beforePrint);
  window.addEventListener("afterprint", afterPrint);

  // Tables --------------------------------------------------------------------------------------------------
  const value = (cell, numeric) => {
    if (!("sort" in cell.dataset)) return null;
    return numeric ? Number(cell.dataset.sort) : cell.dataset.sort;
  };
  const compared = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
  for (const table of document.querySelectorAll("table.data")) {
    const heads = [...table.tHead.rows[0].cells];
    const body = table.tBodies[0];
    const original = [...body.rows];
    heads.forEach((head, index) => {
      head.querySelector("button").addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const numeric = original.every((row) => {
          const key = row.cells[index].dataset.sort;
          return key === undefined || (key !== "" && !Number.isNaN(Number(key)));
        });
        const keyed = original.map((row) => [value(row.cells[index], numeric), row]);
        keyed.sort(([a], [b]) => {
          if (a === null || b === null) return (a === null) - (b === null);
          return up ? compared(a, b) : compared(b, a);
        });
        body.append(...keyed.map(([, row]) => row));
      });
    });
  }

  // Commands ------------------------------------------------------------------------------------------------
  const copied = async (text, from) => {
    try { await navigator.clipboard.writeText(text); return true; } catch { /* not allowed: select it instead */ }
    window.getSelection().selectAllChildren(from);
    return false;
  };
  for (const command of document.querySelectorAll(".command")) {
    const press = command.querySelector(".copy");
    press.addEventListener("click", async () => {
      const code = command.querySelector("code");
      press.textContent = (await copied(code.textContent, code)) ? "Copied" : "Selected";
      window.setTimeout(() => { press.textContent = "Copy"; }, 1500);
    });
  }

  reveal();
  apply();
})();

// Hover, zoom and keys for the drawings, which are whole without them. Everything is read from the SVG itself: a curve's
// path holds its numbers (x as it is, y in 10,000 parts of the axis), and zoom is another transform of the same path.
// The function evenkeelPage.attach() makes the drawings of <main> alive, again after it was replaced. Zooms are kept by the chart's id.
"use strict";
globalThis.evenkeelPage = (() => {
  const grid = 10000;
  const zooms = new Map();  // id -> [x0, x1]
  const charts = new Map(); // id -> chart, of those in the page now

  const make = (name, attributes, parent) => {
    const element = document.createElementNS(parent.namespaceURI, name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    parent.append(element);
    return element;
  };
  const html = (name, className, parent) => {
    const element = document.createElement(name);
    element.className = className;
    parent.append(element);
    return element;
  };
  const numbers = text => text.split(" ").map(Number);

  // --- Numbers as the page writes them
  const raised = text => text.replace(/./g, c => c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[+c]);
  function figure(x, digits = 4) {
    if (!Number.isFinite(x)) return "not finite";
    if (x === 0) return "0";
    const e = Math.floor(Math.log10(Math.abs(x)));
    if (e < -4 || e > 6) {
      const [lead, power] = x.toExponential(digits - 1).split("e");
      return lead.replace("-", "−") + " × 10" + raised(String(+power));
    }
    const text = Math.abs(x).toFixed(Math.max(0, digits - 1 - e));
    const [whole, part] = text.split(".");
    const grouped = whole.length > 4 ? whole.replace(/\B(?=(\d{3})+$)/g, ",") : whole;
    return (x < 0 ? "−" : "") + grouped + (part ? "." + part : "");
  }
  const whole = x => figure(Math.round(x * 1e9) / 1e9, 7).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");  // 253, 0.5
  function ticks(low, high, wanted) {
    const raw = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(raw)), part = raw / power;
    const step = power * (part < 1.5 ? 1 : part < 3.5 ? 2 : part < 7.5 ? 5 : 10), found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * (high - low); ++n) found.push(n * step);
    return found;
  }
  // Of a logarithmic axis, from exponent to exponent: decades, or 1, 2 and 5 of each where there are few.
  function logTicks(low, high, wanted) {
    const first = Math.ceil(low - 1e-9), last = Math.floor(high + 1e-9), found = [];
    if (high - low >= 1.5 && last > first) {
      const every = Math.max(1, Math.floor((last - first + wanted) / wanted));
      for (let e = first; e <= last; e += every) found.push(e);
    } else if (high - low > 0.35) {
      for (let e = first - 1; e <= last; ++e)
        for (const digit of [1, 2, 5])
          if (e + Math.log10(digit) >= low && e + Math.log10(digit) <= high) found.push(e + Math.log10(digit));
    } else {
      for (const x of ticks(10 ** low, 10 ** high, wanted)) if (x > 0) found.push(Math.log10(x));
    }
    return found;
  }
  const tickText = x => Math.abs(x) >= 1e4 && x % 1000 === 0 ? x / 1000 + "k" : whole(x);

  // "M0 9912l1 -4 1 -2M5 ..." -> [[x, y], ...] in the path's own numbers; at one x the last counts.
  function points(path) {
    const found = [];
    for (const piece of path.getAttribute("d").match(/[Ml][^Ml]*/g) || []) {
      const values = numbers(piece.slice(1).trim());
      let [x, y] = piece[0] === "M" ? [0, 0] : found[found.length - 1];
      for (let n = 0; n + 1 < values.length; n += 2) {
        if (piece[0] === "M") [x, y] = [values[n], values[n + 1]]; else x += values[n], y += values[n + 1];
        found.push([x, y]);
      }
    }
    return found.filter((point, n) => n + 1 === found.length || found[n + 1][0] !== point[0]);
  }
  // The index of the point nearest to x.
  function nearest(list, x) {
    let low = 0, high = list.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle][0] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - list[low - 1][0] < list[low][0] - x ? low - 1 : low;
  }

  // A box beside the pointer, one a figure.
  function tipOf(figureElement) {
    const tip = html("div", "tip", figureElement);
    tip.hidden = true;
    return {
      show(svg, x, content) {
        tip.replaceChildren(...content);
        tip.hidden = false;
        const box = svg.getBoundingClientRect(), outer = figureElement.getBoundingClientRect();
        const at = box.left - outer.left + x * box.width / svg.viewBox.baseVal.width;
        const left = at + 16 + tip.offsetWidth > outer.width && at > tip.offsetWidth + 16 ? at - tip.offsetWidth - 14 : at + 14;
        tip.style.left = Math.max(0, left) + "px";
        tip.style.top = "1.6rem";
      },
      hide() { tip.hidden = true; },
    };
  }
  // Announces words to a screen reader; one for the whole page.
  function say(text) {
    let voice = document.getElementById("voice");
    if (!voice) {
      voice = html("div", "unseen", document.body);
      voice.id = "voice";
      voice.setAttribute("aria-live", "polite");
    }
    voice.textContent = text;
  }
  // The title of a drawing would pop up as a tool tip over ours.
  function takeTitle(svg) {
    const title = svg.querySelector("title");
    if (!title) return;
    svg.setAttribute("aria-label", title.textContent);
    svg.removeAttribute("aria-labelledby");
    svg.setAttribute("aria-describedby", svg.id + "-d");
    title.remove();
  }

  // A drawing of curves that answers to pointer and keys: values under a crosshair, zoom, the same place in other charts.
  class Chart {
    constructor(svg) {
      this.svg = svg;
      [this.x0, this.x1] = numbers(svg.dataset.x);
      [this.y0, this.y1] = numbers(svg.dataset.y);
      this.log = svg.dataset.log === "1";
      [this.left, this.top, this.width, this.height] = numbers(svg.dataset.box);
      this.plot = svg.querySelector("g.plot");
      this.xTicks = svg.querySelector(".axis.x .ticks");
      this.yTicks = svg.querySelector(".axis.y .ticks");
      this.guides = [...svg.querySelectorAll(".rule")];
      this.small = svg.classList.contains("small");
      this.all = [...this.plot.querySelectorAll("path.line")];
      this.curves = [...this.plot.querySelectorAll("path[data-name]")].map(path => ({
        path, name: path.dataset.name, points: null,
        get list() { return this.points || (this.points = points(path)); },
      }));
      this.events = [...svg.querySelectorAll(".event")].map(g => ({g, x: +g.dataset.at, says: g.dataset.says}));
      this.range = zooms.get(svg.id) || [this.x0, this.x1];
      if (this.range[0] < this.x0 || this.range[1] > this.x1) this.range = [this.x0, this.x1];
      this.rows = [0, grid];  // of y, in parts, from the top
      this.at = this.drag = null;
      this.addParts(svg.closest("figure"));
      this.listen();
      takeTitle(svg);
      svg.tabIndex = 0;
      svg.classList.add("alive");
      for (const title of svg.querySelectorAll(".event title")) title.remove();
      this.place();
    }

    addParts(figureElement) {
      this.tip = tipOf(figureElement);
      this.cross = make("path", {class: "cross", visibility: "hidden"}, this.svg);
      this.dots = this.curves.map(curve => make("circle", {
        class: "cross-dot " + curve.path.getAttribute("class").replace("line", ""), r: this.small ? 2.6 : 3.4, visibility: "hidden"}, this.svg));
      this.back = html("button", "back", figureElement);
      this.back.type = "button";
      this.back.textContent = "whole range";
      this.back.hidden = true;
    }

    valueOf(y) { const v = this.y1 - y / grid * (this.y1 - this.y0); return this.log ? 10 ** v : v; }
    pxOf(x) { return this.left + this.width * (x - this.range[0]) / (this.range[1] - this.range[0]); }
    pyOf(y) { return this.top + this.height * (y - this.rows[0]) / (this.rows[1] - this.rows[0]); }
    inside(x) { return Math.min(Math.max(x, this.range[0]), this.range[1]); }
    xAt(event) {
      const box = this.svg.getBoundingClientRect();
      const px = (event.clientX - box.left) * this.svg.viewBox.baseVal.width / box.width;
      return this.inside(this.range[0] + (px - this.left) / this.width * (this.range[1] - this.range[0]));
    }
    // Where there are points, the crosshair stands on one.
    snapped(x) {
      let best = x, distance = Infinity;
      for (const curve of this.curves) {
        if (!curve.list.length) continue;
        const point = curve.list[nearest(curve.list, x - this.x0)][0] + this.x0;
        if (Math.abs(point - x) < distance) best = point, distance = Math.abs(point - x);
      }
      return best;
    }
    // The part of y that the curves use between the ends of a zoom.
    fitted() {
      let [low, high] = [Infinity, -Infinity];
      for (const path of this.all) {
        const curve = this.curves.find(c => c.path === path);
        for (const [x, y] of curve ? curve.list : points(path))
          if (x + this.x0 >= this.range[0] && x + this.x0 <= this.range[1]) low = Math.min(low, y), high = Math.max(high, y);
      }
      if (!(high > low)) return [0, grid];
      const margin = 0.06 * (high - low);
      return [Math.max(0, low - margin), Math.min(grid, high + margin)];
    }

    place() {
      const {range, x0, x1} = this, scale = this.width / (range[1] - range[0]);
      const unzoomed = range[0] === x0 && range[1] === x1;
      this.rows = unzoomed ? [0, grid] : this.fitted();
      const scaleY = this.height / (this.rows[1] - this.rows[0]);
      this.plot.setAttribute("transform",
        `matrix(${scale} 0 0 ${scaleY} ${this.left - (range[0] - x0) * scale} ${this.top - this.rows[0] * scaleY})`);
      this.back.hidden = unzoomed;
      if (!unzoomed || this.xTicks.dataset.zoomed) this.placeAxes();
      for (const event of this.events) {
        const inside = event.x >= range[0] && event.x <= range[1];
        event.g.setAttribute("visibility", inside ? "visible" : "hidden");
        event.g.setAttribute("transform", `translate(${this.pxOf(event.x) - (this.left + this.width * (event.x - x0) / (x1 - x0))} 0)`);
      }
    }
    placeAxes() {
      const {left, top, width, height, y0, y1, rows, log} = this;
      this.xTicks.dataset.zoomed = "1";
      this.xTicks.replaceChildren();
      for (const x of ticks(this.range[0], this.range[1], this.small ? 3 : 7)) {
        make("path", {d: `M${this.pxOf(x)} ${top + height}v4`}, this.xTicks);
        make("text", {x: this.pxOf(x), y: top + height + 16}, this.xTicks).textContent = tickText(x);
      }
      this.yTicks.replaceChildren();
      const [low, high] = [y1 - rows[1] / grid * (y1 - y0), y1 - rows[0] / grid * (y1 - y0)];
      for (const v of (log ? logTicks : ticks)(low, high, this.small ? 3 : 5)) {
        const y = this.pyOf((y1 - v) / (y1 - y0) * grid);
        make("path", {d: `M${left} ${y}h${width}`}, this.yTicks);
        make("text", {x: left - 7, y: y + 3.8}, this.yTicks).textContent = log ? figure(10 ** v, 2) : whole(v);
      }
      for (const guide of this.guides) {
        const y = +guide.dataset.at;
        guide.setAttribute("visibility", y >= rows[0] && y <= rows[1] ? "visible" : "hidden");
        guide.setAttribute("transform", `translate(0 ${this.pyOf(y) - (top + height * y / grid)})`);
      }
    }
    zoom(low, high) {
      const {x0, x1} = this;
      if (high - low < Math.min(4, x1 - x0)) return;
      this.range = [Math.max(x0, low), Math.min(x1, high)];
      if (this.range[0] === x0 && this.range[1] === x1) zooms.delete(this.svg.id); else zooms.set(this.svg.id, this.range);
      this.hide();
      this.place();
    }

    // The crosshair at x; the values of every curve at their nearest points. Quiet: drawn, not announced.
    show(x, quiet) {
      if (x < this.range[0] || x > this.range[1]) return this.hide();
      this.at = x;
      const rows = [], gap = (this.x1 - this.x0) / 40;
      this.curves.forEach((curve, n) => {
        const list = curve.list, point = list.length ? list[nearest(list, x - this.x0)] : null, dot = this.dots[n];
        const seen = point && Math.abs(point[0] + this.x0 - x) <= gap;
        dot.setAttribute("visibility", seen ? "visible" : "hidden");
        if (!seen) return;
        dot.setAttribute("cx", this.pxOf(point[0] + this.x0));
        dot.setAttribute("cy", Math.min(Math.max(this.pyOf(point[1]), this.top), this.top + this.height));
        rows.push({name: curve.name, value: this.valueOf(point[1]), style: curve.path.getAttribute("class")});
      });
      this.cross.setAttribute("d", `M${this.pxOf(x)} ${this.top}v${this.height}`);
      this.cross.setAttribute("visibility", "visible");
      if (!quiet) this.tip.show(this.svg, this.pxOf(x), this.told(x, rows));
      return rows;
    }
    // What the box beside the pointer says.
    told(x, rows) {
      const headline = document.createElement("b");
      headline.textContent = `${this.svg.dataset.xname} ${whole(x)}`;
      const table = document.createElement("table");
      rows.sort((a, b) => b.value - a.value);
      for (const row of rows.slice(0, 16)) {
        const tr = table.insertRow(), name = tr.insertCell(), value = tr.insertCell();
        name.textContent = row.name;
        name.className = row.style.replace("line", "");
        value.textContent = figure(row.value);
      }
      const near = this.events.filter(e => Math.abs(this.pxOf(e.x) - this.pxOf(x)) < 6).map(e => {
        const p = document.createElement("p");
        p.textContent = e.says;
        return p;
      });
      return [headline, table, ...near];
    }
    hide() {
      this.at = null;
      this.cross.setAttribute("visibility", "hidden");
      for (const dot of this.dots) dot.setAttribute("visibility", "hidden");
      this.tip.hide();
    }
    // The same x in every chart that has the same axis.
    follow(x) {
      for (const other of charts.values())
        if (other !== this && other.svg.dataset.xname === this.svg.dataset.xname) x === null ? other.hide() : other.show(x, true);
    }
    leave() { this.hide(); this.follow(null); }

    listen() {
      const on = (name, action) => this.svg.addEventListener(name, action);
      on("pointermove", event => this.move(event));
      on("pointerleave", () => { if (!this.drag && document.activeElement !== this.svg) this.leave(); });
      on("pointerdown", event => {
        if (event.button !== 0 || event.pointerType === "touch") return;
        this.svg.setPointerCapture(event.pointerId);
        this.drag = {from: this.xAt(event),
                     box: make("rect", {class: "zooming", y: this.top, height: this.height, x: 0, width: 0}, this.svg)};
      });
      on("pointerup", event => {
        if (!this.drag) return;
        const x = this.xAt(event), from = this.drag.from;
        this.drag.box.remove();
        this.drag = null;
        if (Math.abs(this.pxOf(x) - this.pxOf(from)) > 6) this.zoom(Math.min(from, x), Math.max(from, x));
      });
      on("pointercancel", () => { if (this.drag) this.drag.box.remove(); this.drag = null; });
      on("dblclick", () => this.zoom(this.x0, this.x1));
      this.back.addEventListener("click", () => { this.zoom(this.x0, this.x1); this.svg.focus(); });
      on("keydown", event => this.press(event));
      on("blur", () => this.leave());
    }
    move(event) {
      const x = this.xAt(event);
      if (this.drag) {
        const [a, b] = [Math.min(this.drag.from, x), Math.max(this.drag.from, x)];
        this.drag.box.setAttribute("x", this.pxOf(a));
        this.drag.box.setAttribute("width", this.pxOf(b) - this.pxOf(a));
        return;
      }
      const place = this.snapped(x);
      this.show(place, false);
      this.follow(place);
    }
    press(event) {
      const {range} = this;
      const places = [...new Set(this.curves.flatMap(c => c.list.map(p => p[0] + this.x0)))].sort((a, b) => a - b)
          .filter(x => x >= range[0] && x <= range[1]);
      if (!places.length) return;
      const now = this.at === null ? -1 : nearest(places.map(x => [x]), this.at), stride = event.shiftKey ? 10 : 1;
      let next = now;
      if (event.key === "ArrowRight") next = now + stride;
      else if (event.key === "ArrowLeft") next = now < 0 ? places.length - 1 : now - stride;
      else if (event.key === "Home") next = 0;
      else if (event.key === "End") next = places.length - 1;
      else if (event.key === "Escape") { this.leave(); this.zoom(this.x0, this.x1); return; }
      else if (event.key === "+" || event.key === "-") {
        const middle = this.at ?? (range[0] + range[1]) / 2, half = (range[1] - range[0]) * (event.key === "+" ? 0.25 : 1);
        this.zoom(middle - half, middle + half);
        return;
      } else return;
      event.preventDefault();
      const x = places[Math.min(Math.max(next, 0), places.length - 1)], rows = this.show(x, false);
      this.follow(x);
      say(`${this.svg.dataset.xname} ${whole(x)}: ` + rows.map(r => `${r.name} ${figure(r.value)}`).join(", "));
    }
  }
  function attachChart(svg) { charts.set(svg.id, new Chart(svg)); }

  function attachHeat(svg) {
    const [left, top, width, height] = numbers(svg.dataset.box);
    const cells = svg.dataset.cells.split(";").map(row => row.split(" ")), xs = numbers(svg.dataset.xs);
    const rows = svg.dataset.rows.split("\n"), tip = tipOf(svg.closest("figure"));
    const mark = make("rect", {class: "cell-mark", visibility: "hidden"}, svg);
    let at = null;
    function show(row, column) {
      at = [row, column];
      const w = width / xs.length, h = height / cells.length;
      for (const [key, value] of Object.entries({x: left + w * column, y: top + h * row, width: Math.max(w, 2), height: Math.max(h, 2), visibility: "visible"}))
        mark.setAttribute(key, value);
      const where = `${rows[row] && rows[row] !== String(row) ? rows[row] : svg.dataset.yname + " " + (rows[row] || row)}, ${svg.dataset.xname} ${whole(xs[column])}`;
      const headline = document.createElement("b"), line = document.createElement("div");
      headline.textContent = where;
      line.textContent = `${svg.dataset.vname} ${cells[row][column] === "-" ? "not known" : figure(+cells[row][column], 3)}`;
      tip.show(svg, left + w * (column + 0.5), [headline, line]);
      return `${where}: ${line.textContent}`;
    }
    function hide() { at = null; mark.setAttribute("visibility", "hidden"); tip.hide(); }
    svg.addEventListener("pointermove", event => {
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const column = Math.floor(((event.clientX - box.left) * scale - left) / width * xs.length);
      const row = Math.floor(((event.clientY - box.top) * scale - top) / height * cells.length);
      if (row >= 0 && row < cells.length && column >= 0 && column < xs.length) show(row, column); else hide();
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", event => {
      const step = {ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0]}[event.key];
      if (event.key === "Escape") return hide();
      if (!step) return;
      event.preventDefault();
      const [row, column] = at ? [at[0] + step[0], at[1] + step[1]] : [0, 0];
      say(show(Math.min(Math.max(row, 0), cells.length - 1), Math.min(Math.max(column, 0), xs.length - 1)));
    });
    takeTitle(svg);
    svg.tabIndex = 0;
  }

  // Makes the drawings inside `root` alive; those that are so already are left alone.
  function attach(root = document.getElementById("page")) {
    for (const id of [...charts.keys()]) if (!charts.get(id).svg.isConnected) charts.delete(id);
    for (const svg of root.querySelectorAll("svg.chart:not([tabindex])")) attachChart(svg);
    for (const svg of root.querySelectorAll("svg.heat:not([tabindex])")) attachHeat(svg);
  }

  // Day and night: the system's choice, unless the button says otherwise.
  function theme() {
    const button = document.getElementById("theme"), root = document.documentElement;
    const night = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    const name = () => { button.textContent = night() ? "Light" : "Dark"; button.setAttribute("aria-label", `Switch to ${night() ? "light" : "dark"} colours`); };
    button.hidden = false;
    button.addEventListener("click", () => { root.dataset.theme = night() ? "light" : "dark"; name(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
    name();
  }

  theme();
  attach();
  return {attach};
})();

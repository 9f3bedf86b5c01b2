// The charts: uPlot draws, the legend beside it says what is seen. Colours come from the style sheet.

import { h, setText } from "./dom.js";

const AXIS_WIDTH = 62;

/** Steps of an axis for sizes: powers of two, so that its numbers are round. */
export const SIZE_STEPS = Array.from({ length: 50 }, (_, power) => 2 ** power);

/** `series`: [{name, label, colour (a custom property), value(point)}]; more may come with `setSeries`. */
export class Chart {
  constructor({ title, series, format, onAxis, steps, ceiling, empty, fillArea = true }) {
    Object.assign(this, { title, series, format, onAxis, steps, ceiling, fillArea });
    this.points = [];
    this.seconds = 300;
    this.legend = h("ul", { class: "legend" });
    this.plot = h("div", { class: "plot", role: "img" });
    this.empty = h("p", { class: "empty" }, empty);
    this.element = h(
      "article",
      { class: "card chart" },
      h("h3", {}, title),
      this.legend,
      this.plot,
    );
    this.uplot = null;
    new ResizeObserver(() => this.resize()).observe(this.plot);
    document.addEventListener("themechange", () => this.rebuild());
  }

  setSeries(series) {
    if (series.map((one) => one.name).join() === this.series.map((one) => one.name).join()) return;
    this.series = series;
    this.rebuild();
  }

  update(points, seconds) {
    this.points = points;
    this.seconds = seconds;
    if (!this.uplot && points.length && this.series.length) this.rebuild();
    this.draw();
  }

  draw() {
    const nothing = this.series.length === 0 || !this.points.some((point) => this.series.some((one) => one.value(point)));
    this.plot.classList.toggle("nothing", nothing);
    if (nothing !== Boolean(this.empty.parentElement)) {
      if (nothing) this.plot.append(this.empty);
      else this.empty.remove();
    }
    this.plot.setAttribute("aria-label", this.inWords());
    this.drawLegend(this.points.at(-1));
    if (!this.uplot) return;
    const end = this.points.at(-1)?.at ?? 0;
    this.uplot.setData([this.points.map((point) => point.at), ...this.series.map((one) => this.points.map(one.value))], false);
    this.uplot.batch(() => {
      this.uplot.setScale("x", { min: end - this.seconds, max: end });
      const shown = this.points.filter((point) => point.at >= end - this.seconds);
      const top = Math.max(0, ...shown.flatMap((point) => this.series.map((one) => one.value(point) ?? 0)));
      this.uplot.setScale("y", { min: 0, max: this.ceiling ?? (top > 0 ? top * 1.12 : 1) });
    });
  }

  inWords() {
    const last = this.points.at(-1);
    if (!last || this.series.length === 0) return `${this.title}: no data yet`;
    return `${this.title}: ${this.series.map((one) => `${one.label} ${this.format(one.value(last))}`).join(", ")}`;
  }

  drawLegend(point) {
    if (this.legend.children.length !== this.series.length || this.legend.names !== this.names) {
      this.legend.names = this.names;
      this.legend.replaceChildren(
        ...this.series.map((one) => h("li", {}, h("span", { class: `swatch ${one.swatch}` }), one.label, h("b"))),
      );
    }
    this.series.forEach((one, index) => {
      setText(this.legend.children[index].lastChild, point ? this.format(one.value(point)) : "–");
    });
  }

  get names() {
    return this.series.map((one) => one.name).join();
  }

  rebuild() {
    this.uplot?.destroy();
    this.uplot = null;
    if (!this.points.length || !this.series.length || this.plot.clientWidth === 0) return;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = {
      stroke: colour("--muted"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false },
      font: "12px system-ui, sans-serif",
    };
    const line = (one) => ({
      label: one.label,
      stroke: colour(one.colour),
      fill: this.fillArea ? `color-mix(in srgb, ${colour(one.colour)} 12%, transparent)` : undefined,
      width: 2,
      points: { show: false },
      spanGaps: false,
    });
    this.uplot = new uPlot(
      {
        width: this.plot.clientWidth,
        height: this.plot.clientHeight,
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
        scales: { x: { time: true, auto: false }, y: { auto: false } },
        axes: [
          { ...axis, space: 70, size: 28, values: (_, splits) => splits.map(clock) },
          { ...axis, space: 36, size: AXIS_WIDTH, gap: 6, incrs: this.steps, values: (_, splits) => splits.map(this.onAxis) },
        ],
        series: [{}, ...this.series.map(line)],
        padding: [10, 10, 0, 0],
        hooks: { setCursor: [(plot) => this.drawLegend(this.points[plot.cursor.idx] ?? this.points.at(-1))] },
      },
      [[], ...this.series.map(() => [])],
      this.plot,
    );
    this.draw();
  }

  resize() {
    if (!this.uplot) return this.rebuild();
    this.uplot.setSize({ width: this.plot.clientWidth, height: this.plot.clientHeight });
  }
}

function clock(seconds) {
  const time = new Date(seconds * 1000);
  const two = (number) => String(number).padStart(2, "0");
  const text = `${two(time.getHours())}:${two(time.getMinutes())}`;
  return time.getSeconds() ? `${text}:${two(time.getSeconds())}` : text;
}

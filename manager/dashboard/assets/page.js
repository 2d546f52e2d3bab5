// Shows one run; the server writes COLOURS and SHAPE_COLOURS before this. The token stands behind the # of the address and travels in a header alone.

const POLL_MS = 1000;
const SVG = "http://www.w3.org/2000/svg";
const at = (id) => document.getElementById(id);

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function drawn(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function figure(name, value) {
  const box = element("div", undefined, "figure");
  box.append(element("b", value), element("span", name));
  return box;
}

const number = (value, digits) => (value === null ? "-" : value.toFixed(digits));
const counted = (count, one) => (count === 1 ? `1 ${one}` : `${count} ${one}s`);
const short = (value) => `${Number(value.toPrecision(4))}`;

function showFigures(run) {
  const steps = run.num_steps === null ? `${run.version}` : `${run.version} / ${run.num_steps}`;
  const figures = [
    figure("now", run.doing), figure("shape P x D", run.shape ?? "-"), figure("steps done", steps),
    figure("examples/s", number(run.examples_per_s, 1)), figure("loss", number(run.loss, 4)),
  ];
  if (run.learning_rates !== null) {
    const rates = [...new Set(run.learning_rates.map(short))];
    figures.push(figure("learning rate", rates.join(" to ")));
  }
  for (const [name, value] of Object.entries(run.metrics)) figures.push(figure(name, short(value)));
  if (run.saved_version !== null) {
    figures.push(figure("newest checkpoint", `after ${counted(run.saved_version, "step")}`));
  }
  if (run.next_save !== null) {
    const next = figure("next checkpoint", `in ${duration(Math.max(0, run.next_save.due_s - run.time_s))}`);
    next.title = run.next_save.why;
    figures.push(next);
  }
  if (run.dollars !== null) figures.push(figure("dollars so far", `$${run.dollars.toFixed(4)}`));
  if (run.remaining?.end_usd) {
    const [expected, low, high] = run.remaining.end_usd.map((usd) => `$${usd.toFixed(4)}`);
    const end = figure("dollars at the end, about", expected);
    end.title = `${low} to ${high} in about 3 of 4 runs, with pauses and losses as often as so far`;
    figures.push(end);
  }
  if (run.dollars_on_demand !== null) figures.push(figure("the same on demand", `$${run.dollars_on_demand.toFixed(4)}`));
  at("figures").replaceChildren(...figures);
}

function showGrid(run) {
  const rows = run.grid.map((replica, index) => {
    const row = element("tr");
    row.append(element("th", `replica ${index}`));
    for (const cell of replica) row.append(element("td", cell.worker || "none", cell.state));
    return row;
  });
  const head = element("tr");
  head.append(element("th", ""));
  const longest = run.grid.reduce((most, replica) => (replica.length > most.length ? replica : most), []);
  longest.forEach((_, stage) => head.append(element("th", `stage ${stage}`)));
  const top = element("thead");
  top.append(head);
  at("grid").replaceChildren(...(rows.length ? [top, ...rows] : [element("caption", "no shape is formed")]));
  at("others").replaceChildren(
    ...run.others.map(({ worker, state }) => element("span", `${worker}: ${state === "ready" ? "spare" : state}`, `worker ${state}`)));
}

function duration(seconds) {
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

function showShapes(run) {
  const width = Math.max(run.time_s - run.start_s, 1e-3), colours = new Map();
  const bands = run.shapes.flatMap(([start, shape], index) => {
    if (shape === null) return [];
    const end = index + 1 < run.shapes.length ? run.shapes[index + 1][0] : run.time_s;
    if (!colours.has(shape)) colours.set(shape, SHAPE_COLOURS[colours.size % SHAPE_COLOURS.length]);
    const share = Math.max(0, (end - start) / width);
    const band = element("div", share > 0.04 ? shape : "");
    band.title = `${shape} from ${duration(start - run.start_s)} for ${duration(end - start)}`;
    band.style.left = `${Math.max(0, (start - run.start_s) / width) * 100}%`;
    band.style.width = `${share * 100}%`;
    band.style.background = colours.get(shape);
    return [band];
  });
  at("shapes").replaceChildren(...bands);
  at("clock").replaceChildren(element("span", "0 s"), element("span", duration(run.time_s - run.start_s)));
}

// Points (time, value) between two times; values start at zero where that is asked for. Digits: null for four in all.
function showSeries(id, points, from, to, digits, fromZero) {
  if (points.length < 2) {
    at(id).replaceChildren(element("span", "nothing yet"));
    return;
  }
  const values = points.map((point) => point[1]), span = Math.max(to - from, 1e-9);
  let low = fromZero ? 0 : Math.min(...values), high = Math.max(...values);
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const range = high - low;
  const path = points.map(([time, value]) =>
    `${((time - from) / span * 500).toFixed(1)},${(146 - (value - low) / range * 142).toFixed(1)}`).join(" ");
  const plot = drawn("svg", { viewBox: "0 0 500 150", preserveAspectRatio: "none" });
  for (const [x1, y1, x2, y2, stroke] of [[0, 4, 500, 4, "#e4e8ec"], [0, 75, 500, 75, "#e4e8ec"], [0, 146, 500, 146, "#8795a1"], [0, 0, 0, 150, "#8795a1"]]) {
    plot.append(drawn("line", { x1, y1, x2, y2, stroke, "vector-effect": "non-scaling-stroke" }));
  }
  plot.append(drawn("polyline", { points: path, fill: "none", stroke: "#2f6db3", "stroke-width": 1.8, "vector-effect": "non-scaling-stroke" }));
  const label = (value) => (digits === null ? short(value) : value.toFixed(Number.isInteger(value) ? digits : digits || 1));
  const clock = element("div", undefined, "axis");
  clock.append(element("span", "0 s"), element("span", duration(span / 2)), element("span", duration(span)));
  const marks = [["high", high], ["middle", (low + high) / 2], ["low", low]].map(([name, value]) => element("span", label(value), name));
  at(id).replaceChildren(...marks, plot, clock);
}

// Learning rate and metrics: as many plots as there are, made when they first come.
function showTraining(run) {
  const series = Object.entries({ ...(run.rates.length ? { "learning rate": run.rates } : {}), ...run.metric_points });
  if (at("training").childElementCount !== series.length) {
    at("training").replaceChildren(...series.map(([name], place) => {
      const box = element("div"), plot = element("div", undefined, "plot");
      plot.id = `training-${place}`;
      box.append(element("h2", name), plot);
      return box;
    }));
  }
  series.forEach(([, points], place) => showSeries(`training-${place}`, points, run.start_s, run.time_s, null, false));
}

function showEvaluations(run) {
  const names = [...new Set(run.evaluations.flatMap((one) => Object.keys(one.metrics)))];
  const head = element("tr");
  head.append(...["version", "loss", ...names].map((name) => element("th", name)));
  const rows = [...run.evaluations].reverse().map((one) => {
    const row = element("tr");
    const values = [one.loss, ...names.map((name) => one.metrics[name] ?? null)];
    row.append(element("td", `${one.version}`), ...values.map((value) => element("td", value === null ? "-" : short(value))));
    return row;
  });
  at("evaluated").hidden = !rows.length;
  at("evaluations").replaceChildren(head, ...rows);
}

// The same points as steps, the last one drawn on until now.
function steps(points, now) {
  return points.flatMap(([time, value], index) => [[time, value], [index + 1 < points.length ? points[index + 1][0] : now, value]]);
}

function showParts(run) {
  const whole = Object.values(run.worker_seconds).reduce((sum, part) => sum + part, 0);
  const bars = [], legend = [];
  for (const [part, seconds] of Object.entries(run.worker_seconds)) {
    const share = whole ? seconds / whole * 100 : 0;
    const bar = element("div");
    bar.style.width = `${share}%`;
    bar.style.background = COLOURS[part];
    bars.push(bar);
    const entry = element("span"), mark = element("i");
    mark.style.background = COLOURS[part];
    const dollars = run.part_dollars === null ? "" : `, $${run.part_dollars[part].toFixed(4)}`;
    entry.append(mark, `${PART_WORDS[part]} ${share.toFixed(1)} %${dollars}`);
    legend.push(entry);
  }
  at("parts").replaceChildren(...bars);
  at("legend").replaceChildren(...legend);
}

function showEvents(run) {
  at("events").replaceChildren(...[...run.events].reverse().map((event) =>
    element("li", `${(event.time_s - run.start_s).toFixed(1).padStart(8)} s  ${event.sentence}`)));
}

function show(run) {
  document.title = `${run.job}: ${run.shape ?? run.phase}, steps done: ${run.version}`;
  at("job").textContent = run.job;
  const left = run.remaining === null ? "" : `, ${run.remaining.text}`;
  at("headline").textContent = `${run.phase === "ended" ? "ended after" : "running for"} ${duration(run.time_s - run.start_s)}${left}`;
  showFigures(run);
  showGrid(run);
  showShapes(run);
  showSeries("counts", steps(run.counts, run.time_s), run.start_s, run.time_s, 0, true);
  showSeries("speeds", run.speeds, run.start_s, run.time_s, 1, true);
  showSeries("losses", run.losses, run.start_s, run.time_s, 3, false);
  showTraining(run);
  showEvaluations(run);
  showParts(run);
  showEvents(run);
  at("run").hidden = false;
  document.body.dataset.version = run.version;
}

async function refresh() {
  try {
    const answer = await fetch("api/run", { headers: { Authorization: `Bearer ${location.hash.slice(1)}` } });
    const told = await answer.json();
    if (answer.ok) show(told);
    at("problem").textContent = answer.ok ? "" : told.error;
  } catch {
    at("problem").textContent = "the manager does not answer: the run has ended, or is being taken over";
  }
  setTimeout(refresh, POLL_MS);
}

refresh();

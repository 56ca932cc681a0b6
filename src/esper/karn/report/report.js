"use strict";
(() => {
  // A page that is updated while it is open replaces figures and data, and then sends "esper-changed"; the words, the slider and
  // the list of environments stay.
  const tell = (cell) => { document.getElementById("words").textContent = cell.dataset.words; };
  const listen = (figure) => {
    if (figure.listens) return;
    figure.listens = true;
    const cells = [...figure.querySelectorAll(".stay")];
    const chosen = () => cells.findIndex((cell) => cell.classList.contains("chosen"));
    const choose = (index) => {
      const before = chosen(), cell = cells[Math.max(0, Math.min(cells.length - 1, index))];
      if (before >= 0) cells[before].classList.remove("chosen");
      cell.classList.add("chosen");
      tell(cell);
    };
    figure.addEventListener("click", (event) => { const at = cells.indexOf(event.target); if (at >= 0) choose(at); });
    figure.addEventListener("mouseover", (event) => { if (cells.includes(event.target)) tell(event.target); });
    figure.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (by && cells.length) { event.preventDefault(); choose(chosen() + by); }
    });
  };
  const add = (parent, tag, text, style) => {
    const element = parent.appendChild(document.createElement(tag));
    element.textContent = text;
    if (style) element.className = style;
    return element;
  };
  const draw = (data) => {
    const { slots, blueprints, stages, envs, steps, stage, seed, alpha } = data;
    const network = document.getElementById("network"), counts = document.getElementById("counts");
    const t = Number(document.getElementById("step").value), e = Number(document.getElementById("env").value);
    const at = (env, s) => (t * envs + env) * slots.length + s;
    document.getElementById("step-shown").textContent = `step ${steps[t]}`;
    network.replaceChildren();
    const said = [];
    add(network, "span", "input");
    slots.forEach((slot, s) => {
      const place = at(e, s), planted = seed[place] >= 0;
      add(network, "span", `host up to ${slot}`);
      if (!planted) {
        if (stages[stage[place]] === "EMBARGOED") add(network, "span", `${slot} is EMBARGOED: empty, not to be planted yet`, "open");
        return;
      }
      const line = `+ ${blueprints[seed[place]]} (${stages[stage[place]]}, alpha ${alpha[place] / 100})`;
      add(network, "span", line, stages[stage[place]] === "FOSSILIZED" ? "seed" : "seed open");
      said.push(`${slot}: ${line}`);
    });
    add(network, "span", "rest of the host");
    network.setAttribute("aria-label", `environment ${e} at step ${steps[t]}: ${said.join("; ") || "no seed"}`);
    counts.replaceChildren(counts.caption);
    const head = counts.createTHead().insertRow();
    for (const name of ["slot", ...blueprints, "empty"]) { const cell = add(head, "th", name); cell.scope = "col"; }
    const body = counts.createTBody();
    slots.forEach((slot, s) => {
      const found = new Array(blueprints.length + 1).fill(0);
      for (let each = 0; each < envs; each += 1) { const k = seed[at(each, s)]; found[k < 0 ? blueprints.length : k] += 1; }
      const row = body.insertRow(), name = add(row, "th", slot);
      name.scope = "row";
      for (const count of found) {
        const cell = add(row, "td", String(count));
        cell.style.backgroundColor = `color-mix(in srgb, var(--grown) ${Math.round(40 * count / envs)}%, transparent)`;
      }
    });
  };
  let data = null;
  const read = () => {
    for (const figure of document.querySelectorAll("svg.timeline")) listen(figure);
    const source = document.getElementById("data"), map = document.getElementById("map");
    if (!source) return;
    data = JSON.parse(source.textContent);
    const slider = document.getElementById("step"), env = document.getElementById("env"), atEnd = slider.value === slider.max;
    slider.max = String(data.steps.length - 1);
    if (atEnd) slider.value = slider.max;
    while (env.length > data.envs) env.remove(env.length - 1);
    for (let e = env.length; e < data.envs; e += 1) env.add(new Option(String(e), String(e)));
    if (map.hidden) {
      map.hidden = false;
      slider.addEventListener("input", () => draw(data));
      env.addEventListener("change", () => draw(data));
    }
    draw(data);
  };
  document.addEventListener("esper-changed", read);
  read();
})();

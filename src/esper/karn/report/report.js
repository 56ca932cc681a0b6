"use strict";
(() => {
  const words = document.getElementById("words");
  const tell = (cell) => { words.textContent = cell.dataset.words; };
  for (const figure of document.querySelectorAll("svg.timeline")) {
    const cells = [...figure.querySelectorAll(".stay")];
    let chosen = -1;
    const choose = (index) => {
      if (chosen >= 0) cells[chosen].classList.remove("chosen");
      chosen = Math.max(0, Math.min(cells.length - 1, index));
      cells[chosen].classList.add("chosen");
      tell(cells[chosen]);
    };
    figure.addEventListener("click", (event) => { const at = cells.indexOf(event.target); if (at >= 0) choose(at); });
    figure.addEventListener("mouseover", (event) => { if (cells.includes(event.target)) tell(event.target); });
    figure.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (by && cells.length) { event.preventDefault(); choose(chosen + by); }
    });
  }
  const source = document.getElementById("data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const { slots, blueprints, stages, envs, steps, stage, seed, alpha } = data;
  const slider = document.getElementById("step"), env = document.getElementById("env"), shown = document.getElementById("step-shown");
  const network = document.getElementById("network"), counts = document.getElementById("counts");
  for (let e = 0; e < envs; e += 1) env.add(new Option(String(e), String(e)));
  const add = (parent, tag, text, style) => {
    const element = parent.appendChild(document.createElement(tag));
    element.textContent = text;
    if (style) element.className = style;
    return element;
  };
  const at = (t, e, s) => (t * envs + e) * slots.length + s;
  const draw = () => {
    const t = Number(slider.value), e = Number(env.value);
    shown.textContent = `step ${steps[t]}`;
    network.replaceChildren();
    const said = [];
    add(network, "span", "input");
    slots.forEach((slot, s) => {
      const place = at(t, e, s), planted = seed[place] >= 0;
      add(network, "span", `host up to ${slot}`);
      if (!planted) return;
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
      for (let each = 0; each < envs; each += 1) { const k = seed[at(t, each, s)]; found[k < 0 ? blueprints.length : k] += 1; }
      const row = body.insertRow(), name = add(row, "th", slot);
      name.scope = "row";
      for (const count of found) {
        const cell = add(row, "td", String(count));
        cell.style.backgroundColor = `color-mix(in srgb, var(--grown) ${Math.round(40 * count / envs)}%, transparent)`;
      }
    });
  };
  document.getElementById("map").hidden = false;
  slider.addEventListener("input", draw);
  env.addEventListener("change", draw);
  draw();
})();

"use strict";
(() => {
  // Follows a page: asks the server whether it has changed, and replaces the parts that differ. The slider, the list of
  // environments, focus, ticks, and what is scrolled to stay. Runs before report.js, so that `last` is what the server sent.
  const content = document.getElementById("content"), state = document.getElementById("live");
  if (!content || !content.dataset.content) return;
  let last = content.cloneNode(true), version = content.dataset.version, pressed = false;
  const KEPT = new Set(["map", "words"]), PARTS = new Set(["MAIN", "SECTION"]);
  const EVERY = 500;  // pause between two questions [milliseconds]
  const say = (words) => { if (state.textContent !== words) state.textContent = words; };
  const reach = (node) => [node, ...node.querySelectorAll("a[href], button, input, select, [tabindex]")];
  const keys = (parent) => {
    const seen = new Map(), found = new Map();
    for (const child of parent.children) {
      const kind = `${child.tagName} ${child.getAttribute("class") || ""}`, count = seen.get(kind) || 0;
      seen.set(kind, count + 1);
      found.set(child.id || `${kind} ${count}`, child);
    }
    return found;
  };
  const cellOf = (figure) => {
    const cell = figure.querySelector(".chosen");
    if (!cell) return null;
    const row = [...figure.querySelectorAll(".stay")].filter((each) => each.getAttribute("y") === cell.getAttribute("y"));
    return { y: cell.getAttribute("y"), place: row.indexOf(cell) };
  };
  const replace = (live, fresh) => {
    const node = document.importNode(fresh, true), focus = reach(live).indexOf(document.activeElement);
    const chosen = [...live.querySelectorAll("svg.timeline")].map(cellOf), left = live.scrollLeft;
    for (const input of node.querySelectorAll("input[id]")) {
      const before = document.getElementById(input.id);
      if (before) input.checked = before.checked;
    }
    live.replaceWith(node);
    node.scrollLeft = left;
    [...node.querySelectorAll("svg.timeline")].forEach((figure, index) => {
      if (!chosen[index]) return;
      const row = [...figure.querySelectorAll(".stay")].filter((each) => each.getAttribute("y") === chosen[index].y);
      if (row[chosen[index].place]) row[chosen[index].place].classList.add("chosen");
    });
    if (focus >= 0 && reach(node)[focus]) reach(node)[focus].focus({ preventScroll: true });
    return node;
  };
  const merge = (live, old, fresh, moved) => {
    if (old && (old.isEqualNode(fresh) || KEPT.has(fresh.id))) return live;
    if (old && (live === content || PARTS.has(fresh.tagName))) {
      mergeChildren(live, old, fresh, moved);
      return live;
    }
    const node = replace(live, fresh);
    moved.set(live, node);
    return node;
  };
  const mergeChildren = (live, old, fresh, moved) => {
    const lives = keys(live), olds = keys(old), wanted = [];
    for (const [key, child] of keys(fresh)) {
      const there = lives.get(key);
      wanted.push(there ? merge(there, olds.get(key), child, moved) : document.importNode(child, true));
    }
    const stays = new Set(wanted);
    for (const child of [...live.children]) if (!stays.has(child)) child.remove();
    let at = live.firstElementChild;
    for (const child of wanted) {
      if (child === at) at = at.nextElementSibling;
      else live.insertBefore(child, at);
    }
  };
  const seen = () => [...content.querySelectorAll("section > *")].find((node) => node.getBoundingClientRect().bottom > 0);
  const update = (text) => {
    const fresh = new DOMParser().parseFromString(`<div id="content">${text}</div>`, "text/html").getElementById("content");
    const anchor = window.scrollY > 0 ? seen() : null, top = anchor ? anchor.getBoundingClientRect().top : 0, moved = new Map();
    mergeChildren(content, last, fresh, moved);
    last = fresh;
    document.dispatchEvent(new Event("esper-changed"));
    const now = anchor && (moved.get(anchor) || anchor);
    if (now && now.isConnected) window.scrollBy({ top: now.getBoundingClientRect().top - top, behavior: "instant" });
  };
  const load = async () => {
    try {
      const answer = await fetch(content.dataset.content, { headers: { "X-Version": version } });
      const text = answer.status === 200 ? await answer.text() : null;
      if (text !== null && !pressed) {  // nothing moves while the slider is dragged
        version = answer.headers.get("X-Version");
        update(text);
      }
      if (!answer.ok) say("The run cannot be shown as it is now; reload the page to see why.");
      if (answer.status === 404) return;  // the run was removed
      if (answer.headers.get("X-Ended")) return say("The run has ended; this page is complete.");
      if (answer.ok) say("Changes appear by themselves.");
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      say("The connection was lost; it is tried again.");
    }
    setTimeout(load, EVERY);
  };
  document.addEventListener("pointerdown", () => { pressed = true; });
  for (const name of ["pointerup", "pointercancel", "blur"]) window.addEventListener(name, () => { pressed = false; });
  load();
})();

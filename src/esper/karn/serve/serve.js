"use strict";
(() => {
  // Follows a page: the server says that it has changed, and the parts that differ are replaced. The slider, the list of
  // environments, focus, ticks, and what is scrolled to stay. Runs before report.js, so that `last` is what the server sent.
  const content = document.getElementById("content"), state = document.getElementById("live");
  if (!content || !content.dataset.live) return;
  let last = content.cloneNode(true), version = content.dataset.version, pressed = false, asked = false, busy = false;
  const KEPT = new Set(["map", "words"]), PARTS = new Set(["MAIN", "SECTION"]);
  const LOST = "The connection was lost; it is tried again.";
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
    if (pressed || busy) { asked = true; return; }
    busy = true;
    asked = false;
    try {
      const answer = await fetch(content.dataset.content);
      if (answer.ok) {
        const text = await answer.text(), next = answer.headers.get("X-Version");
        if (next !== version) { version = next; update(text); }
      } else say("The run cannot be shown as it is now; reload the page to see why.");
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      say(LOST);  // the events say when there is a connection again
    } finally {
      busy = false;
      if (asked) load();
    }
  };
  const release = () => { pressed = false; if (asked) load(); };
  document.addEventListener("pointerdown", () => { pressed = true; });  // nothing moves while the slider is dragged
  for (const name of ["pointerup", "pointercancel", "blur"]) window.addEventListener(name, release);
  const stream = new EventSource(content.dataset.live);
  stream.addEventListener("open", () => say("Changes appear by themselves."));
  stream.addEventListener("changed", (event) => { if (event.data !== version) load(); });
  stream.addEventListener("ended", () => { stream.close(); say("The run has ended; this page is complete."); });
  stream.addEventListener("error", () => say(stream.readyState === EventSource.CLOSED ? "No connection; reload the page." : LOST));
})();

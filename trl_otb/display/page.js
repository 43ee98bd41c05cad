"use strict";
const KINDS = { // of numbers per token; name, meaning
  push: ["push", "advantage × √energy: how much training changes the token. Blue: more of this, orange: less"],
  advantage: ["advantage", "(return − baseline) / scale: what the loss multiplies the token's log-probability by"],
  baseline: ["baseline", "what is subtracted from the return: what was expected at this point, plus the luck of later tokens"],
  energy: ["energy", "0: the policy was sure of this token; towards 2: it was sure of another one"],
  logp: ["log-probability", "how probable the policy thought the token"],
};
const SIGNED = ["push", "advantage"];
const NAMES = Object.fromEntries(Object.entries(KINDS).map(([kind, [name]]) => [kind, name]));
Object.assign(NAMES, { grpo_push: "push under GRPO", grpo_advantage: "advantage under GRPO" });
const SORTS = { // of prompts; name, and a number of the step's page
  order: ["order", null],
  reward: ["lowest reward", p => p.reward ?? Infinity],
  spread: ["rewards that vary most", p => -(p.spread ?? -1)],
  length: ["longest completion", p => -p.length],
  push: ["largest push", p => -p.push],
  distance: ["farthest from GRPO", p => -p.distance],
};
const SHOWN = 2000; // tokens of a completion, before a click shows more
const LONG = 100; // tokens of a completion that has a strip
const SHADES = 24; // of a colour
const KEPT = 4; // decoded steps
const POINTS = 1000; // of a curve

const $ = id => document.getElementById(id);
function make(tag, props = {}, ...children) {
  const element = Object.assign(document.createElement(tag), props);
  element.append(...children);
  return element;
}
const modified = e => e.altKey || e.ctrlKey || e.metaKey || e.shiftKey;
function number(x, digits = 4) {
  if (x == null || Number.isNaN(x)) return "–";
  return Math.abs(x) >= 1000 || (x && Math.abs(x) < .001) ? x.toExponential(2) : String(+x.toPrecision(digits));
}
const unsigned = x => number(Math.abs(x), 3);
const mean = values => values.length ? values.reduce((sum, x) => sum + x, 0) / values.length : null;

let runs = [], steps = []; // recorded steps: {block, mode, step, about, name}; those of the chosen run
let at = 0, prompt = 0, now = null, other = null, cursor = null, link = "", turn = 0, most = 1;
const paints = { more: "", less: "", plain: "" }; // red, green and blue, which a dark mode changes
const charts = new Set(); // numbers of completions whose chart is open
const decodedSteps = new Map(); // promises of pages, the latest last

// A recorded step: see `recorded` in record.py

async function unpacked(step) {
  const packet = atob(step.block.textContent), bytes = new Uint8Array(packet.length);
  for (let i = 0; i < packet.length; i++) bytes[i] = packet.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const all = new Uint8Array(await new Response(stream).arrayBuffer()), end = all.indexOf(0);
  const page = JSON.parse(new TextDecoder().decode(all.subarray(0, end))), size = page.tokens;
  const numbers = {};
  page.columns.forEach(([name, unit, differences], k) => {
    const low = end + 1 + 2 * k * size, high = low + size, values = numbers[name] = new Float32Array(size);
    for (let i = 0, last = 0; i < size; i++) {
      const zigzag = all[low + i] | all[high + i] << 8, x = (zigzag >>> 1) ^ -(zigzag & 1);
      last = differences ? (last + x) << 16 >> 16 : x; // modulo 2¹⁶
      values[i] = last * unit;
    }
  });
  let start = 0;
  for (const p of page.prompts) for (const c of p.completions) {
    Object.assign(c, { page, start, of: p });
    start += c.tokens;
  }
  page.numbers = numbers;
  page.values = {};
  page.at = step;
  page.kinds = [...Object.keys(KINDS), "grpo_push", "grpo_advantage"].filter(kind => valuesOf(page, kind));
  page.prompts.forEach(measure);
  return page;
}
function decoded(step) {
  const page = decodedSteps.get(step) || unpacked(step);
  decodedSteps.delete(step); decodedSteps.set(step, page);
  if (decodedSteps.size > KEPT) decodedSteps.delete(decodedSteps.keys().next().value);
  return page;
}
function valuesOf(page, kind) { // of all tokens of a step, NaN where there is none; null if it is not recorded
  if (kind in page.values) return page.values[kind];
  const { numbers } = page, values = new Float32Array(page.tokens).fill(NaN), first = page.prompts[0].completions[0];
  const roots = numbers.loss_energy || numbers.energy;
  const advantages = numbers.prefix || numbers.advantage || "advantage" in first;
  const has = { energy: numbers.energy, logp: numbers.logp, advantage: advantages, baseline: advantages, grpo_advantage: "grpo" in first };
  has.push = has.advantage && roots; has.grpo_push = has.grpo_advantage && roots;
  if (!has[kind]) return page.values[kind] = null;
  const advantage = numbers.prefix ? (c, i) => c.reward === null ? 0 : (returned(c, i) - expected(c, i)) / (c.scale ?? Infinity)
    : numbers.advantage ? (c, i) => numbers.advantage[i] : c => c.advantage;
  const find = {
    energy: (c, i) => numbers.energy[i] ** 2,
    logp: (c, i) => -(numbers.logp[i] ** 2),
    advantage,
    push: (c, i) => advantage(c, i) * roots[i],
    baseline: numbers.prefix ? expected : (c, i) => {
      if (c.baseline !== undefined) return c.baseline;
      return returned(c, i) == null || c.scale == null ? NaN : returned(c, i) - advantage(c, i) * c.scale;
    },
    grpo_advantage: c => c.grpo,
    grpo_push: (c, i) => c.grpo * roots[i],
  }[kind];
  for (const p of page.prompts) for (const c of p.completions) for (let i = c.start; i < c.start + c.tokens; i++)
    if (numbers.generated[i]) values[i] = find(c, i) ?? NaN;
  return page.values[kind] = values;
}
const start = (c, i) => c.page.numbers.b0 ? c.page.numbers.b0[i] : c.b0;
const expected = (c, i) => start(c, i) + c.page.numbers.prefix[i] + c.page.numbers.luck[i]; // B
const returned = (c, i) => c.page.numbers.returns ? c.page.numbers.returns[i] : c.reward;
const of = (c, kind, i) => { const values = valuesOf(c.page, kind); return values ? values[c.start + i] : NaN; };
function measure(p) { // what prompts are sorted by
  const rewards = p.completions.map(c => c.reward).filter(r => r !== null);
  p.reward = mean(rewards);
  p.spread = rewards.length ? Math.sqrt(mean(rewards.map(r => (r - p.reward) ** 2))) : null;
  p.length = Math.max(...p.completions.map(c => c.tokens));
  p.push = p.distance = 0;
  let squares = 0, count = 0;
  for (const c of p.completions) for (let i = 0; i < c.tokens; i++) {
    const push = of(c, "push", i) || 0;
    p.push = Math.max(p.push, Math.abs(push));
    if (c.page.numbers.generated[c.start + i]) { squares += (push - (of(c, "grpo_push", i) || 0)) ** 2; count++; }
  }
  if (valuesOf(p.completions[0].page, "grpo_push")) p.distance = Math.sqrt(squares / (count || 1));
}
function largest(kind, prompts) {
  let found = 0;
  for (const p of prompts) for (const c of p.completions) for (const k of [kind, "grpo_" + kind]) {
    const values = valuesOf(c.page, k) || [];
    for (let i = c.start; i < c.start + c.tokens; i++) if (Math.abs(values[i]) > found) found = Math.abs(values[i]);
  }
  return found || 1;
}
function offsets(c) { // where the text of each token begins
  if (!c.offsets) {
    c.offsets = new Uint32Array(c.tokens + 1);
    for (let i = 0; i < c.tokens; i++) c.offsets[i + 1] = c.offsets[i] + c.page.numbers.length[c.start + i];
  }
  return c.offsets;
}
const segmenter = globalThis.Intl?.Segmenter ? new Intl.Segmenter(undefined, { granularity: "grapheme" }) : null;
function divides(text, where) { // whether a character ends there
  if (!segmenter || where === 0 || where >= text.length) return true;
  if (text.charCodeAt(where) < 0x300 && text.charCodeAt(where - 1) < 0x300) return true;
  const from = Math.max(0, where - 24);
  return segmenter.segment(text.slice(from, where + 8)).containing(where - from).index === where - from;
}
function pieceEnd(c, i) { // the end of the tokens from `i` on that form whole characters
  const starts = offsets(c), { generated } = c.page.numbers;
  for (i++; i < c.tokens; i++)
    if (generated[c.start + i] !== generated[c.start + i - 1]
      || starts[i] > starts[i - 1] && divides(c.text, starts[i])) return i;
  return i;
}

// Drawing

async function draw(then) { // `then` is called if nothing else was asked for meanwhile
  clearTimeout(typing);
  const mine = ++turn, wanted = $("beside").value;
  const compared = runs.flatMap(run => run.steps).find(step => step.name === wanted);
  document.body.setAttribute("aria-busy", "true");
  try {
    const second = compared && compared !== steps[at] ? decoded(compared) : null;
    const pages = await Promise.all([decoded(steps[at]), second]);
    if (mine !== turn) return;
    [now, other] = pages;
    render();
    if (then) then();
    for (const next of [steps[at - 1], steps[at + 1]]) // while this one is read
      if (next) setTimeout(() => mine === turn && decoded(next).catch(() => {}), 50);
  } catch (error) {
    if (mine !== turn) return;
    $("shown").textContent = `${steps[at].name} cannot be read: ${error}`;
  }
  document.body.setAttribute("aria-busy", "false");
}
function render() {
  tip(null); cursor = null;
  for (const name in paints) paints[name] = getComputedStyle(document.documentElement).getPropertyValue("--" + name);
  const inList = $("prompts").contains(document.activeElement), step = steps[at];
  const kinds = Object.keys(KINDS).filter(k => now.kinds.includes(k));
  const kind = kinds.includes($("colour").value) ? $("colour").value : kinds[0];
  const option = value => make("option", { value, textContent: NAMES[value], title: KINDS[value][1] });
  $("colour").replaceChildren(...kinds.map(option));
  $("colour").value = kind;
  const hasGrpo = now.kinds.includes("grpo_" + kind);
  chooseBeside(hasGrpo);
  $("title").textContent = `${now.title} · baseline ${now.baseline}`;
  $("which").textContent = `${now.mode} ${now.step}`;
  $("step").value = at; $("step").setAttribute("aria-valuetext", `${now.mode} ${now.step}`);
  document.title = `${now.title}, ${now.mode} ${now.step}`;
  list(inList);
  const group = now.prompts[prompt], twin = other && other.prompts.find(p => p.prompt === group.prompt);
  const ofStep = $("scale").value === "step";
  most = largest(kind, ofStep ? [...now.prompts, ...(other ? other.prompts : [])] : [group, ...(twin ? [twin] : [])]);
  legend(kind);
  const grpo = hasGrpo && $("beside").value === "grpo";
  $("shown").className = grpo || other ? "beside" : "";
  columnsOfText = Math.max(20, $("main").clientWidth / ((grpo || other) && innerWidth > 600 ? 2 : 1) / 8.2);
  filler.disconnect();
  const needle = $("search").value.toLowerCase(), columns = Object.entries(group.columns);
  const entry = ([name, text]) => [make("dt", { textContent: name }), make("dd", { dir: "auto" }, ...lines(text))];
  const count = Math.max(group.completions.length, twin ? twin.completions.length : 0), blocks = [];
  for (let row = 0; row < count; row++) {
    const c = group.completions[row];
    if (!$("failed").checked || !c || fails(c)) blocks.push(completion(row, c, twin && twin.completions[row], grpo, kind, needle));
  }
  $("shown").replaceChildren(
    make("p", { className: "prompt", dir: "auto" }, ...lines(group.prompt)),
    ...(columns.length ? [make("dl", { className: "columns" }, ...columns.flatMap(entry))] : []),
    ...(other && !twin ? [make("p", { textContent: `This prompt is not in ${other.at.name}.` })] : []),
    ...blocks,
  );
  const heads = [...document.querySelectorAll(".head")];
  heads.map(head => head.offsetHeight).forEach((height, k) => heads[k].parentNode.style.setProperty("--head", height + "px"));
  for (const box of document.querySelectorAll(".tokens")) {
    if (box.getBoundingClientRect().top > innerHeight + 300) break;
    box.fill?.();
  }
  curves();
  const place = [step.id, prompt, kind, $("beside").value || "nothing", ...(runs.length > 1 ? [step.about.run] : [])];
  link = "#" + place.map(encodeURIComponent).join("/"); // so that a reload shows the same
  if (location.protocol !== "about:") location.replace(link); // in a notebook's frame it would load the notebook
}
function chooseBeside(hasGrpo) {
  const names = runs.flatMap(run => run.steps).map(s => s.name);
  const options = [["", "nothing"], ...(hasGrpo ? [["grpo", "GRPO"]] : [])];
  if (names.length > 1) options.push(...names.map(name => [name, name]));
  const before = $("beside").value, wanted = options.some(([value]) => value === before) ? before : hasGrpo ? "grpo" : "";
  $("beside").replaceChildren(...options.map(([value, textContent]) => make("option", { value, textContent })));
  $("beside").value = wanted;
  $("shared").hidden = !other;
}
function fails(c) { return c.reward !== null && c.reward < (range.lowest + range.highest) / 2; }
let range = { lowest: 0, highest: 0 }; // of the rewards of all steps
const texts = p => [p.prompt, ...Object.values(p.columns), ...p.completions.map(c => c.text)];
function order() { // the prompts that are listed
  const [, key] = SORTS[$("sort").value], needle = $("search").value.toLowerCase();
  const found = [...now.prompts.keys()].filter(i => {
    const p = now.prompts[i];
    return (!$("varied").checked || p.spread > 1e-9) && (!$("failed").checked || p.completions.some(fails))
      && (!other || !$("both").checked || other.prompts.some(q => q.prompt === p.prompt))
      && (!needle || texts(p).some(text => text.toLowerCase().includes(needle)));
  });
  return key ? found.sort((a, b) => key(now.prompts[a]) - key(now.prompts[b]) || a - b) : found;
}
let listed = [];
function list(inList) {
  const needs = { distance: "grpo_push", push: "push" };
  const sorts = Object.keys(SORTS).filter(key => !needs[key] || now.kinds.includes(needs[key]));
  const sorted = sorts.includes($("sort").value) ? $("sort").value : "order";
  $("sort").replaceChildren(...sorts.map(value => make("option", { value, textContent: SORTS[value][0] })));
  $("sort").value = sorted;
  listed = order();
  prompt = Math.max(0, Math.min(prompt, now.prompts.length - 1));
  if (listed.length && !listed.includes(prompt)) prompt = listed[0];
  const first = now.prompts[0].prompt, numbers = {
    length: p => `${p.length} tokens`, push: p => `push ${number(p.push, 3)}`, distance: p => `${number(p.distance, 3)} from GRPO`,
  };
  let shared = [...first].findIndex((_, i) => now.prompts.some(p => p.prompt[i] !== first[i])); // what all begin with
  while (shared > 0 && /\S/.test(first[shared - 1])) shared--; // to the beginning of a word
  const buttons = listed.map(i => {
    const p = now.prompts[i], what = (numbers[sorted] || (p => `reward ${number(p.reward)}`))(p);
    const snippet = shared > 0 ? "… " + p.prompt.slice(shared, shared + 200) : p.prompt.slice(0, 200);
    const button = make("button", { onclick: () => go(i) }, `prompt ${i} · ${what}`, make("small", { dir: "auto", textContent: snippet }));
    button.setAttribute("aria-current", i === prompt);
    return button;
  });
  const more = now.left_out ? [make("p", { textContent: `${now.left_out} more prompts are not recorded.` })] : [];
  $("prompts").replaceChildren(...buttons, ...more);
  $("found").textContent = listed.length < now.prompts.length ? `${listed.length} of ${now.prompts.length} prompts` : "";
  const current = $("prompts").querySelector("[aria-current=true]");
  if (current) { current.scrollIntoView({ block: "nearest" }); if (inList) current.focus(); }
}
function legend(kind) {
  $("legend").hidden = !kind; // of a batch that has no advantages yet
  if (!kind) return;
  const signed = SIGNED.includes(kind), end = (kind === "logp" ? -most : most).toPrecision(2);
  $("low").textContent = signed ? "-" + end : "0";
  $("high").textContent = `${end} in ${other ? `both ${$("scale").value}s` : `this ${$("scale").value}`}`;
  const stop = (name, share, place) => `rgb(var(--${name}) / ${(.6 * depth(kind, share * most)).toFixed(3)}) ${place}%`;
  const shares = [0, .01, .04, .1, .25, .5, 1];
  const parts = signed ? shares.map(s => stop("less", s, 50 - 50 * s)).reverse().concat(shares.map(s => stop("more", s, 50 + 50 * s)))
    : [stop("plain", 0, 0), stop("plain", 1, 100)];
  $("bar").style.background = `linear-gradient(90deg, ${parts.join(", ")})`;
  $("meaning").textContent = KINDS[kind][1] + ".";
}
function lines(text) { // with a dimmed sign before each line break
  const parts = text.split("\n");
  return parts.flatMap((part, i) => i ? [make("i", { textContent: "↵" }), "\n", part] : [part]);
}
function told(c) { // rewards and length
  const of = c.page.rewards.map((name, k) => `${name} ${number(c.rewards[k])}`);
  const alone = of.length === 0 || of.length === 1 && c.rewards[0] === c.reward;
  return `reward ${number(c.reward)}${alone ? "" : ` (${of.join(", ")})`} · ${c.tokens} tokens`;
}
function completion(row, c, twin, grpo, kind, needle) { // with what stands beside it; one of the two may be missing
  const block = make("section", { className: "completion" }), sides = make("div", { className: "sides" }), chartBox = make("div");
  const head = make("div", { className: "head" }, make("b", { textContent: `completion ${row}` }));
  const title = (page, c) => `${page.at.name} · ${page.baseline} · ${told(c)}`;
  if (other) sides.append(twin ? side(twin, row, kind, title(other, twin), kind, needle).box : make("div"));
  else if (grpo) sides.append(side(c, row, "grpo_" + kind, "GRPO", kind, needle).box);
  block.append(head, chartBox, sides);
  if (!c) return block;
  const own = side(c, row, kind, other ? title(now, c) : grpo ? now.baseline : "", kind, needle);
  sides.append(own.box);
  if (!other) head.append(make("span", { className: "told", textContent: told(c) }));
  if (valuesOf(c.page, "push"))
    head.append(make("button", { className: "hardest", textContent: "largest push", onclick: () => own.jump(hardest(c)) }));
  if (!valuesOf(c.page, "advantage")) return block;
  const toggle = make("button", { className: "toggle", textContent: "chart" });
  const open = () => {
    toggle.setAttribute("aria-expanded", charts.has(row));
    chartBox.replaceChildren(...(charts.has(row) ? [chart(c, own)] : []));
  };
  toggle.onclick = () => { if (!charts.delete(row)) charts.add(row); open(); };
  head.append(toggle);
  open();
  return block;
}
// Tokens are drawn when they are about to be looked at
const filler = new IntersectionObserver(seen => seen.forEach(of => of.isIntersecting && of.target.fill?.()), { rootMargin: "300px" });
let columnsOfText = 80; // characters in a line, about
function hardest(c) {
  let best = 0;
  for (let i = 0; i < c.tokens; i++) if (Math.abs(of(c, "push", i) || 0) > Math.abs(of(c, "push", best) || 0)) best = i;
  return best;
}
function depth(kind, x) { // how dark: of pushes and advantages the root, so that small ones show beside large ones
  const share = Math.min(Math.abs(x) / most, 1);
  return SIGNED.includes(kind) ? Math.sqrt(share) : share;
}
function shade(kind, x) { // a class of colour
  const level = Math.round(SHADES * depth(kind, x)) || 0;
  return level ? paintOf(kind, x) + level : "";
}
const paintOf = (kind, x) => SIGNED.includes(kind) ? (x < 0 ? "less" : "more") : "plain";
function side(c, row, key, label, kind, needle) { // a completion's tokens, in the colours of the numbers `key`
  const box = make("div", { className: "tokens", dir: "auto", tabIndex: 0 });
  const values = valuesOf(c.page, key) || new Float32Array(c.page.tokens).fill(NaN), { generated } = c.page.numbers;
  const energy = valuesOf(c.page, "energy"), starts = offsets(c);
  const matches = needle ? found(c, needle) : [];
  let to = 0, next = 0, more = null;
  const add = until => {
    const pieces = document.createDocumentFragment();
    while (to < Math.min(until, c.tokens)) {
      const from = to;
      to = pieceEnd(c, from);
      let x = values[c.start + from], unlikely = false;
      for (let i = from; i < to; i++) {
        if (Math.abs(values[c.start + i]) > Math.abs(x)) x = values[c.start + i];
        unlikely = unlikely || energy && energy[c.start + i] > 1.5;
      }
      const text = c.text.slice(starts[from], starts[to]) || "·", span = document.createElement("span");
      if (text.includes("\n")) span.append(...lines(text)); else span.textContent = text;
      while (next < matches.length && matches[next] + needle.length <= starts[from]) next++;
      const hit = next < matches.length && matches[next] < starts[to];
      const names = [generated[c.start + from] ? shade(kind, x) : "tool", unlikely && "unlikely", hit && "hit"].filter(Boolean);
      if (names.length) span.className = names.join(" ");
      Object.assign(span, { completion: c, from, to });
      pieces.append(span);
    }
    if (more) more.remove();
    box.append(pieces);
    const rest = c.tokens - to, text = `show ${Math.min(SHOWN, rest)} of ${rest} more tokens`;
    more = rest ? make("button", { textContent: text, onclick: () => add(to + SHOWN) }) : null;
    if (more) box.append(more);
  };
  const jump = i => { // to a token
    box.fill?.();
    if (i >= to) add(i + 100);
    const span = [...box.children].find(of => of.completion && of.from <= i && i < of.to);
    if (span) jumpTo(span, true);
  };
  box.setAttribute("aria-label", `completion ${row}: its tokens; arrow keys read their numbers`);
  box.onkeydown = e => {
    const by = !modified(e) && { ArrowRight: "nextSibling", ArrowLeft: "previousSibling" }[e.key];
    if (!by) return;
    e.preventDefault(); e.stopPropagation(); box.fill?.();
    const span = cursor && cursor.parentNode === box ? cursor[by] : box.firstChild;
    if (span && span.completion) focusOn(span, true);
  };
  box.onblur = () => tip(null);
  box.fill = () => {
    filler.unobserve(box); delete box.fill; box.style.minHeight = "";
    add(SHOWN);
    while (matches.length && to < c.tokens && starts[to] <= matches[matches.length - 1]) add(to + SHOWN);
  };
  box.style.minHeight = Math.ceil(starts[Math.min(SHOWN, c.tokens)] / columnsOfText) * 1.8 * 13 + "px"; // about
  if (needle) box.fill(); else filler.observe(box);
  const strip = make("canvas", { className: "strip", width: 300, height: 1, title: "where the pushes are; a click goes there" });
  drawStrip(strip, c, values, kind);
  strip.onclick = e => jump(Math.min(c.tokens - 1, Math.floor(e.offsetX / strip.clientWidth * c.tokens)));
  strip.hidden = c.tokens < LONG;
  const top = make("div", { className: "top" }, make("div", { className: "label", textContent: label }), strip);
  return { box: make("div", { className: "side" }, top, box), jump };
}
function drawStrip(canvas, c, values, kind) { // the largest number of each part
  const context = canvas.getContext("2d"), width = canvas.width;
  for (let k = 0; k < width; k++) {
    let x = 0;
    const from = Math.floor(k * c.tokens / width), to = Math.max(from + 1, Math.floor((k + 1) * c.tokens / width));
    for (let i = from; i < to && i < c.tokens; i++) if (Math.abs(values[c.start + i]) > Math.abs(x)) x = values[c.start + i];
    if (!x) continue;
    context.fillStyle = `rgb(${paints[paintOf(kind, x)]} / ${depth(kind, x).toFixed(3)})`;
    context.fillRect(k, 0, 1, 1);
  }
}
function found(c, needle) { // where a text is
  const text = c.lower ??= c.text.toLowerCase(), places = [];
  if (text.length !== c.text.length) return places; // of letters whose small form is longer, places would be others
  for (let i = text.indexOf(needle); i >= 0; i = text.indexOf(needle, i + needle.length)) places.push(i);
  return places;
}
function focusOn(span, told) {
  if (cursor) cursor.classList.remove("at");
  cursor = span; span.classList.add("at");
  const box = span.getBoundingClientRect();
  if (told) tip(span, box.left, box.bottom);
}
function jumpTo(span, told) {
  span.scrollIntoView({ block: "center" });
  focusOn(span, false);
  if (told) requestAnimationFrame(() => requestAnimationFrame(() => cursor === span && focusOn(span, true))); // scrolling hides it
}

// Curves

function svg(tag, props, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const name in props) element.setAttribute(name, props[name]);
  element.append(...children);
  return element;
}
function plot(series, { from, to, low, high, mark, pick, label }) { // of each {name, points: [[x, y]]}
  const x = of => ((of - from) / ((to - from) || 1) * 1000).toFixed(1);
  const y = of => (90 - 90 * (Math.max(low, Math.min(high, of)) - low) / ((high - low) || 1)).toFixed(1);
  const about = `${series.map(s => s.name).join(", ")}: from ${number(low)} to ${number(high)}`;
  const all = svg("svg", { viewBox: "0 0 1000 90", preserveAspectRatio: "none", role: "img", "aria-label": about });
  if (low < 0 && high > 0) all.append(svg("line", { x1: 0, x2: 1000, y1: y(0), y2: y(0), class: "zero" }));
  if (mark != null) all.append(svg("line", { x1: x(mark), x2: x(mark), y1: 0, y2: 90, class: "mark" }));
  series.forEach(({ points }, k) => {
    const drawn = points.length === 1 ? [points[0], points[0]] : points; // one alone is a dot
    const props = { points: drawn.map(p => `${x(p[0])},${y(p[1])}`).join(" "), class: `s${k}${points.length === 1 ? " dot" : ""}` };
    all.append(svg("polyline", props));
  });
  all.onclick = e => {
    const box = all.getBoundingClientRect();
    pick(from + (e.clientX - box.left) / box.width * (to - from));
  };
  const texts = of => of.map(textContent => make("span", { textContent }));
  const ends = [number(high, 2), ...(low === -high ? ["0"] : []), number(low, 2)];
  const names = series.flatMap(({ name }, k) => [make("span", { className: "s" + k, textContent: (k ? "╌ " : "─ ") + name }), "  "]);
  return make("div", { className: "plot" },
    make("div", { className: "y" }, ...texts(ends)), all,
    make("div", { className: "x" }, ...texts([number(from, 9), label, number(to, 9)])), make("div", { className: "names" }, ...names));
}
function curveOf(c, kind) { // of each part of a completion the token with the largest number
  const points = [], size = Math.max(1, Math.ceil(c.tokens / POINTS));
  for (let i = 0; i < c.tokens; i += size) {
    let best = null;
    for (let j = i; j < Math.min(i + size, c.tokens); j++) {
      const x = of(c, kind, j);
      if (!Number.isNaN(x) && (!best || Math.abs(x) > Math.abs(best[1]))) best = [j, x];
    }
    if (best) points.push(best);
  }
  return points;
}
function chart(c, own) { // of a completion's tokens
  const kinds = ["advantage", "baseline"].filter(kind => valuesOf(c.page, kind));
  const series = kinds.map(kind => ({ name: NAMES[kind], points: curveOf(c, kind) }));
  const high = Math.max(1e-9, ...series.flatMap(s => s.points.map(p => Math.abs(p[1])))), last = c.tokens - 1;
  const pick = i => own.jump(Math.max(0, Math.min(last, Math.round(i))));
  return plot(series, { from: 0, to: Math.max(last, 1), low: -high, high, mark: null, pick, label: "token" });
}
function curves() { // of the run: what its steps say of themselves
  $("course").hidden = steps.length < 2;
  if (steps.length < 2 || !$("course").open) return;
  const line = (name, key, mode) => {
    const known = steps.filter(s => s.mode === mode && s.about[key] != null);
    return { name, points: known.map(s => [s.step, s.about[key]]) };
  };
  const drawn = lines => lines.filter(s => s.points.length), heights = lines => lines.flatMap(s => s.points.map(p => p[1]));
  const rewards = drawn([line("reward", "mean", "train"), line("reward, eval", "mean", "eval")]);
  const learned = drawn([
    line("explained: share of the power that predictions remove", "explained", "train"),
    line("kept: share of completions left with the others' mean alone", "kept", "train"),
  ]);
  const pick = x => {
    const far = steps.map(s => Math.abs(s.step - x));
    at = far.indexOf(Math.min(...far));
    draw();
  };
  const common = { from: steps[0].step, to: steps[steps.length - 1].step, mark: steps[at].step, pick, label: "step" };
  const ofRewards = { low: Math.min(...heights(rewards)), high: Math.max(...heights(rewards)) };
  const ofLearned = { low: Math.max(-1, Math.min(0, ...heights(learned))), high: 1 };
  const plots = [[rewards, ofRewards], [learned, ofLearned]].filter(([lines]) => lines.length);
  $("curves").replaceChildren(...plots.map(([lines, ends]) => plot(lines, { ...common, ...ends })));
}

// What the pointer and keys do

function tip(span, x, y) {
  const box = $("tip");
  box.style.display = span ? "block" : "none";
  if (!span) return;
  const { completion: c, from, to } = span, tokens = Array.from({ length: to - from }, (_, k) => from + k), starts = offsets(c);
  const text = JSON.stringify(c.text.slice(starts[from], starts[to])), several = tokens.length > 1;
  const rows = [several ? `tokens ${from} to ${to - 1} form ${text}` : `token ${from} ${text}`];
  if (!c.page.numbers.generated[c.start + from]) rows.push("not generated: of a tool, or masked");
  else for (const kind of Object.keys(NAMES)) {
    if (!valuesOf(c.page, kind)) continue;
    rows.push(NAMES[kind].padEnd(22) + tokens.map(i => number(of(c, kind, i))).join(" · "));
    if (kind === "advantage" && !several) rows.push(...parts(c, from));
  }
  box.textContent = rows.join("\n");
  box.style.left = box.style.top = "0";
  const size = box.getBoundingClientRect();
  box.style.left = Math.max(4, Math.min(x + 14, innerWidth - size.width - 8)) + "px";
  box.style.top = (y + 14 + size.height > innerHeight ? Math.max(4, y - size.height - 24) : y + 14) + "px";
}
function parts(c, i) { // what an advantage is made of: G − (B0 + prefix + later luck), and what that says
  const k = c.start + i, { luck, prefix } = c.page.numbers, reward = returned(c, k), baseline = of(c, "baseline", i);
  if (reward == null || Number.isNaN(baseline)) return [];
  const added = x => `${x < 0 ? "−" : "+"} ${unsigned(x)}`, first = x => (x < 0 ? "−" : "") + unsigned(x);
  const sum = prefix ? `(${first(start(c, k))} ${added(prefix[k])} ${added(luck[k])})` : baseline < 0 ? `(${first(baseline)})` : first(baseline);
  const names = prefix ? "(others' mean + what the text so far predicts + luck of later tokens)" : "baseline";
  const what = c.page.numbers.returns ? "reward from here" : "reward", scaled = c.scale !== 1 && c.scale != null;
  const divided = (text, by) => scaled ? `  = (${text}) / ${by}` : `  = ${text}`;
  return [divided(`${first(reward)} − ${sum}`, unsigned(c.scale)), divided(`${what} − ${names}`, "scale"), ...prefix ? [story(reward - baseline, luck[k])] : []];
}
function story(advantage, luck) { // of a token, in one line
  const better = advantage > 0, lucky = luck > 0;
  if (Math.abs(advantage) < 1e-3) return "  = as expected here";
  const told = Math.abs(luck) < 0.1 * Math.abs(advantage) ? "" : better === lucky
    ? `, even without the ${lucky ? "luck" : "bad luck"} of later tokens` : `, although later tokens were ${lucky ? "lucky" : "unlucky"}`;
  return `  = ${better ? "better" : "worse"} than expected here${told}`;
}
function go(i) { // to a prompt, at its top
  prompt = i;
  draw(() => { $("main").scrollTop = 0; if ($("main").getBoundingClientRect().top < 0) $("main").scrollIntoView(); });
}
function nextMatch() { // of the search: in this prompt, in the next ones, and in later steps
  const needle = $("search").value.toLowerCase();
  if (!needle) return;
  const hits = [...document.querySelectorAll("#shown .hit")], after = hits.indexOf(cursor) + 1;
  if (hits[after]) return jumpTo(hits[after], false);
  const place = listed.indexOf(prompt), first = () => { const hit = document.querySelector("#shown .hit"); if (hit) jumpTo(hit, false); };
  if (place + 1 < listed.length) { prompt = listed[place + 1]; return draw(first); }
  laterStep(needle, first);
}
async function laterStep(needle, then) {
  document.body.setAttribute("aria-busy", "true");
  for (let k = 1; k <= steps.length; k++) {
    const where = (at + k) % steps.length, page = await decoded(steps[where]).catch(() => null);
    if (!page || !page.prompts.some(p => texts(p).some(text => text.toLowerCase().includes(needle)))) continue;
    at = where; prompt = 0; // or the first one that is listed
    return draw(then);
  }
  $("found").textContent = "found in no step";
  document.body.setAttribute("aria-busy", "false");
}
$("main").onmousemove = e => { const span = e.target.closest?.(".tokens span"); tip(span, e.clientX, e.clientY); };
$("main").onmouseleave = () => tip(null);
addEventListener("scroll", () => tip(null), { capture: true, passive: true });
for (const id of ["colour", "beside", "scale", "sort", "both", "varied", "failed"]) $(id).onchange = () => draw();
let typing;
$("search").oninput = () => { // once there is a pause
  document.body.setAttribute("aria-busy", "true");
  clearTimeout(typing);
  typing = setTimeout(draw, 120);
};
$("search").onkeydown = e => { if (e.key === "Enter") { e.preventDefault(); nextMatch(); } };
$("course").ontoggle = () => { if (now) curves(); };
$("step").oninput = e => { at = +e.target.value; draw(); };
$("run").onchange = () => {
  const { id } = steps[at];
  useRun($("run").value);
  const same = steps.findIndex(s => s.id === id);
  at = same >= 0 ? same : steps.length - 1;
  draw();
};
document.onkeydown = e => { // left and right: steps; up and down: prompts
  if (modified(e) || e.target.matches?.("select, input:not([type=checkbox])")) return;
  if (e.key === "/") { e.preventDefault(); $("find").open = true; $("search").focus(); return; }
  const [kind, by] = { ArrowRight: ["step", 1], ArrowLeft: ["step", -1], ArrowDown: ["prompt", 1], ArrowUp: ["prompt", -1] }[e.key] || [];
  if (!by || !now) return;
  e.preventDefault();
  if (kind === "step") { at = Math.max(0, Math.min(steps.length - 1, at + by)); return draw(); }
  const to = listed[listed.indexOf(prompt) + by];
  if (to !== undefined) go(to);
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (now) draw(); });

// Opening

function useRun(name) {
  steps = (runs.find(run => run.name === name) || runs[0]).steps;
  $("run").value = steps[0].about.run;
  $("step").max = steps.length - 1; $("step").disabled = steps.length === 1;
}
document.addEventListener("DOMContentLoaded", async () => { // steps are data, which the browser never runs
  const shades = make("style");
  for (const name in paints) for (let k = 1; k <= SHADES; k++)
    shades.append(`.${name}${k} { background: rgb(var(--${name}) / ${(.6 * k / SHADES).toFixed(3)}) }\n`);
  document.head.append(shades);
  $("find").open = innerWidth > 600;
  const recorded = new Map(); // the last recording of a step, in the order of steps
  for (const block of document.querySelectorAll("script[data-about]")) {
    const { step, mode, about } = block.dataset, parsed = JSON.parse(about), id = `${mode}-${step}`;
    recorded.set(`${parsed.run}/${id}`, { block, mode, step: +step, about: parsed, id });
  }
  for (const step of recorded.values()) {
    const name = step.about.run, run = runs.find(of => of.name === name) || runs[runs.push({ name, steps: [] }) - 1];
    run.steps.push(step);
  }
  for (const run of runs) run.steps.sort((a, b) => a.step - b.step || (a.mode < b.mode ? 1 : -1));
  for (const run of runs) for (const s of run.steps) s.name = `${runs.length > 1 ? run.name + " " : ""}${s.mode} ${s.step}`;
  for (const run of runs) { // the last step was cut off if writing was
    while (run.steps.length) try { await decoded(run.steps[run.steps.length - 1]); break; } catch { run.steps.pop(); }
  }
  runs = runs.filter(run => run.steps.length);
  if (!runs.length) { $("shown").textContent = "No step is recorded yet."; return; }
  const known = runs.flatMap(run => run.steps.map(s => s.about));
  range = { lowest: Math.min(...known.map(a => a.lowest ?? Infinity)), highest: Math.max(...known.map(a => a.highest ?? -Infinity)) };
  $("of_run").hidden = runs.length < 2;
  $("run").replaceChildren(...runs.map(({ name }) => make("option", { value: name, textContent: name })));
  $("sort").replaceChildren(...Object.entries(SORTS).map(([value, [textContent]]) => make("option", { value, textContent })));
  useRun(runs[0].name);
  at = steps.length - 1;
  let beside = "grpo";
  if (runs.length > 1) { // what both have recorded, an evaluation if there is one, since its prompts are the same
    const twin = s => runs[1].steps.find(of => of.id === s.id), both = steps.filter(twin);
    const last = both.filter(s => s.mode === "eval").pop() || both.pop();
    if (last) { at = steps.indexOf(last); beside = twin(last).name; }
  }
  choose("beside", beside);
  show();
});
function choose(list, value) { // before the page has filled the list
  $(list).append(make("option", { value }));
  $(list).value = value;
}
async function show() { // what the link asks for: #STEP/PROMPT/COLOUR/BESIDE/RUN
  const decode = part => { try { return decodeURIComponent(part); } catch { return part; } };
  const [step, where, kind, beside, run] = location.hash.slice(1).split("/").map(decode);
  if (run) useRun(run);
  const asked = steps.findIndex(s => s.id === step || String(s.step) === step);
  at = asked >= 0 ? asked : Math.min(at, steps.length - 1);
  const page = await decoded(steps[at]).catch(() => null);
  if (!page) return draw(); // which says what is wrong
  const spreads = page.prompts.map(p => p.spread ?? -1); // by default the prompt whose rewards vary most
  prompt = asked >= 0 && where ? +where || 0 : spreads.indexOf(Math.max(...spreads));
  if (page.kinds.includes(kind)) choose("colour", kind);
  if (beside) choose("beside", beside === "nothing" ? "" : beside);
  draw(() => { if (step && asked < 0) $("which").textContent += ` (${step} is not recorded)`; });
}
onhashchange = () => { if (location.hash !== link) show(); };

// What is wrong with a page as it is shown: everything is a list of complaints, but for `texts` and `charts`.
function measure() {
  const root = document.documentElement;
  const texts = shownTexts();
  return {
    overflow: root.scrollWidth - root.clientWidth,
    outside: texts.filter(isOutside).map(described),
    touching: touching(texts),
    faint: texts.filter(text => contrast(text) < 4.5).map(text => `${described(text)}: ${contrast(text).toFixed(2)}`),
    empty: charts().filter(chart => !(chart.width > 20 && chart.height > 5)).map(chart => chart.name),
    texts: texts.length,
    charts: charts().length,
  };
}

// Every run of text that takes up room: the box of each of its lines, and the element it is in.
function shownTexts() {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const parent = node.parentElement;
    if (!node.data.trim() || parent.closest("title") || !parent.checkVisibility({contentVisibilityAuto: true, visibilityProperty: true})) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects())
      if (box.width > 0 && box.height > 0) found.push({node, parent, box});
  }
  return found;
}

// Text must lie within the page, or within a box that scrolls; in a chart's text within the chart's own figure.
function isOutside({parent, box}) {
  if (parent.closest(".scroll")) return false;
  const frame = (parent.closest("figure") || document.body).getBoundingClientRect();
  return box.left < frame.left - 1 || box.right > frame.right + 1;
}

function touching(texts) {
  const sorted = texts.map(text => ({...text, box: shrunk(text.box)})).sort((a, b) => a.box.top - b.box.top);
  const complaints = [];
  sorted.forEach((one, i) => {
    for (let j = i + 1; j < sorted.length && sorted[j].box.top < one.box.bottom; j++) {
      const other = sorted[j];
      const apart = one.box.right <= other.box.left || other.box.right <= one.box.left;
      if (!apart && one.node !== other.node && !scrolledAway(one, other)) complaints.push(`${described(one)} / ${described(other)}`);
    }
  });
  return complaints;
}

// A line's box is higher than its letters; what counts is whether these meet.
function shrunk(box) {
  const cut = box.height / 5;
  return {left: box.left + 0.5, right: box.right - 0.5, top: box.top + cut, bottom: box.bottom - cut};
}

// What is scrolled out of its own box is not drawn, and so touches nothing outside of it.
function scrolledAway(one, other) {
  const box = one.parent.closest(".scroll") || other.parent.closest(".scroll");
  return one.parent.closest(".scroll") !== other.parent.closest(".scroll") && box !== null;
}

function charts() {
  return [...document.querySelectorAll("svg:not(.patterns, svg svg)")]
    .filter(chart => chart.checkVisibility())
    .filter(chart => !chart.matches(".swatch"))
    .map(chart => ({name: chart.getAttribute("class"), width: chart.getBoundingClientRect().width, height: chart.getBoundingClientRect().height}));
}

// As WCAG 2 has it.
function contrast({parent}) {
  const style = getComputedStyle(parent);
  const [one, other] = [luminance(parent instanceof SVGElement ? style.fill : style.color), luminance(background(parent))];
  return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
}

function background(start) {
  for (let each = start; each; each = each.parentElement) {
    const color = getComputedStyle(each).backgroundColor;
    if (!/, 0\)$/.test(color)) return color;
  }
  throw new Error("no background");
}

function luminance(color) {
  const parts = /^rgb\((\d+), (\d+), (\d+)\)$/.exec(color);
  if (!parts) throw new Error(`not an opaque colour: ${color}`);
  const [red, green, blue] = parts.slice(1).map(part => part / 255).map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function described({node}) {
  const at = node.parentElement.closest("[class]");
  return `${JSON.stringify(node.data.slice(0, 40))} in ${at ? at.getAttribute("class") : node.parentElement.tagName}`;
}

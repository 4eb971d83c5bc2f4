// What the tests ask of a page in the browser. Each function answers with plain values; `look` with all of them.

// Each drawing: its name, its size and its place's in pixels, how many marks it has.
function drawings() {
  const isMark = (element) => {
    const size = element.getBoundingClientRect();
    const isFrame = element.closest("[class*=role-axis]") || element.matches(".background, .foreground");
    return size.width + size.height > 0 && !isFrame;
  };
  return [...document.querySelectorAll(".drawing")].map((place) => {
    const svg = place.querySelector("svg");
    const { width, height } = svg.getBoundingClientRect();
    const marks = [...svg.querySelectorAll("path, line, rect")].filter(isMark).length;
    return { name: place.ariaLabel, width, height, room: place.clientWidth, marks };
  });
}

// Texts of a drawing that stand over one another, in pairs.
function overlaps() {
  const found = [];
  for (const svg of document.querySelectorAll(".drawing svg")) {
    const isSeen = (text) => text.textContent.trim() && Number(getComputedStyle(text).opacity) > 0;
    const texts = [...svg.querySelectorAll("text")].filter(isSeen);
    const boxes = texts.map((text) => text.getBoundingClientRect());
    for (let one = 0; one < texts.length; one++) {
      for (let other = one + 1; other < texts.length; other++) {
        const [a, b] = [boxes[one], boxes[other]];
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 1 && high > 3) found.push(`${texts[one].textContent} / ${texts[other].textContent}`);
      }
    }
  }
  return found;
}

const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });

// A colour of CSS, whatever it is written like, as red, green, blue (0 to 255) and opacity (0 to 1).
function rgba(colour) {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data;
  return [red, green, blue, alpha / 255];
}

const over = (front, back) => [0, 1, 2].map((n) => front[n] * front[3] + back[n] * (1 - front[3])).concat(1);

// The colour on which an element's text stands.
function ground(element) {
  if (!element) return [255, 255, 255, 1];
  const own = rgba(getComputedStyle(element).backgroundColor);
  return own[3] === 1 ? own : over(own, ground(element.parentElement));
}

// Relative luminance of sRGB, as WCAG 2.1 defines it.
function luminance(colour) {
  const [r, g, b] = colour.map((part) => part / 255).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// How many texts there are, and those that are hard to read: with a contrast below 4.5 (WCAG 2.1, 1.4.3), or of letters
// below 11 pixels.
function readable() {
  const found = new Set();
  let texts = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    const style = getComputedStyle(element);
    const { width, height } = element.getBoundingClientRect();
    const isSeen = width && height && style.visibility !== "hidden" && Number(style.opacity) > 0;
    if (!node.textContent.trim() || !isSeen || element.closest("script, style, noscript")) continue;
    texts += 1;
    const behind = ground(element.closest("svg")?.parentElement ?? element);
    const ink = over(rgba(element instanceof SVGElement ? style.fill : style.color), behind);
    const [low, high] = [luminance(ink), luminance(behind)].sort((a, b) => a - b);
    const contrast = (high + 0.05) / (low + 0.05);
    const pixels = parseFloat(style.fontSize);
    if (contrast < 4.5 || pixels < 11) {
      found.add(`${node.textContent.trim().slice(0, 40)}: contrast ${contrast.toFixed(2)}, ${pixels} pixels`);
    }
  }
  return { texts, unreadable: [...found] };
}

// How wide page and screen are, and what sticks out of the screen, unless it is in a box that scrolls.
function width() {
  const canScroll = (element) => ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
  const isInBox = (element) => element && (canScroll(element) || isInBox(element.parentElement));
  const sticksOut = (element) => element.getBoundingClientRect().right > innerWidth + 1;
  const out = [...document.body.querySelectorAll("*")].filter(
    (element) => sticksOut(element) && !element.closest("svg") && !isInBox(element.parentElement),
  );
  const page = document.documentElement.scrollWidth;
  return { page, screen: innerWidth, out: out.map((element) => element.outerHTML.slice(0, 120)) };
}

function look() {
  return {
    drawings: drawings(),
    overlaps: overlaps(),
    ...readable(),
    width: width(),
    ground: getComputedStyle(document.body).backgroundColor,
  };
}

// Page for photographs. The browser draws the photograph; the server renders the cards as HTML.
import { acceptFiles, connect, offerExamples } from "./page.js";

const LONGEST = 1024;  // longest side in pixels of an uploaded photograph when sent
const root = document.getElementById("photo");
const find = (what) => root.querySelector(what);
const canvas = find("canvas"), pen = canvas.getContext("2d"), slider = find(".zoom input");
const base = Number(root.dataset.base), frame = Number(root.dataset.frame);
const padding = root.dataset.padding;  // "border", "reflect" or a colour
const { request, notify } = connect(root);
let image = null;  // canvas or <img> that is drawn
let picture = null;  // value sent to the server: a JPEG in base64, or the index of an example
let x = 0, y = 0;  // offset of the photograph from the frame centre, in frame sides
let held = null;

const size = () => 2 ** Number(slider.value);

function predict() {
  draw();
  if (picture !== null) request("predict", () => ({ picture, size: size(), y, x }), show);
}

function show(reply) {
  for (const part of ["windows", "cards", "channels"]) find("." + part).innerHTML = reply[part];
  find(".below").hidden = false;
}

/** Source and target intervals along one axis, and whether they are mirrored. */
function spans(length, middle, shown, total) {
  if (padding === "reflect") {  // each copy shares its edge pixels with its neighbours
    const step = Math.max(1, shown - total / frame), start = middle - shown / 2;
    const first = Math.floor(-start / step), last = Math.ceil((total - start) / step);
    return Array.from({ length: last - first }, (_, n) => first + n)
      .map((k) => [0, length, start + k * step, start + k * step + shown, k % 2 !== 0]);
  }
  const start = Math.round(middle - shown / 2), end = Math.round(middle + shown / 2);
  const edges = padding === "border" ? [[0, 1, 0, start], [length - 1, 1, end, total]] : [];
  return [...edges, [0, length, start, end]].filter(([, , from, to]) => to > from);
}

function draw() {
  find(".zoom output").textContent = "× " + size().toFixed(2);
  if (!image) return;
  const width = image.naturalWidth || image.width, height = image.naturalHeight || image.height;
  const side = canvas.width, factor = size() * base / Math.min(width, height) * side / frame;
  const columns = spans(width, (0.5 + x) * side, width * factor, side);
  const rows = spans(height, (0.5 + y) * side, height * factor, side);
  pen.imageSmoothingQuality = "high";
  pen.fillStyle = padding;  // stays black if it is not a colour
  pen.fillRect(0, 0, side, side);
  for (const [left, w, from, to, across] of columns) {
    for (const [top, h, above, below, down] of rows) {
      const flip = [across ? -1 : 1, 0, 0, down ? -1 : 1];
      pen.setTransform(...flip, across ? from + to : 0, down ? above + below : 0);
      pen.drawImage(image, left, top, w, h, from, above, to - from, below - above);
    }
  }
  pen.resetTransform();
}

function choose(shown, sent) {
  [image, picture, x, y] = [shown, sent, 0, 0];
  find(".hint").hidden = true;
  for (const button of root.querySelectorAll(".picks button")) {
    button.setAttribute("aria-pressed", Number(button.dataset.index) === sent);
  }
  predict();
}

async function upload(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    return notify(`${file.name} is not an image that this browser can read; choose another file`);
  }
  const factor = Math.min(1, LONGEST / Math.max(bitmap.width, bitmap.height));
  const small = document.createElement("canvas");
  small.width = Math.max(1, Math.round(bitmap.width * factor));
  small.height = Math.max(1, Math.round(bitmap.height * factor));
  const context = small.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, small.width, small.height);
  choose(small, small.toDataURL("image/jpeg", 0.92).split(",")[1]);
}

function move(across, down) {
  const inside = (value) => Math.min(0.5, Math.max(-0.5, value));
  [x, y] = [inside(x + across), inside(y + down)];
  predict();
}

canvas.addEventListener("pointerdown", (event) => {
  if (event.button) return;  // the menu of the right button swallows the release
  canvas.setPointerCapture(event.pointerId);
  held = event;
});
canvas.addEventListener("pointermove", (event) => {
  if (!held) return;
  const unit = canvas.getBoundingClientRect().width;
  move((event.clientX - held.clientX) / unit, (event.clientY - held.clientY) / unit);
  held = event;
});
for (const end of ["pointerup", "pointercancel"]) {
  canvas.addEventListener(end, () => { held = null; });
}
canvas.addEventListener("keydown", (event) => {
  const steps = {
    ArrowLeft: [-0.02, 0], ArrowRight: [0.02, 0], ArrowUp: [0, -0.02], ArrowDown: [0, 0.02],
  };
  if (!(event.key in steps)) return;
  event.preventDefault();
  move(...steps[event.key]);
});

slider.addEventListener("input", predict);
find(".reset").addEventListener("click", () => {
  [slider.value, x, y] = [0, 0, 0];
  predict();
});
acceptFiles(root, root, upload);

const pick = (button) => choose(button.querySelector("img"), Number(button.dataset.index));
offerExamples(root, pick);
const first = find(".picks button");
if (first) first.querySelector("img").decode().then(() => pick(first));
